"""The evaluation runs in two processes of four devices each, connected on loopback."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import transformers_losses

ROOT = Path(__file__).parents[2]
TIMEOUT = 300
"""Seconds after which a process that has not ended counts as hung."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


WHOLE = [pytest.param(mesh, marks=pytest.mark.whole) for mesh in ((1, 1, 8), (2, 2, 2))]


@pytest.mark.parametrize("mesh", [(1, 4, 2), *WHOLE])
def test_two_processes(checkpoint, tmp_path, mesh):
    address = f"127.0.0.1:{free_port()}"
    argv = [
        *("--model.ref", checkpoint, "--data.path", checkpoint / "text.jsonl", "--output", tmp_path / "r"),
        *("--workload.batch", 4, "--workload.position", 64, "--hardware.slice", "cpu-8"),
        *("--workload.param_dtype", "float32", "--workload.compute_dtype", "float32"),
        *("--mesh.replica", mesh[0], "--mesh.data", mesh[1], "--mesh.model", mesh[2]),
    ]
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "shardplan.eval", *map(str, argv)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={
                **os.environ,
                "JAX_PLATFORMS": "cpu",
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": "2",
                "JAX_PROCESS_ID": str(number),
            },
        )
        for number in range(2)
    ]
    outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors
    # only the first process prints
    assert "loss per token" in outputs[0][0]
    assert not any(word in outputs[1][0] for word in ("loss per token", "PartitionSpec"))
    results = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert results["total"]["loss_per_token"] == pytest.approx(transformers_losses(checkpoint).mean(), abs=2e-6)
    assert results["plan"]["mesh"] == dict(zip(("replica", "data", "model"), mesh, strict=True))


def test_a_process_without_an_id(checkpoint, tmp_path):
    argv = ["--model.ref", checkpoint, "--data.path", checkpoint / "text.jsonl", "--output", tmp_path / "r"]
    done = subprocess.run(
        [sys.executable, "-m", "shardplan.eval", *map(str, argv)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        env={
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "JAX_COORDINATOR_ADDRESS": "127.0.0.1:1",
            "JAX_NUM_PROCESSES": "2",
        },
    )
    assert done.returncode == 2
    assert "JAX_PROCESS_ID is not set; set it to a number" in done.stderr and "Traceback" not in done.stderr
