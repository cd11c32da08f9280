"""Extraction runs that are killed, stopped, or started again for something else."""

import contextlib
import json
import random
import re
import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from conftest import run, word_tokenizer
from processes import fork_python
from test_eval import TIMEOUT, free_port

SHARD = 48
"""Windows of a shard."""
RUN = "SHARDPLAN_TEST_RUN"
"""Variable that the processes of a run pass on to those that they start."""
LEFT_S = 30
"""Seconds after a run in which its hub ends, and the workers of processes that were killed."""


@pytest.fixture(scope="session")
def books(golden, tmp_path_factory):
    """A checkpoint with a tokenizer, and a folder of two texts."""
    folder = tmp_path_factory.mktemp("books")
    shutil.copytree(golden / "llama", folder / "model")
    word_tokenizer(0).save(str(folder / "model" / "tokenizer.json"))
    (folder / "texts").mkdir()
    for i, size in enumerate((400, 250)):
        words = np.random.default_rng(i).integers(0, 256, size)
        (folder / "texts" / f"{i}.txt").write_text(" ".join(f"t{word}" for word in words))
    return folder


def arguments(books, output, *more):
    return [
        "--model.ref", books / "model", "--data.path", books / "texts", "--output", output, "--task.kind", "extraction",
        "--task.prefix", 6, "--task.suffix", 6, "--task.stride", 1, "--task.shard", SHARD, "--workload.batch", SHARD,
        "--hardware.slice", "cpu-8", "--workload.param_dtype", "float32", "--workload.compute_dtype", "float32",
        "--mesh.model", 2, *more,
    ]  # fmt: skip


def start(books, output, count, *more):
    """Start a run of `count` processes that share eight devices."""
    address = f"127.0.0.1:{free_port()}"
    together = {"JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": str(count), RUN: str(output)}
    argv = ["-m", "shardplan.eval", *arguments(books, output, *more)]
    return [fork_python(argv, JAX_PROCESS_ID=str(i), **together) for i in range(count)]


def left_over(output):
    """IDs of the hub, of workers and of what else processes of runs into a folder have started, and that still run."""
    wanted = f"{RUN}={output}\0".encode()
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended meanwhile, or is another user's
            if wanted in path.read_bytes():
                found.append(int(path.parent.name))
    return found


def finish(processes):
    """Wait for processes, and return exit codes and errors."""
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    return [process.returncode for process in processes], errors


def wait_until(processes, is_true):
    """Wait until a condition is true, or a process has ended."""
    while not is_true() and all(process.poll() is None for process in processes):
        time.sleep(0.002)


@pytest.fixture(scope="session")
def uninterrupted(books, tmp_path_factory):
    """The results of two processes without interruption."""
    output = tmp_path_factory.mktemp("uninterrupted") / "results"
    codes, errors = finish(start(books, output, 2))
    assert codes == [0, 0], errors
    return output


def parts(output):
    return sorted(path.name for path in (output / "parts").glob("*.parquet")) if output.exists() else []


def written(output):
    """Name -> time at which it was written, of every part."""
    return {name: (output / "parts" / name).stat().st_mtime_ns for name in parts(output)}


def windows_of(names):
    return sum(int(last) - int(first) for first, last in (name.split(".")[0].split("-") for name in names))


def test_results_have_pictures(uninterrupted):
    """They are drawn once, by the first process."""
    assert parts(uninterrupted)
    found = {str(path.relative_to(uninterrupted)) for path in uninterrupted.rglob("*") if path.is_file()}
    expected = {"index.html", "plots/total.png", *(f"{kind}{i}.txt{end}" for i in (0, 1) for kind, end in
                (("plots/", ".png"), ("pages/", ".html")))}  # fmt: skip
    assert {name for name in found if not name.startswith("parts/")} - expected == {
        "run.json", "summary.json", "windows.parquet",
        "env.json", "audit.txt", "memory.json", "goodput.json", "heartbeat-0.jsonl", "heartbeat-1.jsonl",
    }  # fmt: skip
    assert expected <= found


@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.whole)])
def test_a_run_goes_on_after_sigkill(books, uninterrupted, tmp_path, kills):
    """Results are equal to the bit, no part that was complete is written again, and no worker is left."""
    draw, output = random.Random(0), tmp_path / "results"
    for _ in range(kills):
        before = written(output)
        processes = start(books, output, 2)
        wanted = len(before) + draw.randrange(1, 6)
        wait_until(processes, lambda wanted=wanted: len(parts(output)) >= wanted)
        time.sleep(draw.random() * 0.05)
        for process in draw.sample(processes, 2):
            process.kill()
        finish(processes)
        after = written(output)
        assert windows_of(name for name in before if after.get(name) != before[name]) <= SHARD
    before = written(output)
    codes, errors = finish(start(books, output, 2))
    assert codes == [0, 0], errors
    assert windows_of(name for name in before if written(output)[name] != before[name]) <= SHARD
    assert parts(output) == parts(uninterrupted)
    assert (output / "windows.parquet").read_bytes() == (uninterrupted / "windows.parquet").read_bytes()
    end = time.monotonic() + LEFT_S
    while left_over(output) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left_over(output)


def test_a_run_goes_on_in_one_process_after_sigterm(books, uninterrupted, without_pictures, tmp_path):
    """Stopped in two processes it exits with 0 and one line; one process with other lanes finishes it, as close."""
    output = tmp_path / "results"
    processes = start(books, output, 2)
    wait_until(processes, lambda: len(parts(output)) >= 2)
    processes[1].send_signal(signal.SIGTERM)
    codes, errors = finish(processes)
    assert codes == [0, 0], errors
    assert "stopped after a whole shard; the same command goes on from there" in errors[0]
    assert not (output / "windows.parquet").exists()
    done = windows_of(parts(output))
    assert 0 < done < windows_of(parts(uninterrupted))
    done = run("eval", *arguments(books, output, "--mesh.model", "4"))
    assert done.returncode == 0, done.stderr
    tables = [pq.read_table(folder / "windows.parquet") for folder in (output, uninterrupted)]
    assert tables[0].drop_columns(["log_prob", "top_log_prob"]) == tables[1].drop_columns(["log_prob", "top_log_prob"])
    for name in ("log_prob", "top_log_prob"):
        actual, expected = (np.array(table[name].to_pylist()) for table in tables)
        np.testing.assert_allclose(actual, expected, atol=2e-5)
    summaries = [json.loads((folder / "summary.json").read_text()) for folder in (output, uninterrupted)]
    assert summaries[0]["total"]["windows"] == summaries[1]["total"]["windows"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--task.stride", "2"), r"its protocol is .*\"stride\": 1.*, this run's is .*\"stride\": 2"),
        pytest.param(("--workload.param_dtype", "bfloat16"), "its types is", marks=pytest.mark.whole),
        pytest.param(("--task.top_k", "5"), "its top_k is 40, this run's is 5", marks=pytest.mark.whole),
    ],
)
def test_another_run_is_refused(books, uninterrupted, more, message):
    before = (uninterrupted / "run.json").read_bytes()
    done = run("eval", *arguments(books, uninterrupted, *more))
    assert done.returncode == 2
    assert re.search(rf"holds the results of another run: {message}", done.stderr), done.stderr
    assert (uninterrupted / "run.json").read_bytes() == before
