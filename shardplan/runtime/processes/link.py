"""A process's connection to the hub of its run."""

import contextlib
import dataclasses
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from shardplan import errors
from shardplan.errors import ConfigError, PeerError, ShardplanError, one_line
from shardplan.runtime.environment import ADDRESS, PROCESS_ID
from shardplan.runtime.processes.hub.hub import AGAIN, Member
from shardplan.runtime.processes.hub.messages import (
    Lines,
    Message,
    MessageKind,
    decode,
    encode,
    host_and_port,
    listen,
    set_options,
)
from shardplan.runtime.processes.timing import TIMING, ProcessTiming
from shardplan.runtime.processes.watch.places import THREAD_PREFIX, find_place
from shardplan.runtime.processes.watch.watch import Watch

READ_BYTES = 2**20
END = "end"
"""Name of the exchange in which a process at its end waits for the others."""
FURTHER_FILES = 64
"""Number of files that the hub opens besides its connections."""
LOST_HUB = f"the hub of the run was lost: the host of process 0 has ended, or the network to it is cut; {AGAIN}"

Report = Callable[[str], None]


class PhaseProgress(NamedTuple):
    """The progress of all processes in a phase."""

    done: float
    slowest: int
    """The process that has done the least."""


class Link(Watch):
    """The connection to the hub, after all processes of the run have joined."""

    def __init__(self, connection: socket.socket, lines: Lines, jax_address: str, timing: ProcessTiming = TIMING):
        """Receive messages from the hub, and send heartbeats, until the process ends."""
        global _current
        _current = self
        self.jax_address = jax_address
        """Where JAX connects the processes."""
        self._connection, self._lines = connection, lines
        self._sending = threading.Lock()
        self._answers: dict[tuple[MessageKind, str], Message] = {}
        self.progress: PhaseProgress | None = None
        """How much all processes have done in the phase of this one; known in process 0 only."""
        self._heard, self._was_silent = time.monotonic(), False
        connection.settimeout(None)
        super().__init__(timing)
        threading.Thread(target=self._receive, name=f"{THREAD_PREFIX}receiver", daemon=True).start()

    def send(self, kind: MessageKind, **values: Any) -> None:
        """Send a message."""
        with contextlib.suppress(OSError), self._sending:  # a hub that is lost is noticed by the receiver
            self._connection.sendall(encode(kind, **values))

    def wait_for(self, kind: MessageKind, name: str) -> Message:
        """Wait for the reply of this kind and name.

        Raises:
            PeerError: another process was lost, failed, or is stuck.
        """
        with self._changed:
            self._changed.wait_for(lambda: (kind, name) in self._answers or self._problem is not None)
            answer = self._answers.pop((kind, name), None)
            if answer is None:
                assert self._problem is not None
                raise self._problem
            return answer

    def await_problem(self) -> ShardplanError | None:
        """Return the problem of the run once it is known; None if none becomes known soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._problem is not None, self.timing.problem_known_s)
            return self._problem

    def _enter(self, is_end: bool) -> None:
        if self._problem is not None:
            raise self._problem
        self.send(MessageKind.ENTER, is_end=is_end)

    def _leave(self, problem: str | None) -> None:
        self.send(MessageKind.LEAVE, problem=problem)
        if problem is not None and self._problem is None:
            self._problem = PeerError(f"this process failed before ({problem}), and the others know; {AGAIN}")

    def _report(self) -> None:
        """Send a heartbeat with the process's activity, from which the hub detects that it is stuck."""
        self.send(MessageKind.BEAT, activity=self.activity.report())
        is_silent = time.monotonic() - self._heard > self.timing.hub_silence_s
        if is_silent and self._was_silent:  # at the first time this process may not have run for a while
            self._fail(PeerError(LOST_HUB))
        self._was_silent = is_silent

    def _seconds_left(self) -> float:
        return self.timing.hub_silence_s

    def _receive(self) -> None:
        """Store messages from the hub for the threads that wait for them."""
        while True:
            try:
                data = self._connection.recv(READ_BYTES)
                messages = [decode(line) for line in self._lines.add(data)]
            except (OSError, ValueError):
                data, messages = b"", []
            self._heard = time.monotonic()
            for message in messages:
                if message is not None:
                    self._keep(message)
            if not data:
                self._fail(PeerError(LOST_HUB))
                return

    def _keep(self, message: Message) -> None:
        match message["kind"]:
            case MessageKind.PROBLEM:
                self._fail(error_of(message))
            case MessageKind.LOCATE:
                self.send(MessageKind.PLACE, place=dataclasses.asdict(find_place()))
            case MessageKind.ALIVE:
                pass
            case MessageKind.PROGRESS:
                self.progress = PhaseProgress(message["done"], message["slowest"])
            case _:
                with self._changed:
                    self._answers[message["kind"], message["name"]] = message
                    self._changed.notify_all()


def open_link(
    address: str, own: Member, report: Report, limit_s: float = TIMING.start_limit_s, timing: ProcessTiming = TIMING
) -> Link:
    """Connect to the run's hub, and wait there for the other processes.

    Args:
        address: host:port of the hub.
        report: called every few seconds with a line that names the missing processes.

    Raises:
        PeerError: a process is missing after `limit_s` seconds.
        ConfigError: two processes have the same id, were started for different numbers of processes, or have different
            facts.
    """
    host, port = host_and_port(address)
    started = next_line = time.monotonic()
    while True:
        with contextlib.suppress(OSError):
            connection = socket.create_connection((host, port), timeout=timing.connect_s)
            set_options(connection, timing.hub_silence_s)
            connection.sendall(encode(MessageKind.HELLO, **dataclasses.asdict(own)))
            link = _meet(connection, report, timing)
            if link is not None:
                return link
        seconds = time.monotonic() - started
        if seconds >= limit_s:
            raise PeerError(
                f"process 0 did not answer at {address} within {limit_s:.0f} s; start it, and set {ADDRESS} to its "
                "host and a free port there"
            )
        if time.monotonic() >= next_line + timing.no_hub_line_s:
            report(f"waiting for process 0 at {address}, {seconds:.0f} s")
            next_line += timing.no_hub_line_s
        time.sleep(timing.retry_s)


def start_hub(host: str, port: int, count: int, limit_s: float = TIMING.start_limit_s, *, has_service: bool) -> str:
    """Start the hub's process, which survives if this process is stuck or killed; return its address.

    Args:
        host: name by which other hosts reach this host.
        port: port at which the hub listens; 0 for any free port.
        has_service: whether the hub starts JAX's coordination service.

    Raises:
        ConfigError: another program listens at the port, or this host allows too few open files.
    """
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != most_files < count + FURTHER_FILES:
        raise ConfigError(
            f"the host of process 0 allows a process to open {most_files} files, and the hub of {count} processes "
            f"needs {count + FURTHER_FILES}; raise the limit there (ulimit -Hn)"
        )
    try:
        listener = listen(port)
    except OSError as error:
        raise ConfigError(
            f"process 0 cannot listen at port {port} ({one_line(error)}): an earlier run is still there, or two "
            f"processes have {PROCESS_ID} 0; end it, or set another port in {ADDRESS}"
        ) from error
    with listener:
        service_host = host if has_service else ""
        subprocess.Popen(
            [
                sys.executable,
                "-m",
                "shardplan.runtime.processes.hub.hub_process",
                str(count),
                str(limit_s),
                service_host,
            ],
            stdin=listener.fileno(),
            # it may outlive this process, whose reader waits for the end of what it writes
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C ends the processes of the run, and the hub after them
            env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        return f"{host}:{listener.getsockname()[1]}"


def _meet(connection: socket.socket, report: Report, timing: ProcessTiming) -> Link | None:
    """Wait until all processes have joined; return None if the hub has gone.

    Raises:
        ShardplanError: the run does not start, or the hub sends nothing any more.
    """
    lines = Lines()
    connection.settimeout(timing.meeting_silence_s)
    while True:
        try:
            data = connection.recv(READ_BYTES)
        except TimeoutError:
            connection.close()
            raise PeerError(
                f"the hub of the run sent nothing for {timing.meeting_silence_s:.0f} s while processes were missing: "
                f"the network to the host of process 0 is cut, or another program listens there; {AGAIN}"
            ) from None
        if not data:
            connection.close()
            return None
        for line in lines.add(data):
            message = decode(line)
            if message is None or message["kind"] is MessageKind.PROBLEM:
                connection.close()
                raise error_of(message)
            if message["kind"] is MessageKind.GO:
                return Link(connection, lines, message["address"], timing)
            report(message["text"])
        if lines.unfinished[:1] not in (b"", b"{"):
            raise error_of(None)


def error_of(message: Mapping[str, Any] | None) -> ShardplanError:
    """Return the error that a message reports; for None, an error that another program listens at the run's port."""
    if message is None:
        return ConfigError(f"another program listens at the port of {ADDRESS}; set another port")
    kind: type[ShardplanError] = getattr(errors, message["error"])
    return kind(message["text"])


_current: Link | None = None
_has_ended = False


def has_peers() -> bool:
    """Return whether this process is connected to other processes."""
    return _current is not None


def end_together() -> None:
    """Wait until all processes of the run have called this function at their end.

    Raises:
        PeerError: another process will never reach its end.
    """
    global _has_ended
    if _current is None or _has_ended:
        return
    _has_ended = True
    with _current.work(is_end=True):
        _current.send(MessageKind.AGREE, name=END, parts={}, problem=None)
        _current.wait_for(MessageKind.AGREE, END)
