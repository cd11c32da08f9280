"""A training that is killed at random moments goes on, on as many devices or on others, with the same losses."""

import json
import random
import signal
import time

import pytest
from conftest import ROOT
from processes import fork_python

CONFIG = ROOT / "configs" / "tiny-train.yaml"
STEPS = 50
OTHER_MESH = 1e-5
"""Largest relative difference of a loss on another mesh. Sums of float32 in another order differ by about 1e-7, which
is measured; Adam divides by roots of small second moments, so that differences may grow with the steps."""
TIMEOUT = 300


def start(output, devices, *argv):
    """Start the demo on some devices."""
    arguments = ["-m", "shardplan", "train", "--config", str(CONFIG), "--output", str(output), *argv]
    return fork_python([*arguments, f"--hardware.slice=cpu-{devices}"], ROOT)


def finish(process, code=0):
    _, error = process.communicate(timeout=TIMEOUT)
    assert process.returncode == code, error
    return error


def losses_of(output):
    """Step -> every loss that was computed of it."""
    losses = {}
    path = output / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    for line in lines:
        try:
            metrics = json.loads(line)
        except json.JSONDecodeError:  # of a process that was killed while it wrote it
            continue
        if metrics["event"] == "log" and "train/loss" in metrics["metrics"]:
            losses.setdefault(metrics["step"], []).append(metrics["metrics"]["train/loss"])
    return losses


def stop_at(process, output, step, number, delay):
    """Send a signal a moment after a step, and wait for the end of the process."""
    deadline = time.monotonic() + TIMEOUT
    while max(losses_of(output), default=-1) < step:
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.05)
    time.sleep(delay)
    process.send_signal(number)
    error = process.communicate(timeout=TIMEOUT)[1]
    assert process.returncode == (0 if number == signal.SIGTERM else -number), error
    return error


def largest_difference(losses, expected):
    """Largest relative difference of any loss from that of the same step of the uninterrupted run."""
    return max(abs(loss / expected[step][0] - 1) for step, several in losses.items() for loss in several)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Losses of the demo, trained from its first step to its last."""
    output = tmp_path_factory.mktemp("train") / "whole"
    finish(start(output, 8))
    losses = losses_of(output)
    assert [*losses] == [*range(STEPS)] and losses[STEPS - 1][0] < 1.2 < 6 < losses[0][0]
    return losses


def interrupted_run(output, devices, seed):
    """Train with three breaks at random moments: two by SIGKILL, and one by SIGTERM, after which nothing is lost."""
    moments = random.Random(seed)
    steps = sorted(moments.sample(range(11, STEPS - 8), 3))
    signals = [signal.SIGKILL, signal.SIGTERM, signal.SIGKILL]
    for count, step, number in zip(devices, steps, signals, strict=False):
        error = stop_at(start(output, count), output, step, number, moments.random() / 2)
        if number == signal.SIGTERM:
            assert "the same command goes on from there" in error
    finish(start(output, devices[-1]))
    return losses_of(output)


def test_a_training_goes_on_on_other_devices(tmp_path):
    """In short: SIGTERM saves the step under way, and nothing is computed twice; a damaged checkpoint is named."""
    argv = ("--trainer.num_train_steps=8", "--trainer.steps_per_eval=100")
    finish(start(tmp_path / "whole", 8, *argv))
    expected, output = losses_of(tmp_path / "whole"), tmp_path / "r"
    error = stop_at(start(output, 8, *argv), output, 3, signal.SIGTERM, 0.1)
    assert "the same command goes on from there" in error
    stopped = losses_of(output)
    assert stopped == {step: expected[step] for step in stopped} and 4 <= len(stopped) < 8
    (manifest,) = output.glob("checkpoints/step-*/manifest.ocdbt")
    content = manifest.read_bytes()
    manifest.write_bytes(content[:100])
    error = finish(start(output, 4, *argv), 4)
    assert f"shardplan train: checkpoint {manifest.parent} cannot be read: DATA_LOSS: " in error.splitlines()[-1]
    assert "Traceback" not in error
    manifest.write_bytes(content)
    error = finish(start(output, 4, *argv))
    assert f"going on after step {len(stopped)}" in error
    losses = losses_of(output)
    assert [*losses] == [*range(8)] and all(len(losses[step]) == 1 for step in range(7))
    assert largest_difference(losses, expected) < OTHER_MESH


@pytest.mark.whole
@pytest.mark.parametrize("seed", [0, 1])
def test_the_same_mesh_has_the_same_losses_to_the_bit(uninterrupted, tmp_path, seed):
    losses = interrupted_run(tmp_path / "r", (8, 8, 8, 8), seed)
    assert {*losses} == {*range(STEPS)}
    assert {step: {*several} for step, several in losses.items()} == {
        step: {*several} for step, several in uninterrupted.items()
    }


@pytest.mark.whole
@pytest.mark.parametrize("seed", [0, 1])
def test_other_meshes_have_the_same_losses_but_for_rounding(uninterrupted, tmp_path, seed):
    losses = interrupted_run(tmp_path / "r", (8, 4, 6, 8), seed)
    assert {*losses} == {*range(STEPS)}
    error = finish(start(tmp_path / "r", 8, "--workload.batch=48"), 2)
    assert "holds the results of another run: its batch is 24, this run's is 48; name another folder" in error
    assert 0 < largest_difference(losses, uninterrupted) < OTHER_MESH
