"""A written checkpoint holds what was loaded, as transformers, Levanter and the official library read it."""

import json
import math
import shutil

import conftest
import equinox as eqx
import jax
import numpy as np
import pytest
from conftest import MODEL_TYPES, fails, run
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from levanter.checkpoint import load_checkpoint, save_checkpoint
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from shardplan import load_pretrained, save_orbax
from shardplan.checkpoint import convert
from shardplan.checkpoint.mapping.state_dict_program import StateDictProgram, trace_program
from shardplan.checkpoint.saving import save, target, written_files
from shardplan.checkpoint.saving.save import save_levanter, save_pretrained
from shardplan.errors import CheckpointError, ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model
from shardplan.runtime.processes.watch.watch import Watch
from shardplan.storage import writing

MAPPING = {"embed": "data", "mlp": "model", "vocab": "model", "experts": "replica"}


def mesh_of(*sizes: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes), ("replica", "data", "model"))


def tensors(folder) -> dict[str, np.ndarray]:
    """Read all tensors of a folder with the official library."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def assert_same(actual, expected) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        np.testing.assert_array_equal(actual[name], value, err_msg=name)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.whole] if i % 2 else []) for i, name in enumerate(MODEL_TYPES)]
)
def test_hugging_face_and_back(golden, tmp_path, name):
    """The written checkpoint has the names, shapes, types and bits of the original's tensors, and its config.json."""
    arguments = [f"--model={golden / name}", "--hardware.slice=cpu-8", "--workload.param_dtype=float32"]
    arguments += ["--workload.batch=8", "--workload.position=64", f"--to={tmp_path / 'out'}"]
    done = run("checkpoint", "convert", *arguments)
    assert done.returncode == 0, done.stderr
    assert f"written to {tmp_path / 'out'}: hf, float32" in done.stderr
    assert_same(tensors(tmp_path / "out"), tensors(golden / name))
    before, after = (json.loads((folder / "config.json").read_text()) for folder in (golden / name, tmp_path / "out"))
    assert before == {**after, "dtype": before["dtype"]} and after["dtype"] == "float32"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    again = run("checkpoint", "convert", *arguments)
    assert again.returncode == 2
    assert f"{tmp_path / 'out'} holds config.json already; name another folder, or remove it" in again.stderr


@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 3, 1)])
def test_levanter_and_back(golden, tmp_path, sizes, raises_message):
    """Levanter opens a written checkpoint in another sharding."""
    template = build_model(read_config(str(golden / "mixtral" / "config.json"), None, LEVANTER), 64).template
    with jax.set_mesh(mesh_of(*sizes)):
        module = load_pretrained(str(golden / "mixtral"), dtype="bfloat16")
    save_levanter(module, str(tmp_path / "out"), {})
    with jax.set_mesh(mesh_of(1, 1, 5)):
        loaded = load_checkpoint(template, str(tmp_path / "out"), subpath="model", axis_mapping={"vocab": "data"})
    expected = dict(named_leaves(module))
    for path, leaf in named_leaves(loaded):
        assert leaf.array.dtype == jax.numpy.bfloat16
        np.testing.assert_array_equal(np.asarray(leaf.array), np.asarray(expected[path].array), err_msg=path)
    with raises_message(ConfigError):
        save_levanter(module, str(tmp_path / "out"), {})


def test_types_and_several_files(golden, tmp_path, monkeypatch):
    """A checkpoint in bfloat16 is split into files of 200 kB with an index; headers are aligned for lazy reads."""
    monkeypatch.setattr(written_files, "MAX_FILE_BYTES", 200_000)
    with jax.set_mesh(mesh_of(2, 2, 2)):
        module = load_pretrained(str(golden / "mixtral"), axis_mapping=MAPPING, dtype="bfloat16")
    save_pretrained(module, str(tmp_path), {"model_type": "mixtral"})
    files = sorted(tmp_path.glob("*.safetensors"))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    expected = tensors(golden / "mixtral")
    assert index["weight_map"].keys() == expected.keys()
    assert index["metadata"]["total_size"] == sum(value.size * 2 for value in expected.values())
    assert len(files) > 2 and {file.name for file in files} == set(index["weight_map"].values())
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "model_type": "mixtral", "torch_dtype": "bfloat16", "architectures": ["MixtralForCausalLM"], "vocab_size": 256,
    }  # fmt: skip
    assert_same(tensors(tmp_path), {name: value.astype(jax.numpy.bfloat16) for name, value in expected.items()})
    with safe_open(files[0], "numpy") as file:
        assert file.metadata() == {"format": "pt"}
    for file in files:
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0


def test_names_and_config_are_those_of_the_model_type(golden, tmp_path):
    """Whatever the source had: GPT-2 as the hub has it, without `transformer.`, and keys that no longer hold."""
    source = tmp_path / "source"
    source.mkdir()
    expected = tensors(golden / "gpt2")
    save_file({name.removeprefix("transformer."): v for name, v in expected.items()}, source / "model.safetensors")
    config = json.loads((golden / "gpt2" / "config.json").read_text())
    stale = {"architectures": ["GPT2Model"], "dtype": "float32", "torch_dtype": "float32", "quantization_config": None}
    (source / "config.json").write_text(json.dumps({**config, **stale}))
    arguments = [f"--model={source}", "--hardware.slice=cpu-8", "--workload.batch=8", "--workload.position=8"]
    done = run("checkpoint", "convert", *arguments, "--workload.param_dtype=float16", f"--to={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert_same(tensors(tmp_path / "out"), {name: value.astype(np.float16) for name, value in expected.items()})
    types = {"dtype": "float16", "torch_dtype": "float16"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, **types}


def test_a_config_says_what_is_written(golden, tmp_path):
    """Of a model whose vocabulary was resized and whose head is its own, with a config.json of before that."""
    config = json.loads((golden / "llama" / "config.json").read_text())
    with jax.set_mesh(mesh_of(1, 1, 2)):
        module = load_pretrained(str(golden / "llama")).resize_vocab(300)
        save_pretrained(module, str(tmp_path), {**config, "tie_word_embeddings": True, "architectures": ["LlamaModel"]})
    written = json.loads((tmp_path / "config.json").read_text())
    assert (written["vocab_size"], written["tie_word_embeddings"]) == (300, False)
    assert written["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 256
    assert tensors(tmp_path)["lm_head.weight"].shape == (300, config["hidden_size"])


@pytest.mark.parametrize(("dtype", "value"), [("float16", -65520.0), ("bfloat16", 3.4e38)])
def test_a_value_too_large_for_the_type_is_an_error(golden, tmp_path, dtype, value):
    """Of every format, before anything is written; an infinite value of the source is none."""
    source = tmp_path / "source"
    shutil.copytree(golden / "llama", source)
    name = "model.layers.1.mlp.down_proj.weight"
    file = next(file for file in source.glob("*.safetensors") if name in load_file(file))
    weights = load_file(file)
    weights[name][5, 7] = value
    weights[name][0, 0], weights[name][2, 1] = np.inf, np.nan
    save_file(weights, file)
    arguments = [f"--model={source}", "--hardware.slice=cpu-8", "--workload.batch=8", "--workload.position=8"]
    arguments += [f"--workload.param_dtype={dtype}", f"--to={tmp_path / 'out'}"]
    for kind in ("hf", "levanter"):
        done = run("checkpoint", "convert", *arguments, f"--format={kind}")
        assert done.returncode == 2 and not (tmp_path / "out").exists()
        assert f"{name}[5, 7] is {value:g}, which {dtype} cannot hold (at most " in done.stderr
    weights[name][5, 7] = 1.0
    save_file(weights, file)
    done = run("checkpoint", "convert", *arguments)
    assert done.returncode == 0, done.stderr
    written = tensors(tmp_path / "out")[name]
    assert np.isposinf(written[0, 0]) and np.isnan(written[2, 1]) and (~np.isfinite(written)).sum() == 2


def test_what_was_written_is_read_back(golden, tmp_path, monkeypatch, raises_message):
    """Before the mark is removed: a file with another tensor, and a config.json that the store has not kept."""
    encode = save.encode_header

    def lose_content(folder, name, text):
        target.write_file(folder, name, b"{}")

    with jax.set_mesh(mesh_of(1, 2, 2)):
        module = load_pretrained(golden / "llama")
        with monkeypatch.context() as patch:
            patch.setattr(save, "encode_header", lambda described: encode({**described}).replace(b"F32", b"I32", 1))
            with raises_message(CheckpointError):
                save_pretrained(module, str(tmp_path), {})
        with monkeypatch.context() as patch:
            patch.setattr(save, "write_file", lose_content)
            with raises_message(CheckpointError):
                save_pretrained(module, str(tmp_path), {})
        assert (tmp_path / target.INCOMPLETE).exists()
        save_pretrained(module, str(tmp_path), {})
    assert not (tmp_path / target.INCOMPLETE).exists()
    assert_same(tensors(tmp_path), tensors(golden / "llama"))


def test_files_have_even_sizes():
    sizes = {f"layer {i}": 100 + i % 7 for i in range(97)}
    for processes in (1, 2, 3, 5):
        files = written_files.assign_files(sizes, processes)
        assert [name for names in files.values() for name in names] == [*sizes]
        weights = [sum(sizes[name] for name in names) for names in files.values()]
        assert len(files) == processes and max(weights) - min(weights) <= 2 * 106
    for limit in (100, 250, 1000):  # bytes
        files = written_files.assign_files(sizes, 2, limit)
        assert all(len(names) == 1 or sum(sizes[name] for name in names) <= limit for names in files.values())


def test_what_cannot_be_written(golden, tmp_path, raises_message):
    with jax.set_mesh(mesh_of(1, 1, 1)):
        module = load_pretrained(str(golden / "llama"))
    (tmp_path / "file").write_text("")
    for write in (save_levanter, save_pretrained):
        with raises_message(ConfigError):
            write(module, str(tmp_path / "file" / "folder"), {})
    with raises_message(ConfigError):
        save_levanter(module, "az://container/folder", {})
    with raises_message(CheckpointError):
        program = trace_program(eqx.filter_eval_shape(lambda: module))
        views = {path: view for path, view in program.views.items() if "lm_head" not in path}
        save_pretrained(module, str(tmp_path / "out"), {}, StateDictProgram(program.tensors, views))
    assert not (tmp_path / "out").exists()


def test_a_target_that_cannot_be_written_to_is_refused_before_the_load(golden, tmp_path, monkeypatch):
    monkeypatch.setattr(convert, "prepare", None)  # a load would fail
    arguments = [f"--model={golden / 'llama'}", "--hardware.slice=cpu-8"]
    (tmp_path / "file").write_text("")
    for to in (tmp_path / "file", tmp_path / "file" / "below"):
        for kind in ("hf", "levanter"):
            done = run("checkpoint", "convert", *arguments, f"--to={to}", f"--format={kind}")
            fails(done, 2, f"{to} cannot be written to: {tmp_path / 'file'} is a file, not a folder")
    monkeypatch.setattr(writing.os, "access", lambda path, mode: False)  # root may write to any folder
    done = run("checkpoint", "convert", *arguments, f"--to={tmp_path / 'new' / 'copy'}")
    fails(done, 2, f"copy cannot be written to: no permission to create files in {tmp_path}")


def test_an_interrupted_copy_is_replaced(golden, tmp_path, monkeypatch):
    """No file is seen before it is complete; the next run removes what an interrupted one left, and nothing else."""
    monkeypatch.setattr(written_files, "MAX_FILE_BYTES", 200_000)
    arguments = [f"--model={golden / 'llama'}", "--hardware.slice=cpu-8", "--workload.param_dtype=float32"]
    arguments += ["--workload.batch=8", "--workload.position=64", f"--to={tmp_path}"]
    (tmp_path / "notes.txt").write_text("mine")
    assemble, first_file = save._assemble_bytes, "model-00001-of-00004.safetensors"

    def interrupt(tensor, boxes):
        if (tmp_path / first_file).exists():
            assert (tmp_path / "model-00002-of-00004.safetensors.partial").exists()
            raise KeyboardInterrupt
        return assemble(tensor, boxes)

    with monkeypatch.context() as patch:
        patch.setattr(save, "_assemble_bytes", interrupt)
        assert run("checkpoint", "convert", *arguments).returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == {"notes.txt", "shardplan.incomplete", first_file}
    # what a killed run leaves, too
    (tmp_path / "model-00002-of-00004.safetensors.partial").write_text("part")
    monkeypatch.setattr(written_files, "MAX_FILE_BYTES", 10**9)
    done = run("checkpoint", "convert", *arguments)
    assert done.returncode == 0, done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        "notes.txt", "model.safetensors", "config.json", "generation_config.json",
    }  # fmt: skip
    assert_same(tensors(tmp_path), tensors(golden / "llama"))
    fails(run("checkpoint", "convert", *arguments), 2, f"{tmp_path} holds config.json already; name another folder")


def test_saving_is_watched(golden, tmp_path, monkeypatch):
    """By its progress: the hours before it, in which a program may have trained in its own way, do not count."""
    seen, set_activity = [], Watch.set_activity

    def record(watch, activity):
        seen.append(activity)
        set_activity(watch, activity)

    monkeypatch.setattr(Watch, "set_activity", record)
    with jax.set_mesh(mesh_of(1, 2, 2)):
        module = load_pretrained(golden / "llama")
    for save_model in (save_pretrained, save_levanter, save_orbax):
        seen.clear()
        save_model(module, str(tmp_path / save_model.__name__), {})
        saving = [each for each in seen if each.phase == "saving"]
        assert all(each.deadline_s >= 3600 for each in saving)
        done = [each.done for each in saving]
        assert len(done) > 2 and done == sorted({*done}) if save_model is save_pretrained else len(done) == 1


def test_two_runs_into_one_folder_are_noticed(golden, tmp_path, monkeypatch, raises_message):
    """The first of two runs fails at its end, for it sees the mark of the second."""
    mark, write_files = tmp_path / target.INCOMPLETE, save._write_files

    def claim_meanwhile(*arguments):
        write_files(*arguments)
        mark.write_text('{"run": "another", "files": []}')

    monkeypatch.setattr(save, "_write_files", claim_meanwhile)
    with jax.set_mesh(mesh_of(1, 2, 2)), raises_message(ConfigError):
        save_pretrained(load_pretrained(golden / "llama"), str(tmp_path), {})
    assert mark.exists()


@pytest.mark.parametrize("content", ["{", "[]", '{"run": "", "files": ["../notes.txt"]}'])
def test_a_mark_that_no_run_writes_removes_nothing(golden, tmp_path, content, raises_message):
    (tmp_path / "notes.txt").write_text("mine")
    folder = tmp_path / "copy"
    folder.mkdir()
    (folder / target.INCOMPLETE).write_text(content)
    with jax.set_mesh(mesh_of(1, 2, 2)), raises_message(ConfigError):
        save_pretrained(load_pretrained(golden / "llama"), str(folder), {})
    assert (tmp_path / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda array: array.astype("float16"), r"is \(.*'float16'\), and was written as \(.*'float32'\)"),
        (lambda array: None if array.ndim == 2 else array, r"has no array model\."),
    ],
)
def test_a_levanter_checkpoint_is_read_back(golden, tmp_path, monkeypatch, change, error):
    def save_other(tree, **settings):
        return save_checkpoint(jax.tree.map(change, tree), **settings)

    monkeypatch.setattr(save, "save_checkpoint", save_other)
    with jax.set_mesh(mesh_of(1, 2, 2)), pytest.raises(CheckpointError, match=error):
        save_levanter(load_pretrained(golden / "gpt2"), str(tmp_path), {})
    assert (tmp_path / target.INCOMPLETE).exists()


def test_an_interrupted_levanter_checkpoint_is_replaced(golden, tmp_path, monkeypatch):
    """Also by one of another type, which tensorstore does not write over the first."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with jax.set_mesh(mesh_of(1, 1, 2)):
        first, second = (load_pretrained(str(golden / "gpt2"), dtype=dtype) for dtype in ("float32", "bfloat16"))
        with monkeypatch.context() as patch:
            patch.setattr(save, "write_file", interrupt)
            with pytest.raises(KeyboardInterrupt):
                save_levanter(first, str(tmp_path), {})
        written = {path.name for path in tmp_path.iterdir()}
        assert {"metadata.json", "shardplan.incomplete"} < written
        save_levanter(second, str(tmp_path), {})
        loaded = load_checkpoint(second, str(tmp_path), subpath="model")
    assert {path.name for path in tmp_path.iterdir()} == written - {"shardplan.incomplete"} | {"config.json"}
    expected = dict(named_leaves(second))
    for path, leaf in named_leaves(loaded):
        np.testing.assert_array_equal(np.asarray(leaf.array), np.asarray(expected[path].array), err_msg=path)


def test_output_paths(golden, tmp_path, monkeypatch):
    """A relative path and one under the home folder are local, never a repository of the hub."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr(conftest, "ROOT", tmp_path)  # where the command runs
    arguments = [f"--model={golden / 'gpt2'}", "--hardware.slice=cpu-8", "--workload.batch=8", "--workload.position=64"]
    for to, path, kind, file in (
        ("fresh/copy", tmp_path / "fresh" / "copy", "hf", "model.safetensors"),
        ("~/copy", tmp_path / "home" / "copy", "levanter", "metadata.json"),
    ):
        done = run("checkpoint", "convert", *arguments, f"--to={to}", f"--format={kind}")
        assert done.returncode == 0, done.stderr
        assert (path / file).is_file() and (path / "config.json").is_file()
    assert not list(tmp_path.rglob("inference"))  # a bool of dropout: several processes cannot write it


def test_bad_input(golden, tmp_path):
    arguments = [f"--model={golden / 'llama'}", "--hardware.slice=cpu-8"]
    fails(run("checkpoint", "convert", *arguments), 2, "convert needs a folder to write to: --to FOLDER")
    fails(run("checkpoint", "convert", *arguments, "--to="), 2, "to is ''; it must not be empty")
    fails(
        run("checkpoint", "convert", "--to=x", "--hardware.slice=cpu-8", "--model.config=c.json"), 2, "model.ref is not"
    )
    wrong = [*arguments, f"--to={tmp_path}", "--format=pt"]
    fails(run("checkpoint", "convert", *wrong), 2, "format is 'pt'; valid: hf, levanter")
    done = run("checkpoint", "convert", *arguments, f"--to={tmp_path / 'out'}", "--dry_run", "--workload.position=64")
    assert done.returncode == 0 and "PartitionSpec" in done.stdout and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "spec", [(None, "model", "data", None), (None, ("data", "model"), None, None), (None, ("model",), ("data",), None)]
)
def test_one_expert_is_gathered_without_the_others(spec):
    """Only the devices that hold an expert send it; a slice along the sharded dimension would gather all experts."""
    sharding = NamedSharding(mesh_of(1, 2, 4), PartitionSpec(*spec))
    shape, box = (4, 8, 64, 64), (1, 1, 64, 64)
    values = np.random.default_rng(0).integers(0, 2**32, shape, dtype=np.uint32).view(np.float32)  # NaN and -0.0 too
    array = jax.device_put(values, sharding)
    gather = save.make_gather(sharding, shape, box)
    for layer, expert in ((0, 0), (3, 7), (2, 5)):
        start = [np.int32(i) for i in (layer, expert, 0, 0)]
        gathered = np.asarray(gather(array, start)).view(np.uint32)
        np.testing.assert_array_equal(gathered[0, 0], values[layer, expert].view(np.uint32))
    compiled = gather.lower(array, start).compile()
    assert compiled.memory_analysis().temp_size_in_bytes <= 3 * 4 * 64 * 64


def test_part_of_a_sharded_dimension_is_gathered():
    """One index of a sharded dimension, and a part of another: half of the channels of one head."""
    sharding = NamedSharding(mesh_of(1, 2, 4), PartitionSpec("model", "data", None))
    values = np.arange(4 * 8 * 3, dtype=np.float32).reshape(4, 8, 3)
    gather = save.make_gather(sharding, values.shape, (1, 4, 3))
    for head, first in ((0, 0), (2, 4), (3, 2)):
        gathered = gather(jax.device_put(values, sharding), [np.int32(head), np.int32(first), np.int32(0)])
        np.testing.assert_array_equal(np.asarray(gathered), values[head : head + 1, first : first + 4])
