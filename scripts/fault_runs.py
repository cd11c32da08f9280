"""Processes of a run that something happens to: what they say, when, and how they end."""

import contextlib
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
HUNG_S = 120.0
"""Seconds after a fault after which a process that has not ended counts as hung."""
WAITING = "waiting for process"
"""Beginning of lines of a process that waits for others to start."""
LINE = re.compile(rf"^(shardplan( eval)?: |{WAITING}|stopped after a whole shard)")
"""Beginnings of lines that say what is wrong."""
PORTS = range(20_000, 32_768)
"""Ports that are registered for few programs, below those that Linux gives to connections."""
MESH = ("--mesh.model", "2", "--mesh.data", "4")
"""With it both processes have results to write."""


def free_port() -> int:
    """Return a port that nothing listens at, and that no connection is given.

    It is not one that the system chooses: the next connection of another program may be given that one before the run
    listens at it.
    """
    while True:
        port = PORTS.start + secrets.randbelow(len(PORTS))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("", port))
            return port


class Process:
    """A process of a run, and the lines that it has written to stderr, with their times."""

    def __init__(self, argv: Sequence[str], address: str, count: int, index: int):
        """Start a script with arguments."""
        self.lines: list[tuple[float, str]] = []
        self.process = subprocess.Popen(
            # shells have jobs in the background ignore SIGINT, and so these would
            ["env", "--default-signal=INT", sys.executable, *argv],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}",
                "JAX_COORDINATOR_ADDRESS": address,
                "JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(index),
            },
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append((time.monotonic(), line.rstrip()))

    def wait_for(self, pattern: str) -> None:
        """Wait until it has written a line with a pattern, or has ended."""
        deadline = time.monotonic() + HUNG_S
        while not any(re.search(pattern, line) for _, line in self.lines):
            if self.process.poll() is not None or time.monotonic() > deadline:
                return
            time.sleep(0.02)

    def finish(self, deadline: float) -> int | None:
        """Return its exit code; None if it hangs, in which case it is killed."""
        try:
            code = self.process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            return None
        self._reader.join(5)
        return code


@dataclass
class Outcome:
    """How a run with a fault ended."""

    codes: list[int | None]
    seconds: float | None
    """From the fault to the first clear line; None if there is none."""
    line: str
    left: list[str] = field(default_factory=list)
    """What is left behind that should not be."""


class Run:
    """A folder with results, and processes that work on them."""

    def __init__(self, folder: Path, text: Path):
        """Use the results folder `folder`."""
        self.folder, self._text = folder, text
        self.processes: list[Process] = []

    def start(
        self,
        faults: Sequence[str] = ("none", "none"),
        more: Sequence[Sequence[str]] = ((), ()),
        ids: Sequence[int] = (0, 1),
        addresses: Sequence[str] | None = None,
    ) -> None:
        """Start the processes `ids` of two, each with its fault, arguments and address of the hub."""
        address = f"127.0.0.1:{free_port()}"
        self.processes = []
        for number, (fault, arguments, index) in enumerate(zip(faults, more, ids, strict=True)):
            argv = ["scripts/faulty_eval.py", fault, "--config", "configs/tiny.yaml", "--data.path", str(self._text)]
            argv += ["--output", str(self.folder), *MESH, "--task.shard", "64", "--deadline.step", "5", *arguments]
            self.processes.append(Process(argv, addresses[number] if addresses else address, 2, index))

    def start_training(self, fault: str, deadline_s: float, count: int) -> None:
        """Start `count` processes that train, of which process 1 gets stuck in a step."""
        argv, address = ["tests/multiprocess/stuck_worker.py", fault, str(deadline_s)], f"127.0.0.1:{free_port()}"
        self.processes = [Process(argv, address, count, i) for i in range(count)]

    def interrupt_waits(self, fault_at: float, spared: Sequence[int]) -> None:
        """Press Ctrl-C in processes that still say, 10 s after a fault, that they wait for one that has gone.

        They would wait for 300 s in all.
        """
        others = [each for i, each in enumerate(self.processes) if i not in spared]
        while time.monotonic() < fault_at + HUNG_S and any(each.process.poll() is None for each in others):
            time.sleep(0.1)
            if time.monotonic() < fault_at + 10:
                continue
            waiting = [each for each in others if each.lines and each.lines[-1][1].startswith(WAITING)]
            for each in waiting:
                each.process.send_signal(signal.SIGINT)
            if waiting:
                return

    def end(self, fault_at: float, spared: Sequence[int] = ()) -> Outcome:
        """Wait for all processes but those that were stopped, which are killed then; return how they ended."""
        deadline = time.monotonic() + HUNG_S
        codes: dict[int, int | None] = {}
        for i in [i for i in range(len(self.processes)) if i not in spared] + [*spared]:
            if i in spared:
                self.processes[i].process.kill()
            codes[i] = self.processes[i].finish(deadline)
        clear = sorted(
            (at, line)
            for process in self.processes
            for at, line in process.lines
            if LINE.match(line) and at >= fault_at
        )
        left = [str(path) for path in self.folder.rglob("*.partial")] if self.folder.exists() else []
        seconds, line = (clear[0][0] - fault_at, clear[0][1]) if clear else (None, "")
        return Outcome([codes[i] for i in sorted(codes)], seconds, line, left)
