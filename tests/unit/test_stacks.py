"""The stacks of a process that is stuck are in a file, and its line is printed whatever becomes of that file."""

import os
import queue
import re
import signal
import subprocess
import sys

import pytest

from shardplan.runtime.processes import stacks, watch
from shardplan.runtime.processes.activity import Activity
from shardplan.runtime.processes.stacks import Stacks
from shardplan.runtime.processes.watch import Watch, handle_problem


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Looks at the process, and the limit of its disk, are shorter."""
    monkeypatch.setattr(watch, "BEAT_S", 0.05)
    monkeypatch.setattr(stacks, "WRITE_S", 0.5)


def get_stuck(monkeypatch, path, device_lines=list):
    """The line of a process that is stuck, whose stacks are written to `path`."""
    written, problems = Stacks(path), queue.Queue()
    monkeypatch.setattr(stacks, "_stacks", written)
    with handle_problem(problems.put):
        process = Watch()
        process.device_lines = device_lines
        with process.work():
            process.set_activity(Activity("loading", 1, 0.0, 0.1, "lm_head"))
            problem = problems.get(timeout=10)
    written.close()
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


def test_stacks_move_to_the_folder_of_the_run(tmp_path):
    written, first, second = Stacks(tmp_path / "first"), tmp_path / "first", tmp_path / "second"
    written.write("earlier", Activity(), list)
    written.move(second)
    assert written.write("later", Activity(), list) == f"what this process was doing is in {second}"
    assert not first.exists()
    assert re.search(r"earlier\n.* later\n", second.read_text(), re.DOTALL)
    written.close()


@pytest.mark.parametrize("target", ["/dev/full", "/dev/null/folder"])
def test_a_folder_of_the_run_that_takes_nothing(tmp_path, caplog, target):
    """That is no reason to end the run: what it does with its results, it says itself."""
    first, second = tmp_path / "first", tmp_path / "second"
    second.symlink_to(target)
    written = Stacks(first)
    written.write("earlier", Activity(), list)
    written.move(second)
    [warning] = caplog.messages
    assert warning.startswith(f"stacks of a process that is stuck are written to {first}: ")
    written.write("later", Activity(), list)
    assert re.search(r"earlier\n.* later\n", first.read_text(), re.DOTALL)
    written.close()


def test_stacks_on_a_signal(tmp_path):
    """The handler of before is called, too, and alone when the block has ended."""
    written, handled = Stacks(tmp_path / "stacks.txt"), []
    before = signal.signal(
        signal.SIGUSR1, lambda *_: handled.append(sum(path.stat().st_size for path in tmp_path.iterdir()))
    )
    try:
        with written.on_signal():
            signal.raise_signal(signal.SIGUSR1)
            written.move(tmp_path / "moved.txt")
            signal.raise_signal(signal.SIGUSR1)
        signal.raise_signal(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)
        written.close()
    assert len(handled) == 3 and handled[0] > 0 and handled[1] == handled[2] > handled[0]


ON_SIGNAL = """
import signal, sys
from pathlib import Path
from shardplan.runtime.processes.stacks import Stacks

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
