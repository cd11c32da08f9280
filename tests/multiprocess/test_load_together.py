"""Several processes load one checkpoint: values, bytes read, and what happens if one is lost or reads other files."""

import json
import re
import shutil
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from coded_checkpoints import dequantized, numbers_of, quantized, read_stored, write_stored
from jax.sharding import Mesh
from levanter.checkpoint import load_checkpoint
from lora_adapters import matrices, merge, read_folder, write_adapter
from processes import fork_apart, fork_python
from safetensors.numpy import load_file, save_file
from test_eval import free_port

from shardplan import load_pretrained
from shardplan.checkpoint.saving.save import save_pretrained
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import build_model

WORKER = Path(__file__).with_name("load_worker.py")
INNER = {"embed": "data", "mlp": "model", "vocab": "model"}
"""Shards inner dimensions over processes."""
MAX_SECONDS = 150
"""Seconds in which the other processes must end, their start included; JAX itself waits for 300 and more."""


def start(folders, mappings, faults, environment=None, outputs=None, start_process=fork_python, of_each=None):
    """Start one process per folder, connected on loopback.

    Args:
        of_each: further variables of the environment of each process.
    """
    together = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(len(folders))}
    together |= {"PYTHONPATH": str(WORKER.parents[2]), **(environment or {})}
    processes = []
    for number, (folder, fault) in enumerate(zip(folders, faults, strict=True)):
        argv = [WORKER, folder, json.dumps(mappings), fault, *([outputs[number]] if outputs else [])]
        own = of_each[number] if of_each else {}
        processes.append(start_process(argv, JAX_PROCESS_ID=str(number), **together, **own))
    return processes


def wait_for(processes):
    """Wait for processes, and return exit codes, outputs and errors."""
    texts = [process.communicate(timeout=300) for process in processes]
    return [process.returncode for process in processes], *map(list, zip(*texts, strict=True))


@pytest.mark.parametrize(("count", "model_class"), [pytest.param(2, LEVANTER, marks=pytest.mark.whole), (4, None)])
def test_processes_read_every_byte_once_and_write_one_checkpoint(golden, tmp_path, count, model_class):
    """Processes exchange what they read, and write their own files, for inner dimensions sharded or all replicated."""
    folder = golden / "llama"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    environment = {"MODEL_CLASS": model_class or ""}
    codes, outputs, errors = wait_for(
        start([folder] * count, [{}, INNER], [""] * count, environment, outputs=[tmp_path] * count)
    )
    assert codes == [0] * count, errors
    for run in range(2):
        read = [int(re.findall(r"^read (\d+)$", output, re.MULTILINE)[run]) for output in outputs]
        assert sum(read) <= 1.02 * size
        assert max(read) <= 1.1 * min(read)
    assert "loaded" in errors[0] and "of it by this process" in errors[0] and "host memory" in errors[0]
    expected = {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}
    for kind in ("hf", "drop-in"):
        files = sorted((tmp_path / kind).glob("*.safetensors"))
        assert len(files) == count
        saved = {name: value for file in files for name, value in load_file(file).items()}
        assert saved.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(saved[name], value, err_msg=name)
    assert (tmp_path / "drop-in" / "tokenizer.json").is_file()
    config, source = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "drop-in", folder))
    assert {key: config[key] for key in ("architectures", "hidden_size", "vocab_size")} == {
        key: source[key] for key in ("architectures", "hidden_size", "vocab_size")
    }
    model = build_model(read_config(str(folder / "config.json"), None, model_class), 64)
    with jax.set_mesh(Mesh(np.array(jax.devices()[:3]), ("data",))):
        levanter_folder, mapping = str(tmp_path / "levanter"), {"embed": "data"}
        module = load_checkpoint(model.template, levanter_folder, subpath="model", axis_mapping=mapping)
        original = load_pretrained(str(folder), axis_mapping={}, config=model.config)
    for actual, value in zip(jax.tree.leaves(module), jax.tree.leaves(original), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(value))


def test_codes_with_scales(golden, tmp_path):
    """Two processes read a Llama in fp8, whose blocks are divided among devices, and exchange its codes."""
    tensors = {
        name: value for file in (golden / "llama").glob("*.safetensors") for name, value in load_file(file).items()
    }
    config, block = json.loads((golden / "llama" / "config.json").read_text()), (20, 28)
    coded = quantized(tensors, block)
    plain = write_stored(tmp_path / "plain", dequantized(coded, block), config)
    quantization = {"quant_method": "fp8", "weight_block_size": block}
    folder = write_stored(tmp_path / "coded", coded, config | {"quantization_config": quantization})
    environment = {"MODEL_CLASS": "", "REFERENCE": str(plain), "DTYPE": "float32"}
    codes, _, errors = wait_for(start([folder] * 2, [{}, INNER], [""] * 2, environment))
    assert codes == [0, 0], errors


@pytest.mark.whole
@pytest.mark.parametrize("name", ["gpt_oss_mxfp4", "llama_awq", "llama_gptq", "kimi_int4"])
def test_codes_of_four_bits(golden, tmp_path, name):
    """Two processes read codes that are in another order than the numbers, of which devices have parts of columns."""
    folder = golden.parent / "families" / name
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": None}
    numbers = numbers_of(read_stored(folder / "model.safetensors"))
    plain = write_stored(tmp_path / "plain", {key: np.float32(each) for key, each in numbers.items()}, config)
    environment = {"MODEL_CLASS": "", "REFERENCE": str(plain), "DTYPE": "float32"}
    codes, _, errors = wait_for(start([folder] * 2, [{}, INNER], [""] * 2, environment))
    assert codes == [0, 0], errors


def test_an_adapter(golden, tmp_path):
    """Two processes add an adapter to their parts of the weights, and exchange the sums; both must have it."""
    base = read_folder(golden / "llama")
    config = json.loads((golden / "llama" / "config.json").read_text())
    shapes = {
        name.removesuffix(".weight"): each.shape for name, each in base.items()
        if name.endswith(("q_proj.weight", "down_proj.weight"))
    }  # fmt: skip
    tensors = matrices(shapes, is_exact=True)
    adapters = [write_adapter(tmp_path / str(i), tensors, target_modules=["q_proj", "down_proj"]) for i in range(2)]
    # the sums are rounded once, whoever makes them: the weights are of float32 too
    merged = {name: each.astype(np.float32) for name, each in merge(base, tensors, lambda module: 2).items()}
    environment = {"MODEL_CLASS": "", "DTYPE": "float32"}
    environment["REFERENCE"] = str(write_stored(tmp_path / "merged", merged, config))
    folders = [golden / "llama"] * 2
    own = [{"ADAPTER": str(folder)} for folder in adapters]
    codes, _, errors = wait_for(start(folders, [{}, INNER], [""] * 2, environment, of_each=own))
    assert codes == [0, 0], errors
    codes, _, errors = wait_for(start(folders, [{}], [""] * 2, environment, of_each=[own[0], {}]))
    assert codes == [4, 4] and "the version of adapter/adapter_config.json is None in process 1" in errors[0], errors


def test_from_an_object_store(golden, store):
    """The store sends every byte once for both processes and the checksums, which are compared with its records.

    Headers are sent to both processes with checksums, which each of them needs, and once without.
    """
    client, environment, sent = store
    size = 0
    for file in [*(golden / "llama").glob("*.safetensors*"), golden / "llama" / "config.json"]:
        client.put_object(Bucket="models", Key=f"llama/{file.name}", Body=file.read_bytes())
        size += file.stat().st_size
    sent.clear()
    codes, _, errors = wait_for(start(["s3://models/llama"] * 2, [INNER, INNER], ["", ""], environment))
    assert codes == [0, 0], errors
    loads, headers, files = 2, [size for first, size in sent if first == 0], 3
    assert 0.9 * size < (sum(size for first, size in sent if first > 8)) / loads <= 1.02 * size
    assert len(headers) == 2 * files + files
    assert "checksums: crc32 matches for 3 of 3 files" in errors[0]


def test_written_to_an_object_store(golden, store):
    with jax.set_mesh(Mesh(np.array(jax.devices()[:3]), ("data",))):
        expected = load_pretrained(str(golden / "llama"))
        save_pretrained(expected, "s3://models/out", read_config(str(golden / "llama" / "config.json"), None))
        loaded = load_pretrained("s3://models/out")
    for actual, original in zip(jax.tree.leaves(loaded), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(actual), np.asarray(original))


def test_values_are_compared_once_for_all_processes(golden, tmp_path):
    """Process 0 compares two sets of weights, and all processes stop if they differ."""
    tensors = {
        name: value for file in (golden / "llama").glob("*.safetensors") for name, value in load_file(file).items()
    }
    tensors["model.norm.weight"][-1] += 1
    shutil.copytree(golden / "llama", tmp_path / "both")
    save_file(tensors, tmp_path / "both" / "model.safetensors")
    codes, _, errors = wait_for(start([tmp_path / "both"] * 2, [INNER], ["", ""]))
    assert codes == [4, 4], errors
    assert all("two complete sets of weights that differ" in error for error in errors)
    assert "process 0: " in errors[1] and "process 0: " not in errors[0]


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.whole)])
def test_the_others_end_when_one_is_killed(golden, lost):
    """The others name the lost process and exit with code 5, also for process 0."""
    started = time.monotonic()
    processes = start([golden / "llama"] * 3, [INNER], ["killed" if i == lost else "" for i in range(3)])
    codes, _, errors = wait_for(processes)
    assert time.monotonic() - started < MAX_SECONDS
    for i, (code, error) in enumerate(zip(codes, errors, strict=True)):
        if i != lost:
            assert code == 5, error
            assert re.search(rf"process {lost} on \S+ \(pid \d+\) of 3 was lost while loading", error), error


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        (0, r"the version of {} is (\S+) in process 1 and (?!\1 )\S+ in process 0; make all processes read the same"),
        pytest.param(5, "process 1: ", marks=pytest.mark.whole),
    ],
)
def test_processes_that_read_different_files_stop(golden, tmp_path, missing, message):
    """All exit with code 4 before they exchange data, if one reads different files or refuses its files."""
    folder = tmp_path / "other"
    shutil.copytree(golden / "llama", folder)
    shard = sorted(folder.glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data[: len(data) - missing])
    codes, _, errors = wait_for(start([golden / "llama", folder], [INNER], ["", ""]))
    assert codes == [4, 4], errors
    assert re.search(message.format(re.escape(shard.name)), errors[0]), errors[0]


def test_output_folders_that_are_not_shared_are_refused(golden, tmp_path):
    outputs = [tmp_path / "a", tmp_path / "b"]
    codes, _, errors = wait_for(start([golden / "llama"] * 2, [{}], ["", ""], outputs=outputs))
    assert codes == [2, 2], errors
    assert f"{tmp_path / 'b' / 'hf'} is not the same folder as for process 0; give all processes one" in errors[1]


def test_hosts_with_other_numbers_of_processors(golden):
    """A host with more of them reads more at a time; the transfers and their collectives are the same.

    So they are although the order of sets differs in the processes, which are started apart.
    """
    folder = golden / "llama"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    codes, outputs, errors = wait_for(
        start([folder] * 2, [INNER], ["1 processors", "64 processors"], start_process=fork_apart)
    )
    assert codes == [0, 0], errors
    assert sum(int(re.findall(r"^read (\d+)$", output, re.MULTILINE)[0]) for output in outputs) <= 1.02 * size


def test_another_schedule_ends_before_the_first_transfer(golden):
    """As another version of Python might have made it."""
    started = time.monotonic()
    codes, _, errors = wait_for(start([golden / "llama"] * 2, [INNER], ["", "other schedule"]))
    assert codes == [2, 2] and time.monotonic() - started < MAX_SECONDS, errors
    message = r"the schedule is [0-9a-f]{64} in process 1 and [0-9a-f]{64} in process 0; load with the same arguments"
    for error in errors:
        assert len(re.findall(message, error)) == 1 and "Traceback" not in error, error


@pytest.mark.whole
def test_other_arguments_are_named(golden):
    """One process shards what the other one replicates."""
    codes, _, errors = wait_for(start([golden / "llama"] * 2, [{}], ["", "other mapping"]))
    assert codes == [2, 2], errors
    assert re.search(r"the sharding of \S+ is \(.*\) in process 1 and \(.*\) in process 0; load", errors[0])
