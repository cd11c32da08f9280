"""Trainings that begin with a checkpoint: on texts, with an export, and with a LoRA adapter."""

import json

import numpy as np
import pytest
import yaml
from conftest import ROOT
from processes import fork_python
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

STEPS, WORDS = 4, 200


@pytest.fixture(scope="module")
def folder(golden, tmp_path_factory):
    """The golden Llama with a tokenizer of fewer tokens than it has, texts, and a configuration that names them."""
    folder = tmp_path_factory.mktemp("train")
    for path in (golden / "llama").glob("*.*"):
        (folder / path.name).symlink_to(path)
    tokenizer = Tokenizer(models.WordLevel({f"t{i}": i for i in range(WORDS)}, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "t1", "eos_token": "t2"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    words = np.random.default_rng(0).integers(3, 20, (200, 40))
    texts = [json.dumps({"text": " ".join(f"t{word}" for word in row)}) for row in words]
    (folder / "texts.jsonl").write_text("\n".join(texts) + "\n")
    content = {
        "model": {"ref": str(folder)},
        "hardware": {"slice": "cpu-8"},
        "workload": {"kind": "train", "batch": 8, "position": 32, "compute_dtype": "float32"},
        "data": {
            "cache_dir": str(folder / "cache"),
            "components": {"text": {"source": {"type": "url", "train_urls": [str(folder / "texts.jsonl")]}}},
        },
        "trainer": {"num_train_steps": STEPS, "watch": {"watch_targets": []}},
        "optimizer": {"learning_rate": 0.01, "warmup": 0},
    }
    (folder / "train.yaml").write_text(yaml.safe_dump(content))
    return folder


def train(folder, output, *argv):
    """Train, and return what was printed on stderr."""
    config = ("--config", folder / "train.yaml", "--output", output)
    process = fork_python(["-m", "shardplan", "train", *config, *argv], ROOT, HF_HUB_OFFLINE="1")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return error


def losses(output):
    records = map(json.loads, (output / "metrics.jsonl").read_text().splitlines())
    return {each["step"]: each["metrics"]["train/loss"] for each in records if "train/loss" in each.get("metrics", {})}


def read_tensors(folder):
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


@pytest.mark.whole
def test_a_checkpoint_is_trained_on_texts_and_exported(folder, tmp_path):
    error = train(folder, tmp_path / "r", "--hf_save_path", tmp_path / "hf")
    assert f"training {STEPS} steps from weights of {folder}\n" in error and "loaded 0.66 MiB" in error
    found = losses(tmp_path / "r")
    assert [*found] == [*range(STEPS)] and found[STEPS - 1] < found[0]
    [exported] = (tmp_path / "hf").iterdir()
    original, trained = map(read_tensors, (folder, exported))
    assert {name: array.shape for name, array in trained.items()} == {n: each.shape for n, each in original.items()}
    assert any(np.abs(trained[name] - original[name]).max() > 0.01 for name in trained)
    again = train(folder, tmp_path / "r")
    assert f"all {STEPS} steps are done already: nothing is computed" in again


@pytest.mark.whole
def test_a_lora_adapter_is_trained(folder, tmp_path):
    error = train(folder, tmp_path / "r", "--adapter.type=lora", "--adapter.r=4", "--peft_save_path", tmp_path / "peft")
    assert "the plan is that of training all parameters; an adapter needs less memory and time" in error
    found = losses(tmp_path / "r")
    assert found[STEPS - 1] < found[0]
    [saved] = (tmp_path / "peft").iterdir()
    assert json.loads((saved / "adapter_config.json").read_text())["r"] == 4
    assert "as planned" in (tmp_path / "r" / "audit.txt").read_text()
