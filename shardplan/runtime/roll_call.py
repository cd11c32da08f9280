"""The roll call before JAX connects the processes of a run: who is there, who is missing, who is there twice.

JAX waits five minutes for a process that was never started, and does not say which one it is. So the processes first
meet at the port of the coordinator. Process 0 listens there, compares what the others are about to run with its own,
and tells all of them the result; then the port is free for JAX. Each process sends and receives a few lines of JSON, so
that process 0 has work in proportion to their number, and the others have none.
"""

import contextlib
import json
import os
import selectors
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from shardplan.errors import ConfigError, PeerError, ShardplanError, one_line
from shardplan.runtime.environment import ADDRESS, PROCESS_COUNT, PROCESS_ID

START_LIMIT_S = 300.0
"""Seconds to wait for processes that have not started."""
LINES_AT_S = (2.0, 5.0, 10.0, 15.0, 20.0, 25.0)
"""Seconds after which a line says which processes are missing; then every `LINE_INTERVAL_S`."""
LINE_INTERVAL_S = 30.0
REMEDY_AFTER_S = 10.0
"""Seconds from which on the line says what to do, too."""
LATE_S = 3.0
"""Seconds for which process 0 tells those who come late why the run does not start."""
RETRY_S = 0.5
"""Seconds between attempts to reach process 0."""
CONNECT_S, SEND_S = 2.0, 1.0
"""Most seconds to connect to process 0, and to send a message to a process."""
BACKLOG = 4096
"""Connections that the system accepts before process 0 does."""
SHOWN = 3
"""Most hosts, and most differences, that a message names."""
PROTOCOL = "shardplan roll call 1"
STARTED_ALREADY = (
    f"a run has started already at the port of {ADDRESS}, without this process: another one has its {PROCESS_ID}, or "
    "an earlier run is still there; end that, or set another port"
)
LINE_BYTES = 2**20
"""Most bytes of a message; what is longer is no message."""


@dataclass(frozen=True)
class Member:
    """A process that has come to the roll call."""

    index: int
    count: int
    """Number of processes that it was started for."""
    facts: Mapping[str, str]
    """What must be the same in all processes: name -> value."""
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)

    def __str__(self) -> str:
        """Name the process with its host."""
        return f"process {self.index} on {self.host} (pid {self.pid})"


def call_roll(address: str, own: Member, report: Callable[[str], None], limit_s: float = START_LIMIT_S) -> None:
    """Meet the other processes of a run.

    Args:
        address: host:port of process 0.
        report: called with a line that says who is missing, every few seconds.

    Raises:
        PeerError: a process is missing after `limit_s` seconds, or process 0 has ended.
        ConfigError: two processes have one id, were started for other numbers of processes, or have other facts.
    """
    host, _, port = address.rpartition(":")
    if own.index == 0:
        with _Registrar(int(port), own) as registrar:
            registrar.meet(report, limit_s)
    else:
        _join(host.strip("[]"), int(port), own, report, limit_s)


class _Registrar:
    """Process 0, which the others join."""

    def __init__(self, port: int, own: Member):
        """Listen at the port of the coordinator.

        Raises:
            ConfigError: another program does.
        """
        self._own = own
        self._members = {own.index: own}
        self._connections: dict[socket.socket, int | None] = {}
        """Open connections -> the process at the other end; None if it has not said which one it is."""
        self._unread: dict[socket.socket, bytes] = {}
        has_both = socket.has_dualstack_ipv6()
        try:
            self._listener = socket.create_server(
                ("", port),
                family=socket.AF_INET6 if has_both else socket.AF_INET,
                backlog=BACKLOG,
                dualstack_ipv6=has_both,
            )
        except OSError as error:
            raise ConfigError(
                f"process 0 cannot listen at port {port} ({one_line(error)}): an earlier run is still there, or two "
                f"processes have {PROCESS_ID} 0; end it, or set another port in {ADDRESS}"
            ) from error
        self._listener.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)

    def __enter__(self) -> "_Registrar":
        return self

    def __exit__(self, *_: object) -> None:
        self._selector.close()
        self._listener.close()

    def meet(self, report: Callable[[str], None], limit_s: float) -> None:
        """Wait until all processes are there, and tell them; arguments and errors as `call_roll`."""
        started = time.monotonic()
        try:
            for seconds in _line_times(limit_s):
                self._receive_until(started + seconds)
                if not self._missing:
                    break
                if seconds < limit_s:
                    line = self._waiting_text(seconds)
                    report(line)
                    self._send({"waiting": line})
            else:
                raise PeerError(
                    f"{_names(self._missing)} of {self._own.count} did not start within {limit_s:.0f} s; {self._remedy}"
                )
        except ShardplanError as error:
            end = time.monotonic() + LATE_S
            message = {"error": str(error), "kind": type(error).__name__}
            self._send(message)
            while self._missing and time.monotonic() < end:  # those who come late are told the first problem
                with contextlib.suppress(ShardplanError):
                    self._receive_until(end)
            self._dismiss(message)
            raise
        self._dismiss({"go": True})

    @property
    def _missing(self) -> list[int]:
        return [index for index in range(self._own.count) if index not in self._members]

    def _receive_until(self, end: float) -> None:
        """Receive messages until all processes are there, or until a time.

        Raises:
            ConfigError: a process does not belong to this run.
        """
        while self._missing and (left := end - time.monotonic()) > 0:
            for key, _ in self._selector.select(left):
                if key.fileobj is self._listener:
                    connection, _ = self._listener.accept()
                    connection.settimeout(SEND_S)
                    self._connections[connection], self._unread[connection] = None, b""
                    self._selector.register(connection, selectors.EVENT_READ)
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)

    def _read(self, connection: socket.socket) -> None:
        """Read what a process has sent, and admit it once its message is complete."""
        try:
            data = connection.recv(LINE_BYTES)
        except OSError:
            data = b""
        received = self._unread[connection] + data
        if not data or len(received) > LINE_BYTES:  # it has ended, and may come again
            self._forget(connection)
            return
        self._unread[connection] = received
        if received.endswith(b"\n"):
            member = _member_of(received)
            if member is None:
                self._forget(connection)
            else:
                self._admit(member, connection)

    def _forget(self, connection: socket.socket) -> None:
        """Close a connection; its process is missing again."""
        self._selector.unregister(connection)
        del self._unread[connection]
        index = self._connections.pop(connection)
        if index is not None:
            del self._members[index]
        connection.close()

    def _admit(self, member: Member, connection: socket.socket) -> None:
        """Take a process into the run.

        Raises:
            ConfigError: it does not belong there.
        """
        own, present = self._own, self._members.get(member.index)
        if member.count != own.count:
            raise ConfigError(
                f"{member} was started for {member.count} processes, and {own} for {own.count}; set {PROCESS_COUNT} to "
                "the same number everywhere"
            )
        if present is not None:
            raise ConfigError(
                f"{present} and {member} have the same id; set {PROCESS_ID} to another number in each process, 0 to "
                f"{own.count - 1}"
            )
        self._members[member.index], self._connections[connection] = member, member.index
        names = [name for name in sorted({*own.facts, *member.facts}) if own.facts.get(name) != member.facts.get(name)]
        if names:
            values = [
                f"{name} is {own.facts.get(name)} in {own} and {member.facts.get(name)} in {member}" for name in names
            ]
            more = f" (and {len(names) - SHOWN} more differences)" if len(names) > SHOWN else ""
            raise ConfigError(
                f"{'; '.join(values[:SHOWN])}{more}; start the same command in the same environment everywhere"
            )

    def _send(self, message: Mapping[str, Any]) -> None:
        """Send a message to all processes that have connected."""
        data = json.dumps(message).encode() + b"\n"
        for connection in self._connections:
            with contextlib.suppress(OSError):  # it has ended, which the next read shows
                connection.sendall(data)

    def _dismiss(self, message: Mapping[str, Any]) -> None:
        """Send the last message, and wait until the others have closed their connections: then the port is free."""
        self._send(message)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.recv(1)
            connection.close()

    def _waiting_text(self, seconds: float) -> str:
        missing = self._missing
        text = f"waiting for {_names(missing)} ({len(missing)} of {self._own.count} missing), {seconds:.0f} s"
        return f"{text}; {self._remedy}" if seconds >= REMEDY_AFTER_S else text

    @property
    def _remedy(self) -> str:
        hosts = sorted({member.host for member in self._members.values()})
        shown = ", ".join([*hosts[:SHOWN], "..."] if len(hosts) > SHOWN else hosts)
        return (
            f"there: {_names(sorted(self._members))} (on {shown}); start the same command with every {PROCESS_ID} from "
            f"0 to {self._own.count - 1}, or set {PROCESS_COUNT} to the number of processes"
        )


def _join(host: str, port: int, own: Member, report: Callable[[str], None], limit_s: float) -> None:
    """Report at process 0, and wait for its word; arguments and errors as `call_roll`."""
    started = time.monotonic()
    times = _line_times(limit_s)
    next_line = next(times)
    while True:
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=CONNECT_S) as connection:
            connection.sendall(json.dumps({"protocol": PROTOCOL, **asdict(own)}).encode() + b"\n")
            if _hear(connection, report, started + limit_s + LATE_S):
                return
        seconds = time.monotonic() - started
        if seconds >= limit_s:
            raise PeerError(
                f"process 0 did not answer at {host}:{port} within {limit_s:.0f} s; start it, and set {ADDRESS} to its "
                "host and a free port there"
            )
        if seconds >= next_line:
            report(f"waiting for process 0 at {host}:{port}, {seconds:.0f} s")
            next_line = next(times)
        time.sleep(RETRY_S)


def _hear(connection: socket.socket, report: Callable[[str], None], end: float) -> bool:
    """Receive the messages of process 0; returns whether the run starts, or False if process 0 has gone.

    Raises:
        ShardplanError: the run does not start.
    """
    received = b""
    while True:
        connection.settimeout(max(RETRY_S, end - time.monotonic()))
        data = connection.recv(LINE_BYTES)
        if not data:
            return False
        *lines, received = (received + data).split(b"\n")
        for line in lines:
            message = _parse(line)
            if "go" in message:
                return True
            if "waiting" in message:
                report(message["waiting"])
            elif message.get("kind") == PeerError.__name__:
                raise PeerError(message["error"])
            else:
                raise ConfigError(message.get("error", STARTED_ALREADY))
        if received[:1] not in (b"", b"{"):  # the first bytes of JAX's coordinator
            raise ConfigError(STARTED_ALREADY)


def _parse(line: bytes) -> dict[str, Any]:
    """Return a message; empty if another program has sent it."""
    try:
        message = json.loads(line)
    except ValueError:
        return {}
    return message if isinstance(message, dict) else {}


def _member_of(line: bytes) -> Member | None:
    """Return the process that a message is of; None if it is of another program."""
    message = _parse(line)
    if message.pop("protocol", None) != PROTOCOL:
        return None
    return Member(**message)


def _line_times(limit_s: float) -> Iterator[float]:
    """Yield the seconds after which lines are due, and the limit at last."""
    seconds = 0.0
    for seconds in LINES_AT_S:
        if seconds < limit_s:
            yield seconds
    while (seconds := seconds + LINE_INTERVAL_S) < limit_s:
        yield seconds
    yield limit_s


def _names(indices: Iterable[int]) -> str:
    """Return `process 3`, or `processes 0-2, 7`."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"process{'' if is_one else 'es'} {', '.join(texts)}"
