"""Runs of two and more processes in which something goes wrong: one clear line, an exit code, and no silence."""

import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, run
from processes import fork_python
from test_eval import arguments, free_port

HERE = os.pathsep.join(map(str, [Path(__file__).parent, ROOT / "scripts", ROOT]))
LANES = ("--mesh.model", 2, "--mesh.data", 4)
"""A mesh in which both processes have results to write."""
TIMEOUT = 120
"""Seconds after which a process that has not ended counts as hung."""


@pytest.fixture(scope="session")
def long_text(checkpoint, tmp_path_factory):
    """A text for which the steps of an evaluation take a third of a minute."""
    path = tmp_path_factory.mktemp("text") / "long.txt"
    words = np.random.default_rng(0).integers(0, 256, 600_000)
    path.write_text(" ".join(f"t{word}" for word in words))
    return path


def start(argv, count, ids=None, address=None, module="shardplan.eval", **environment):
    """Start the processes `ids` of `count`."""
    together = {"JAX_COORDINATOR_ADDRESS": address or f"127.0.0.1:{free_port()}", "JAX_NUM_PROCESSES": str(count)}
    return [
        fork_python(["-m", module, *argv], JAX_PROCESS_ID=str(i), **together, **environment)
        for i in (range(count) if ids is None else ids)
    ]


def finish(processes):
    """Exit codes and errors of processes, which must end."""
    try:
        errors = [process.communicate(timeout=TIMEOUT)[1] for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise
    return [process.returncode for process in processes], errors


def line_of(error):
    """The one line that says what was wrong."""
    lines = [line for line in error.splitlines() if line.startswith("shardplan ")]
    assert len(lines) == 1 and "Traceback" not in error, error
    return lines[0]


def read_until(process, pattern):
    """Read what a process writes to stderr until a line has a pattern."""
    lines = []
    for line in process.stderr:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def test_a_process_is_never_started(checkpoint, tmp_path):
    """Who is missing is said within seconds; here the wait is cut short by Ctrl-C, as it is by users."""
    argv = arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "r")
    [process] = start(argv, 2, [0])
    lines = read_until(process, r"waiting for process 1 \(1 of 2 missing\), \d+ s; there: process 0 \(on ")
    assert "start the same command with every JAX_PROCESS_ID from 0 to 1" in lines[-1]
    process.send_signal(signal.SIGINT)
    codes, [error] = finish([process])
    assert codes == [130] and line_of(error) == "shardplan eval: interrupted"


@pytest.mark.whole
def test_other_batches(checkpoint, tmp_path):
    argv = arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "r")
    address = f"127.0.0.1:{free_port()}"
    processes = [start([*argv, "--workload.batch", batch], 2, [i], address)[0] for i, batch in enumerate((4, 8))]
    codes, errors = finish(processes)
    assert codes == [2, 2], errors
    for error in errors:
        assert re.search(r"workload\.batch is (4|8) in process \d on .* and (4|8) in process \d on ", line_of(error)), (
            error
        )


def test_other_plans(checkpoint, tmp_path):
    """A stale Plan file on one host."""
    argv = arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "r")
    paths = [tmp_path / "new.json", tmp_path / "stale.json"]
    for path, pins in zip(paths, ([], ["--pin", "mlp="]), strict=True):
        done = run("plan", *argv[:2], *argv[6:], *LANES, "--json", path, *pins)
        assert done.returncode == 0, done.stderr
    address = f"127.0.0.1:{free_port()}"
    argv = [*argv[:6], "--plan"]
    processes = [start([*argv, path], 2, [i], address)[0] for i, path in enumerate(paths)]
    codes, errors = finish(processes)
    assert codes == [2, 2], errors
    for error in errors:
        assert re.search(
            r"compute_mapping of the plan is .* in process 1 and .* in process 0; give all", line_of(error)
        )


@pytest.mark.parametrize(
    ("number", "lost"),
    [
        (signal.SIGSTOP, 1),
        pytest.param(signal.SIGSTOP, 0, marks=pytest.mark.whole),
        *(
            pytest.param(each, lost, marks=pytest.mark.whole)
            for each in (signal.SIGKILL, signal.SIGINT)
            for lost in (0, 1)
        ),
    ],
)
def test_a_process_ends_while_others_evaluate(checkpoint, long_text, tmp_path, number, lost):
    """The other one says which it was, and what it was doing, whichever it is."""
    processes = start(arguments(checkpoint, long_text, tmp_path / "r", *LANES), 2)
    read_until(processes[0], "evaluating: ")
    started = time.monotonic()
    processes[lost].send_signal(number)
    other = processes[1 - lost]
    codes, [error] = finish([other])
    assert time.monotonic() - started < 100  # JAX itself waits for 300 s and more
    if number == signal.SIGSTOP:
        processes[lost].kill()
    expected = 130 if number == signal.SIGINT else -signal.SIGKILL
    assert finish([processes[lost]])[0] == [expected]
    reason = {
        signal.SIGKILL: rf"process {lost} on \S+ \(pid \d+\) of 2 was lost while evaluating: its connection is closed",
        signal.SIGSTOP: rf"process {lost} on \S+ \(pid \d+\) of 2 was lost while evaluating: no sign of life for 20 s",
        signal.SIGINT: rf"process {lost} of 2 failed: interrupted with Ctrl-C",
    }[number]
    assert codes == [5], error
    match = re.search(rf"{reason}; start the run again; what this process was doing is in (\S+)$", line_of(error))
    assert match, error
    path = match[1]
    assert re.search(r"most recent call first.*shardplan/eval/run.py", Path(path).read_text(), re.DOTALL)
    Path(path).unlink()


def test_a_process_is_lost_while_jax_connects(checkpoint, tmp_path):
    """JAX would wait for it for 300 s, and then end the others by SIGABRT."""
    argv, address = arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "r"), f"127.0.0.1:{free_port()}"
    lost, other = (
        start([fault, *argv], 2, [i], address, "faulty_eval", PYTHONPATH=HERE)[0]
        for i, fault in enumerate(("connect", "none"))
    )
    codes, errors = finish([lost, other])
    assert codes == [-signal.SIGKILL, 5], errors
    assert re.search(r"process 0 on \S+ \(pid \d+\) of 2 was lost while starting: its conn", line_of(errors[1])), errors


@pytest.mark.parametrize(
    ("place", "line"),
    [
        ("backward", r"at faulty_eval\.py:\d+ in read_pipe; processes 0, 2-3 only wait for it"),
        ("collective", r"at stuck_worker\.py:\d+ in enter_collective, which waits for the devices; .*"),
        pytest.param("io", r"at faulty_eval\.py:\d+ in read_pipe; .*", marks=pytest.mark.whole),
        pytest.param("lock", r"at faulty_eval\.py:\d+ in take_lock; .*", marks=pytest.mark.whole),
    ],
)
def test_a_train_step_in_which_one_process_is_stuck(place, line):
    """It goes on to send signs of life; the others that have done all steps wait for it at their end."""
    processes = start([place, 4], 4, module="stuck_worker", PYTHONPATH=HERE)
    codes, errors = finish(processes)
    reason = rf"process 1 is stuck while training \(step 3\), without progress for \d s, {line}; start the run again"
    assert codes == ([0, 5, 0, 0] if place == "collective" else [5] * 4), errors
    assert all(re.search(reason, error) for error in errors), errors


@pytest.mark.parametrize(("place", "codes"), [("late", [0, 0]), ("absent", [5, 0])])
def test_a_process_that_does_not_begin_with_the_others(place, codes):
    """The deadline counts from when all have begun; one that never will is named at once."""
    processes = start([place, 3], 2, module="stuck_worker", PYTHONPATH=HERE)
    actual, errors = finish(processes)
    assert actual == codes, errors
    message = "process 1 of 2 has come to its end, and process 0 begins work that needs all of them; call the same"
    assert (message in errors[0]) == (place == "absent"), errors


def test_a_file_that_is_not_read_on_one_host(checkpoint, tmp_path):
    """As on a file system that hangs: the others wait for values of this process, and it is named."""
    argv = [*arguments(checkpoint, checkpoint / "text.jsonl", tmp_path / "r"), "--deadline.loading", 5]
    address = f"127.0.0.1:{free_port()}"
    codes, errors = finish([
        start([each, *argv], 2, [i], address, "faulty_eval", PYTHONPATH=HERE)[0]
        for i, each in enumerate(("none", "tokenizer"))
    ])  # fmt: skip
    assert codes == [5, 5], errors
    message = r"process 1 is stuck while preparing, without progress for \d s, at faulty_eval\.py:\d+ in read_pipe; "
    assert all(re.search(f"{message}process 0 only waits for it", line_of(error)) for error in errors), errors


@pytest.mark.parametrize(
    ("count", "stuck", "place", "line"),
    [
        (2, 1, "io", r"in read_pipe; process 0 only waits for it; start the run again"),
        (1, 0, "lock", r"in take_lock; start it again"),
        pytest.param(2, 0, "lock", r"in take_lock; process 1 only waits for it; .*", marks=pytest.mark.whole),
    ],
)
def test_a_main_thread_that_is_stuck(checkpoint, long_text, tmp_path, count, stuck, place, line):
    """The stacks are in the folder of the run, and so is what is there already."""
    results, address = tmp_path / "r", f"127.0.0.1:{free_port()}"
    argv = [*arguments(checkpoint, long_text, results, *LANES), "--task.shard", 16, "--deadline.step", 5]
    faults = [place if i == stuck else "none" for i in range(count)]
    processes = [
        *(
            start([fault, *argv], count, [i], address, "faulty_eval", PYTHONPATH=HERE)[0]
            for i, fault in enumerate(faults)
        )
    ]
    codes, errors = finish(processes)
    reason = (
        rf"process {stuck} is stuck while evaluating \(step \d+\), without progress for \d s, at faulty_eval\.py:\d+ "
    )
    assert codes == [5] * count, errors
    for process, error in enumerate(errors):
        file = results / f"stacks-{process}.txt"
        assert re.search(rf"{reason}{line}; what this process was doing is in {file}$", line_of(error)), error
        text = file.read_text()
        assert "this process was evaluating (step" in text and "most recent call first" in text
        assert bool(re.search(r"line \d+ in (read_pipe|take_lock)", text)) == (process == stuck)
        beats = [json.loads(each) for each in (results / f"heartbeat-{process}.jsonl").read_text().splitlines()]
        assert beats[0]["phase"] == "starting"
    assert json.loads((results / "env.json").read_text())["plan"]["slice"] == "cpu-8"


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.whole)])
def test_a_process_that_is_frozen(checkpoint, long_text, tmp_path, count):
    """No Python code of it can run, such as that which would say so; it ends all the same."""
    address = f"127.0.0.1:{free_port()}"
    argv = [*arguments(checkpoint, long_text, tmp_path / "r", *LANES), "--task.shard", 16, "--deadline.step", 5]
    faults = ["none"] * (count - 1) + ["gil"]
    codes, errors = finish([
        start([each, *argv], count, [i], address, "faulty_eval", PYTHONPATH=HERE)[0] for i, each in enumerate(faults)
    ])  # fmt: skip
    assert codes == [5, 1][-count:], errors
    assert re.search(r"Timeout \(0:00:.*most recent call first.* in keep_gil\n", errors[-1], re.DOTALL), errors
    if count == 2:
        assert re.search(r"process 1 is stuck while evaluating.* its code does not let Python run", line_of(errors[0]))


@pytest.mark.whole
def test_preemption_as_jax_announces_it(checkpoint, long_text, tmp_path):
    """Both processes stop before the same shard, though one of them has received SIGTERM, and JAX handles it."""
    argv = [*arguments(checkpoint, long_text, tmp_path / "r", *LANES), "--task.shard", 16]
    processes = start(argv, 2, module="preempted_worker", PYTHONPATH=HERE)
    read_until(processes[0], "evaluating: ")
    processes[1].send_signal(signal.SIGTERM)
    outputs = [process.communicate(timeout=TIMEOUT) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    lines = [output.splitlines()[-1] for output, _ in outputs]
    assert lines == ["process 0: stopped", "process 1: stopped"]
    assert list((tmp_path / "r" / "parts").iterdir()) and not (tmp_path / "r" / "summary.json").exists()


@pytest.mark.parametrize(("shard", "code"), [(8, 7), (10_000, 0)])
def test_a_run_that_is_too_slow(checkpoint, tmp_path, shard, code):
    """Process 0 judges it: all end before the same shard, or none where no shard is left."""
    text, results = tmp_path / "text.txt", tmp_path / "r"
    text.write_text(" ".join(f"t{i % 256}" for i in range(1000)))
    argv = arguments(checkpoint, text, results, *LANES, "--gate.factor", 1e9, "--gate.stop", "true")
    codes, errors = finish(start([*argv, "--workload.position", 8, "--task.shard", shard], 2))
    assert codes == [code] * 2, errors
    assert "WARNING" in errors[0] and "below gate.factor 1e+09" in errors[0]
    assert (results / "summary.json").exists() == (code == 0)
    for error in errors if code else ():
        assert re.search(r"stopped: .* below gate\.factor 1e\+09; .*; the same command goes on from", line_of(error))


def is_part_of(path, address):
    """Whether a process of this machine is one of a run, the hub, or one that makes inputs."""
    try:
        environment, argv = (path / "environ").read_bytes(), (path / "cmdline").read_bytes()
    except OSError:
        return False
    return f"JAX_COORDINATOR_ADDRESS={address}\0".encode() in environment and re.search(b"shardplan|spawn_main", argv)


def has_stacks_of_a_step(path):
    """Whether a file has stacks that a process has written on SIGUSR1."""
    text = path.read_text() if path.exists() else ""
    return re.search(r"SIGUSR1\nthis process was evaluating \(step.*most recent.*eval/loop/loop\.py", text, re.DOTALL)


def wait_until(is_true):
    """Wait until a condition is true, which it must become."""
    end = time.monotonic() + TIMEOUT
    while not is_true():
        assert time.monotonic() < end
        time.sleep(0.05)


def test_stacks_on_demand(checkpoint, long_text, tmp_path):
    """SIGUSR1 to all processes has them written, and the run goes on, here until SIGTERM ends it after a shard."""
    results, address = tmp_path / "r", f"127.0.0.1:{free_port()}"
    argv = [*arguments(checkpoint, long_text, results, *LANES), "--task.shard", 16]
    processes = start(argv, 2, address=address)
    read_until(processes[0], "evaluating: ")
    started = {int(path.name) for path in Path("/proc").glob("[0-9]*") if is_part_of(path, address)}
    pids = started | {process.pid for process in processes}
    assert len(pids) >= 5  # two processes, a hub, and at least one worker of each

    def ask_all():
        """Ask for stacks, once more where a process was between two steps; return whether all have those of a step."""
        for pid in pids:
            os.kill(pid, signal.SIGUSR1)
        time.sleep(0.5)
        return all(has_stacks_of_a_step(results / f"stacks-{i}.txt") for i in range(2))

    wait_until(ask_all)
    before = len([*(results / "parts").glob("*.parquet")])  # beside a part there may be one that is being written
    wait_until(lambda: len([*(results / "parts").glob("*.parquet")]) > before)
    processes[0].send_signal(signal.SIGTERM)
    codes, errors = finish(processes)
    assert codes == [0, 0] and "stopped after a whole shard" in errors[0], errors
