"""The evaluation runs in two processes of four devices each, connected on loopback."""

import json

import numpy as np
import numpy_qwen3_moe
import pytest
from conftest import transformers_losses
from fault_runs import free_port
from processes import fork_apart, fork_python

TIMEOUT = 300
"""Seconds after which a process that has not ended counts as hung."""


def start(*arguments, start_process=fork_python):
    """Exit code, stdout and stderr of two evaluations that are connected, each with its arguments."""
    address = f"127.0.0.1:{free_port()}"
    processes = []
    for number, argv in enumerate(arguments):
        variables = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": str(number)}
        processes.append(start_process(["-m", "shardplan.eval", *argv], **variables))
    outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def arguments(checkpoint, texts, output, *more):
    return [
        *("--model.ref", checkpoint, "--data.path", texts, "--output", output, "--hardware.slice", "cpu-8"),
        *("--workload.batch", 4, "--workload.position", 64),
        *("--workload.param_dtype", "float32", "--workload.compute_dtype", "float32", *more),
    ]


WHOLE = [
    pytest.param({"replica": 1, "data": 4, "model": 2}, (), marks=pytest.mark.whole),
    pytest.param({"replica": 1, "data": 1, "model": 8}, (), marks=pytest.mark.whole),
    pytest.param({"replica": 2, "data": 2, "model": 2}, (), marks=pytest.mark.whole),
]
POSITIONS = ("--pin", "position=data", "batch=")
"""The positions of every row are on devices of both processes."""


@pytest.mark.parametrize(
    ("mesh", "pins"),
    [({"replica": 1, "data": 8, "model": 1}, POSITIONS), *WHOLE],
)
def test_two_processes(expert_checkpoint, tmp_path, mesh, pins):
    """They agree on the plan and on programs although the order of their sets differs, as they are started apart.

    Statistics of experts are those of the tokens of both.
    """
    checkpoint = expert_checkpoint
    sizes = [text for axis, size in mesh.items() for text in (f"--mesh.{axis}", size)]
    statistics = ("--expert_statistics", "true", "--tracker.kind", "json")
    argv = arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "r", *sizes, *pins, *statistics)
    first, second = start(argv, argv, start_process=fork_apart)
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    # only the first process prints
    assert "loss per token" in first[1]
    assert not any(word in second[1] for word in ("loss per token", "PartitionSpec"))
    results = json.loads((tmp_path / "r" / "summary.json").read_text())
    assert results["total"]["loss_per_token"] == pytest.approx(transformers_losses(checkpoint).mean(), abs=2e-6)
    assert results["plan"]["mesh"] == mesh
    assert results["plan"]["compute_mapping"].get("position", []) == (["data"] if pins else [])
    tokens = np.load(checkpoint / "golden.npz")["tokens"]
    routing = [numpy_qwen3_moe.run(checkpoint, row)[1] for row in tokens]
    for layer, of_rows in zip(results["experts"]["layers"], zip(*routing, strict=True), strict=True):
        chosen = np.concatenate([chosen for _, chosen in of_rows])
        assert layer["load"] == numpy_qwen3_moe.loads(chosen, 8).tolist()


def test_processes_with_other_texts(checkpoint, tmp_path):
    """Both name what differs, and nothing is written."""
    (tmp_path / "other.txt").write_text("t1 t2 t3 t4")
    texts = (checkpoint / "text.jsonl", tmp_path / "other.txt")
    for code, _, errors in start(*(arguments(checkpoint, each, tmp_path / "r") for each in texts)):
        assert code == 2, errors
        assert "process 1 and process 0 differ in text row 0; give all processes the same" in errors
    assert not (tmp_path / "r").exists()


def test_results_folders_that_are_not_shared_are_refused(checkpoint, tmp_path):
    """At the start: else the end of the run would find that windows are missing."""
    folders = (tmp_path / "a", tmp_path / "b")
    for code, _, errors in start(*(arguments(checkpoint, checkpoint / "text.jsonl", each) for each in folders)):
        assert code == 2, errors
        assert f"output {folders[1]} is not the same folder as for process 0; give all processes one" in errors


def test_a_process_without_an_id(checkpoint, tmp_path):
    argv = ["--model.ref", checkpoint, "--data.path", checkpoint / "text.jsonl", "--output", tmp_path / "r"]
    variables = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2"}
    process = fork_python(["-m", "shardplan.eval", *argv], **variables)
    _, errors = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 2
    assert "JAX_PROCESS_ID is not set; set it to a number" in errors and "Traceback" not in errors
