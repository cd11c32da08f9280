"""Several processes load one checkpoint: right values, every byte once, an end where one is lost or sees another."""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_eval import free_port

WORKER = Path(__file__).with_name("load_worker.py")
INNER = {"embed": "data", "mlp": "model", "vocab": "model"}
"""Cuts inner dimensions, over processes."""
LONGEST = 60
"""Seconds in which the others must end."""


def start(folders, mappings, faults):
    """One process a folder, on loopback."""
    address = f"127.0.0.1:{free_port()}"
    return [
        subprocess.Popen(
            [sys.executable, WORKER, folder, json.dumps(mappings), fault],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(len(folders)),
                "JAX_PROCESS_ID": str(number),
                "PYTHONPATH": str(WORKER.parents[2]),
            },
        )
        for number, (folder, fault) in enumerate(zip(folders, faults, strict=True))
    ]


def ended(processes):
    """Exit codes, outputs and errors."""
    texts = [process.communicate(timeout=300) for process in processes]
    return [process.returncode for process in processes], *map(list, zip(*texts, strict=True))


@pytest.mark.parametrize("count", [2, 4])
def test_every_byte_is_read_once_by_all_processes(golden, count):
    """Plans that cut inner dimensions, and that replicate everything: what one process reads the others are sent."""
    folder = golden / "llama"
    size = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    codes, outputs, errors = ended(start([folder] * count, [INNER, {}], [""] * count))
    assert codes == [0] * count, errors
    for run in range(2):
        read = [int(re.findall(r"^read (\d+)$", output, re.MULTILINE)[run]) for output in outputs]
        assert sum(read) <= 1.02 * size
        assert max(read) <= 1.1 * min(read)
    assert "loaded" in errors[0] and "of them" in errors[0] and "host memory" in errors[0]


@pytest.mark.parametrize("lost", [0, 2])
def test_the_others_end_when_one_is_killed(golden, lost):
    """Process 0, with which JAX's own service goes, or another: the rest say which, with exit code 5."""
    started = time.monotonic()
    processes = start([golden / "llama"] * 3, [INNER], ["killed" if i == lost else "" for i in range(3)])
    codes, _, errors = ended(processes)
    assert time.monotonic() - started < LONGEST
    for i, (code, error) in enumerate(zip(codes, errors, strict=True)):
        if i != lost:
            assert code == 5, error
            assert f"process {lost} of 3 was lost" in error and "start the run again" in error


def test_processes_that_see_other_files_stop(golden, tmp_path):
    """Before anything is mixed: all of them, with exit code 4; also where one of them cannot use what it sees."""
    other, damaged = tmp_path / "other", tmp_path / "damaged"
    for folder in (other, damaged):
        shutil.copytree(golden / "llama", folder)
        shard = sorted(folder.glob("*.safetensors"))[0]
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data if folder == other else data[:-5])
    name = shard.name
    for folder, message in ((other, f"process 1 sees another {name} than process 0"), (damaged, "process 1: ")):
        codes, _, errors = ended(start([golden / "llama", folder], [INNER], ["", ""]))
        assert codes == [4, 4], errors
        assert message in errors[0]
