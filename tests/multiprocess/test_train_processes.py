"""Trainings of two processes: a hang in the backward pass, a run that is too slow, and SIGTERM to one of them."""

import json
import re
import signal

import pytest
from conftest import ROOT
from test_faults import HERE, line_of, read_until, start

CONFIG = str(ROOT / "configs" / "tiny-train.yaml")
TIMEOUT = 300
"""Seconds after which a process that has not ended counts as hung: compiling alone takes half a minute."""


def finish(processes):
    """Exit codes and errors of processes, which must end."""
    errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    return [process.returncode for process in processes], errors


def arguments(output, *argv):
    return ["--config", CONFIG, "--output", str(output), "--trainer.steps_per_eval=1000", *argv]


def test_a_hang_in_the_backward_pass_is_named(tmp_path):
    """The other process waits in a collective for the gradients of the one that is stuck."""
    argv = ["3", *arguments(tmp_path / "r", "--trainer.num_train_steps=8", "--deadline.step=20")]
    codes, errors = finish(start(argv, 2, module="stuck_train", PYTHONPATH=HERE))
    assert codes == [5, 5], errors
    reason = (
        r"process 1 is stuck while training \(step 2\), without progress for \d+ s, at faulty_eval\.py:\d+ in "
        r"read_pipe; process 0 only waits for it; start the run again; what this process was doing is in "
    )
    for process, error in enumerate(errors):
        file = tmp_path / "r" / f"stacks-{process}.txt"
        assert re.search(f"{reason}{file}$", line_of(error)), error
        assert "most recent call first" in file.read_text()


@pytest.mark.whole
def test_a_run_below_the_gate_says_where_the_time_went(tmp_path):
    argv = arguments(tmp_path / "r", "--trainer.num_train_steps=30", "--gate.factor=1000", "--gate.stop=true")
    codes, errors = finish(start(argv, 2, module="shardplan.train"))
    assert codes == [7, 7], errors
    for error in errors:
        assert re.search(
            r"tokens/s is \S+ of the \S+ that the plan predicts, below gate.factor 1000; in \d+\.\d s of steps the "
            r"host waited \d+\.\d s for the devices, and these \d+\.\d s for inputs; its own work took .* compiling "
            r"took \d+\.\d s before; the same command goes on from here",
            line_of(error),
        )
    audit = (tmp_path / "r" / "audit.txt").read_text()
    assert audit.count("as planned") == 12
    [attempt] = json.loads((tmp_path / "r" / "goodput.json").read_text())["attempts"]
    assert attempt["windows"] == 11 * 24 and not attempt["is_completed"]
    stages = json.loads((tmp_path / "r" / "memory.json").read_text())["measured"]
    assert [*stages] == ["started", "loaded", "compiled", "first step"]


@pytest.mark.whole
def test_sigterm_to_one_process_stops_both_after_the_same_step(tmp_path):
    """The checkpoint is that of all; one process goes on with it."""
    output = tmp_path / "r"
    argv = arguments(output, "--trainer.num_train_steps=30")
    processes = start(argv, 2, module="shardplan.train")
    read_until(processes[0], r"step [3-9] of 30")
    processes[1].send_signal(signal.SIGTERM)
    codes, errors = finish(processes)
    assert codes == [0, 0], errors
    assert "the same command goes on from there" in errors[0]
    [saved] = (output / "checkpoints").glob("step-*")
    step = int(saved.name.removeprefix("step-"))
    processes = start(argv, 1, module="shardplan.train")
    codes, [error] = finish(processes)
    assert codes == [0], error
    steps = [json.loads(line).get("step") for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert step + 1 in steps and max(each for each in steps if each is not None) == 29
