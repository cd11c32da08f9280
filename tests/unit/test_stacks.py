"""The stacks of a process that is stuck are in a file, and its line is printed whatever becomes of that file."""

import contextlib
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from shardplan.runtime.processes.timing import ProcessTiming
from shardplan.runtime.processes.watch import stacks, watch
from shardplan.runtime.processes.watch.activity import Activity
from shardplan.runtime.processes.watch.stacks import Stacks
from shardplan.runtime.processes.watch.watch import Watch, handle_problem

QUICK = ProcessTiming(beat_s=0.05)
"""Looks at the process follow each other faster."""


def get_stuck(monkeypatch, path, device_lines=list):
    """The line of a process that is stuck, whose stacks are written to `path`."""
    written, problems = Stacks(path, write_s=0.5), queue.Queue()
    written.device_lines = device_lines
    monkeypatch.setattr(watch, "process_stacks", lambda: written)
    with handle_problem(problems.put):
        process = Watch(QUICK)
        with process.work():
            process.set_activity(Activity("loading", 1, 0.0, 0.1, "lm_head"))
            problem = problems.get(timeout=10)
    assert process.problem is problem
    match = re.fullmatch(r"process 0 is stuck while loading \(lm_head\), .*; start it again; (.*)", str(problem))
    return match[1]


def test_the_stacks_of_a_process(tmp_path, monkeypatch):
    path = tmp_path / "stacks.txt"
    line = get_stuck(monkeypatch, path, lambda: ["TPU_0: 1.00 of 16.00 GiB in use"])
    assert line == f"what this process was doing is in {path}"
    text = path.read_text()
    assert "this process was loading (lm_head); its last progress was 0 s ago" in text
    assert re.search(r'MainThread \(most recent call first\):(\n .*)*test_stacks\.py", line \d+ in get_stuck\n', text)
    assert text.endswith("\n\nTPU_0: 1.00 of 16.00 GiB in use\n")


def test_a_run_that_ends_meanwhile(tmp_path):
    """The main thread fails as well, and leaves the folder of the run while the stacks are written there."""
    stacks, path = Stacks(tmp_path / "before.txt"), tmp_path / "stacks.txt"
    with contextlib.ExitStack() as run:
        run.enter_context(stacks.in_file(path))

        def device_lines():
            run.close()
            return ["TPU_0: 1.00 of 16.00 GiB in use"]

        stacks.device_lines = device_lines
        assert stacks.write("lost") == f"what this process was doing is in {path}"
    assert path.read_text().endswith("\nTPU_0: 1.00 of 16.00 GiB in use\n")


def test_a_disk_that_is_full(tmp_path, monkeypatch):
    path = tmp_path / "stacks.txt"
    path.symlink_to("/dev/full")
    line = get_stuck(monkeypatch, path)
    assert line.endswith(f"doing could not all be written to {path} ([Errno 28] No space left on device)")


def test_a_disk_that_does_not_answer(tmp_path, monkeypatch):
    """Here it is a pipe that is full, and from which nobody reads."""
    path = tmp_path / "stacks.txt"
    os.mkfifo(path)
    pipe = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(pipe, bytes(2**16))
    line = get_stuck(monkeypatch, path)
    os.close(pipe)
    assert line == f"what this process was doing could not all be written to {path} (it does not answer for 0 s)"


def test_devices_that_say_nothing(tmp_path, monkeypatch):
    """Their runtime may be what has failed; the stacks are in the file then."""

    def fail():
        raise RuntimeError("no TPU")

    path = tmp_path / "stacks.txt"
    assert get_stuck(monkeypatch, path, fail).endswith(f"could not all be written to {path} (no TPU)")
    assert "MainThread" in path.read_text()


def test_a_process_without_another_thread(tmp_path, monkeypatch):
    """As many as it may have are there, or Python is about to end; the line comes all the same."""
    path, start = tmp_path / "stacks.txt", threading.Thread.start

    def refuse(thread):
        if thread.name.endswith("stacks"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert get_stuck(monkeypatch, path).endswith(f"could not all be written to {path} (can't start new thread)")


def test_no_temporary_folder(monkeypatch):
    """Commands that need none, such as doctor, run."""

    def fail():
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(stacks.tempfile, "gettempdir", fail)
    assert stacks.process_stacks.__wrapped__()._path.parent == Path("/tmp")


def test_work_after_a_stall_that_has_passed(tmp_path, monkeypatch):
    """A program or a notebook goes on, and is watched as before."""
    monkeypatch.setattr(watch, "process_stacks", lambda: Stacks(tmp_path / "stacks.txt"))
    process, problems = Watch(QUICK), queue.Queue()
    with handle_problem(problems.put):
        for done in range(2):
            with process.work():
                process.set_activity(Activity("evaluating", 1 + done, 0.0, 0.1))
                assert problems.get(timeout=10) is process.problem


def test_stacks_in_the_folder_of_a_run(tmp_path):
    """And before and after the run in the file of this process; a file in which nothing is, is not there."""
    first, second = tmp_path / "first", tmp_path / "second"
    written = Stacks(first)
    with written.in_file(second):
        assert not second.exists()
        assert written.write("later") == f"what this process was doing is in {second}"
    assert not first.exists() and written.write("at last") == f"what this process was doing is in {first}"
    assert "later" in second.read_text() and "at last" in first.read_text()


@pytest.mark.parametrize("target", ["/dev/full", "/dev/null/folder"])
def test_a_folder_of_the_run_that_takes_nothing(tmp_path, caplog, target):
    """That is no reason to end the run: what it does with its results, it says itself."""
    first, second = tmp_path / "first", tmp_path / "second"
    second.symlink_to(target)
    written = Stacks(first)
    with written.in_file(second):
        line = written.write("stuck")
    if target == "/dev/full":
        assert line.endswith(f"could not all be written to {second} ([Errno 28] No space left on device)")
    else:
        [warning] = caplog.messages
        assert warning.startswith(f"stacks of a process that is stuck are written to {first}: ")
        assert line == f"what this process was doing is in {first}"


def test_stacks_on_a_signal(tmp_path):
    """With what the process is doing, and its devices; the handler of before is called, too, and alone in the end."""
    first, second = tmp_path / "first", tmp_path / "second"
    written, handled = Stacks(first), []
    written.activity_lines, written.device_lines = lambda: ["this process was loading"], lambda: ["TPU_0: 1.00 GiB"]
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(first.exists() + second.exists()))
    complete = re.compile(
        r"^Stack \(most.*\n\S+ \S+ SIGUSR1\nthis .* loading\n\nThread .*\n\nTPU_0: 1.00 GiB\n", re.DOTALL
    )

    def wait_for(path):
        deadline = time.monotonic() + 10
        while not complete.search(path.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert complete.search(path.read_text())

    try:
        with written.on_signal():
            with written.in_file(second):
                signal.raise_signal(signal.SIGUSR1)
                wait_for(second)
            signal.raise_signal(signal.SIGUSR1)
            wait_for(first)
        assert signal.set_wakeup_fd(-1) == -1
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [1, 2, 2]


STUCK = """
import ctypes, signal, sys, threading, time
from pathlib import Path
from shardplan.runtime.processes.watch.stacks import Stacks

written = Stacks(Path(sys.argv[1]))
written.activity_lines = lambda: ["this process was loading"]
with written.on_signal():
    threading.Timer(0.5, lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)).start()
    ctypes.CDLL(None).usleep(700_000)  # ends with the signal
    ctypes.CDLL(None).usleep(700_000)
    text = Path(sys.argv[1]).read_text()
print(text)
"""


def test_a_signal_while_the_main_thread_is_in_c(tmp_path):
    """As in a collective, where no handler in Python could run; here a thread ends at the same time."""
    done = subprocess.run([sys.executable, "-c", STUCK, tmp_path / "stacks.txt"], capture_output=True, text=True)
    assert re.search(r"^Stack \(most.*SIGUSR1\nthis process was loading\n.*MainThread", done.stdout, re.DOTALL), done


ON_SIGNAL = """
import signal, sys
from pathlib import Path
from shardplan.runtime.processes.watch.stacks import Stacks

with Stacks(Path(sys.argv[1])).on_signal():
    signal.raise_signal(signal.SIGUSR1)
print("goes on", flush=True)
signal.raise_signal(signal.SIGUSR1)
"""


def test_the_default_handler_of_the_signal(tmp_path):
    """It would end the process, and does so when the block has ended."""
    path = tmp_path / "stacks.txt"
    done = subprocess.run([sys.executable, "-c", ON_SIGNAL, path], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGUSR1, "goes on\n"), done.stderr
    assert "most recent call first" in path.read_text()
