"""What a folder is that is no checkpoint of safetensors is said, with what to name instead."""

import json
import os
import re

import pytest

from shardplan.checkpoint.format.index import read_index
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.storage import open_folder
from shardplan.storage.contents import find_adapter


def fill(folder, *names):
    """Make empty files, and folders for names that end with a slash."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if name.endswith("/") else path.touch()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["pytorch_model.bin"], "its weights are PyTorch files (pytorch_model.bin); save them as safetensors"),
        (
            ["pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin"],
            "its weights are PyTorch files (pytorch_model-00001-of-00002.bin, and 1 more)",
        ),
        (["model.safetensors.incomplete"], "its download is not finished (model.safetensors.incomplete)"),
        ([".cache/huggingface/download/model.abc.incomplete"], "its download is not finished (model.abc.incomplete)"),
        (["consolidated.00.pth", "params.json"], "its weights are PyTorch files (consolidated.00.pth)"),
        (["consolidated.safetensors"], "the names of Mistral's own format"),
        (["model-q4_k.gguf"], "its weights (model-q4_k.gguf) are for llama.cpp"),
        (["__0_0.distcp"], "a distributed training checkpoint of PyTorch (__0_0.distcp)"),
        (["manifest.ocdbt"], "a checkpoint of Orbax or Levanter"),
        (["0/items/_METADATA", "plan.json"], "a checkpoint of Orbax or Levanter (0/)"),
        (["weights.tar.gz"], "it holds an archive (weights.tar.gz); unpack it"),
        (["diffusion.safetensors"], "it holds other files (diffusion.safetensors); name the"),
        ([], "is it a safetensors checkpoint?"),
    ],
)
def test_folders_without_the_weights(tmp_path, names, message):
    fill(tmp_path, "config.json", *names)
    with pytest.raises(
        CheckpointError, match=r"has neither model\.safetensors\.index\.json nor .*" + re.escape(message)
    ):
        read_index(open_folder(str(tmp_path)))


def config_error(folder):
    with pytest.raises(ConfigError) as error:
        read_config(None, open_folder(str(folder)))
    return str(error.value)


def test_an_adapter_alone(tmp_path):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    fill(tmp_path, "adapter_model.safetensors")
    assert re.search(
        r"it is an adapter \(adapter_config.json\) of org/base, not a model; name its base", config_error(tmp_path)
    )


def test_an_adapter_beside_a_model_or_below_it(tmp_path):
    folder = open_folder(str(tmp_path))
    fill(tmp_path, "model.safetensors")
    assert find_adapter(folder) is None
    fill(tmp_path, "adapter/adapter_config.json")
    assert find_adapter(folder) == os.path.join("adapter", "adapter_config.json")
    fill(tmp_path, "adapter_config.json")
    assert find_adapter(folder) == "adapter_config.json"


def test_a_folder_of_the_hubs_cache(tmp_path):
    """The snapshot of its branch main is named, whichever of its folders was given."""
    cache = tmp_path / "models--org--name"
    fill(cache, "snapshots/aaa/config.json", "snapshots/bbb/config.json", "blobs/", "refs/main")
    (cache / "refs" / "main").write_text("aaa")
    for folder in (cache, cache / "snapshots"):
        expected = (
            f"it is a folder of the cache of huggingface_hub; name its snapshot, {cache / 'snapshots' / 'aaa'}, or "
        )
        assert f"{expected}org/name" in config_error(folder)
    assert "it is the cache of huggingface_hub; name a repository in it, such as org/name" in config_error(tmp_path)
    (cache / "refs" / "main").unlink()
    assert str(cache / "snapshots" / "bbb") in config_error(cache)


def test_an_unfinished_download_of_the_hubs_cache(tmp_path, raises_message):
    cache = tmp_path / "models--org--name"
    fill(cache, "snapshots/aaa/config.json", "blobs/0123.incomplete")
    with raises_message(CheckpointError):
        read_index(open_folder(str(cache / "snapshots" / "aaa")))


def test_a_folder_of_checkpoints(tmp_path):
    fill(tmp_path, "checkpoint-500/", "checkpoint-900/")
    assert "its checkpoints are in subfolders (checkpoint-500/, and 1 more); name one of them" in config_error(tmp_path)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("<!doctype html>", "a web page"),
        ("version https://git-lfs.github.com/spec/v1", "a Git LFS pointer"),
        ("", "empty"),
    ],
)
def test_a_config_that_is_something_else(tmp_path, text, kind):
    (tmp_path / "config.json").write_text(text)
    assert f"config.json is not JSON: {kind}" in config_error(tmp_path)


def test_links_to_nothing(tmp_path, raises_message):
    (tmp_path / "model.safetensors").symlink_to("../../blobs/gone")
    with raises_message(CheckpointError):
        read_index(open_folder(str(tmp_path)))
    (tmp_path / "llama").symlink_to("/no/such/folder")
    for ref in (tmp_path / "llama", tmp_path / "llama" / "8b"):
        with raises_message(ConfigError):
            open_folder(str(ref))


def test_references_that_name_nothing(tmp_path, monkeypatch, raises_message):
    with raises_message(ConfigError):
        open_folder(str(tmp_path / "a" / "b" / "c"))
    with raises_message(ConfigError):
        open_folder(str(tmp_path / "llama"))
    with raises_message(ConfigError):
        open_folder("${CKPT}/llama")
    (tmp_path / "models").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert open_folder("~/models").ref == str(tmp_path / "models")


def test_a_bundled_model_whose_repository_is_not_reached(tmp_path, monkeypatch, raises_message):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for repository in ("meta-llama/Llama-3.1-8B", "meta-llama/Meta-Llama-3.1-8B-Instruct@main"):
        with raises_message(ConfigError):
            read_config(None, open_folder(repository))
    with raises_message(ConfigError):
        read_config(None, open_folder("org/other"))
