"""Processes of a run that something happens to: what they say, when, and how they end."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shardplan.runtime.environment import ADDRESS

ROOT = Path(__file__).parents[1]
HUNG_S = 120.0
"""Seconds after a fault after which a process that has not ended counts as hung."""
ORPHAN_S = 30.0
"""Seconds after which what outlives its run counts as left behind."""
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


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[list[list[str]], str, Callable[[], object]]]:
    """Make two network namespaces of this machine that stand for hosts, with a network between them.

    Yields:
        The beginnings of commands that run in each, an address of the first, and what cuts the network.
    """
    names = [f"shardplan-{os.getpid()}-{i}" for i in range(2)]

    def ip(arguments: str) -> None:
        subprocess.run(["ip", *arguments.split()], check=True)

    with contextlib.ExitStack() as stack:
        for i, name in enumerate(names):
            ip(f"netns add {name}")
            stack.callback(ip, f"netns del {name}")
            # gloo listens at the address that the host's own name has
            hosts = Path("/etc/netns") / name / "hosts"
            hosts.parent.mkdir(parents=True)
            stack.callback(shutil.rmtree, hosts.parent)
            hosts.write_text(f"127.0.0.1 localhost\n10.231.0.{i + 1} {socket.gethostname()}\n")
        ip(f"link add near netns {names[0]} type veth peer name far netns {names[1]}")
        for i, (name, device) in enumerate(zip(names, ("near", "far"), strict=True)):
            ip(f"-n {name} addr add 10.231.0.{i + 1}/24 dev {device}")
            ip(f"-n {name} link set lo up")
            ip(f"-n {name} link set {device} up")
        commands = [["ip", "netns", "exec", name] for name in names]
        yield commands, f"10.231.0.1:{free_port()}", lambda: ip(f"-n {names[0]} link set near down")


class Process:
    """A process of a run, and the lines that it has written to stderr, with their times."""

    def __init__(self, argv: Sequence[str], address: str, count: int, index: int, host: Sequence[str] = ()):
        """Start a script with arguments; `host` is the beginning of a command that runs on another host."""
        self.lines: list[tuple[float, str]] = []
        self.address = address
        self.process = subprocess.Popen(
            # shells have jobs in the background ignore SIGINT, and so these would
            [*host, "env", "--default-signal=INT", sys.executable, *argv],
            cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            env={
                **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{ROOT / 'scripts'}:{ROOT}",
                ADDRESS: address,
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


def _content(path: Path) -> bytes:
    """The content of a file of a process; empty if that has ended."""
    with contextlib.suppress(OSError):
        return path.read_bytes()
    return b""


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
        hosts: Sequence[Sequence[str]] | None = None,
        address: str | None = None,
    ) -> None:
        """Start the processes `ids` of two, each with its fault, arguments and host."""
        address, hosts = address or f"127.0.0.1:{free_port()}", hosts or ((),) * len(ids)
        self.processes = []
        for fault, arguments, index, host in zip(faults, more, ids, hosts, strict=True):
            argv = ["scripts/faulty_eval.py", fault, "--config", "configs/tiny.yaml", "--data.path", str(self._text)]
            argv += ["--output", str(self.folder), *MESH, "--task.shard", "64", "--deadline.step", "5", *arguments]
            self.processes.append(Process(argv, address, 2, index, host))

    def start_training(self, fault: str, deadline_s: float, count: int) -> None:
        """Start `count` processes that train, of which process 1 gets stuck in a step."""
        argv, address = ["tests/multiprocess/stuck_worker.py", fault, str(deadline_s)], f"127.0.0.1:{free_port()}"
        self.processes = [Process(argv, address, count, i) for i in range(count)]

    def _survivors(self) -> list[str]:
        """Return the command lines of what the processes have started and what outlives them, such as their hub."""
        deadline = time.monotonic() + ORPHAN_S
        marks = [f"{ADDRESS}={each.address}\0".encode() for each in self.processes]

        def survivors() -> list[Path]:
            environments = {path.parent: _content(path) for path in Path("/proc").glob("[0-9]*/environ")}
            return [path for path, variables in environments.items() if any(mark in variables for mark in marks)]

        while alive := survivors():
            if time.monotonic() > deadline:
                return [_content(path / "cmdline").replace(b"\0", b" ").decode() for path in alive]
            time.sleep(0.1)
        return []

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

    def end(self, fault_at: float, spared: Sequence[int] = (), heard: int | None = None) -> Outcome:
        """Wait for all processes but those that were stopped, which are killed then; return how they ended.

        Args:
            fault_at: when the fault happened.
            spared: indices of those that were stopped.
            heard: index of the process whose line counts; None for all of them.
        """
        deadline = time.monotonic() + HUNG_S
        codes: dict[int, int | None] = {}
        for i in [i for i in range(len(self.processes)) if i not in spared] + [*spared]:
            if i in spared:
                self.processes[i].process.kill()
            codes[i] = self.processes[i].finish(deadline)
        clear = sorted(
            (at, line)
            for process in (self.processes if heard is None else [self.processes[heard]])
            for at, line in process.lines
            if LINE.match(line) and at >= fault_at
        )
        left = [str(path) for path in self.folder.rglob("*.partial")] if self.folder.exists() else []
        left += self._survivors()
        seconds, line = (clear[0][0] - fault_at, clear[0][1]) if clear else (None, "")
        return Outcome([codes[i] for i in sorted(codes)], seconds, line, left)
