"""The process of the hub: `python -m shardplan.runtime.processes.hub.hub_process COUNT LIMIT HOST`.

Process 0 starts it. It inherits a socket that listens at the port of the run as file descriptor 0, and ends when all
processes have ended. It also is the process of JAX's coordination service: if that were in process 0, as JAX has it,
the end of process 0 would end all others by SIGABRT before they can say why.
"""

import contextlib
import os
import resource
import selectors
import signal
import socket
import sys
import threading
import time
from collections import deque

from shardplan.errors import PeerError, one_line
from shardplan.runtime.processes.hub.hub import Hub, Reply
from shardplan.runtime.processes.hub.messages import (
    Lines,
    MessageKind,
    decode,
    encode,
    listen,
    problem_values,
    set_options,
)
from shardplan.runtime.processes.timing import ProcessTiming

READ_BYTES = 2**20


class _Connection:
    """A connection to a process, with the messages that the process has not received yet."""

    def __init__(self, connection: socket.socket, timing: ProcessTiming):
        """Take over an accepted connection."""
        connection.setblocking(False)
        set_options(connection, timing.silence_s)
        self.socket, self.lines, self._send_s = connection, Lines(), timing.send_s
        self.unsent: deque[memoryview] = deque()
        self.sent_at = 0.0
        """Time at which data was last sent, or was queued while nothing else was."""

    def put(self, line: bytes) -> None:
        """Queue a message, which may be shared with other connections."""
        if not self.unsent:
            self.sent_at = time.monotonic()
        self.unsent.append(memoryview(line))

    def send(self) -> None:
        """Send as much as the network accepts now.

        Raises:
            OSError: the process has ended.
        """
        with contextlib.suppress(BlockingIOError):
            while self.unsent:
                count = self.socket.send(self.unsent[0])
                self.sent_at = time.monotonic()
                if count < len(self.unsent[0]):
                    self.unsent[0] = self.unsent[0][count:]
                else:
                    self.unsent.popleft()

    def send_all(self) -> None:
        """Send everything, within a time limit, before the hub ends."""
        self.socket.settimeout(self._send_s)
        with contextlib.suppress(OSError):
            for line in self.unsent:
                self.socket.sendall(line)


class HubServer:
    """The connections of a hub, and its sockets."""

    def __init__(self, listener: socket.socket, hub: Hub):
        """Serve `hub` to the processes that connect to `listener`."""
        self._hub, self._timing = hub, hub.timing
        self._selector = selectors.DefaultSelector()
        self._connections: dict[int, _Connection] = {}
        self._blocked = set[int]()
        """Ids of the connections with unsent messages."""
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Serve until all processes have ended, or until process 0 ends before all have joined."""
        parent = os.getppid()
        next_tick = time.monotonic()
        while not self._hub.is_over(time.monotonic()):
            if self._hub.is_meeting and os.getppid() != parent:
                break
            if self._hub.is_running and not self._connections:
                break
            for key, events in self._selector.select(max(0.0, next_tick - time.monotonic())):
                if key.fileobj is self._listener:
                    self._accept()
                    continue
                if events & selectors.EVENT_WRITE:
                    self._flush(key.fd)
                if events & selectors.EVENT_READ:
                    self._read(key.fd)
            if time.monotonic() >= next_tick:  # not after each of thousands of messages
                self._tick()
                next_tick = time.monotonic() + self._timing.tick_s
        for connection in self._connections.values():
            connection.send_all()
            connection.socket.close()
        self._listener.close()

    def fail(self, error: Exception) -> None:
        """Inform all processes that the hub cannot continue."""
        problem = problem_values(PeerError(f"the hub of the run failed: {type(error).__name__}: {one_line(error)}"))
        for connection in self._connections.values():
            connection.put(encode(MessageKind.PROBLEM, **problem))
            connection.send_all()

    def _tick(self) -> None:
        """Run the actions that are due, and close connections whose process neither receives nor sends any more."""
        now = time.monotonic()
        self._send(self._hub.tick(now))
        limit_s = self._timing.send_s
        lost = {number for number in self._blocked if now - self._connections[number].sent_at > limit_s}
        for number in lost | self._hub.silent:
            self._close(number)
        self._hub.silent.clear()

    def _accept(self) -> None:
        """Accept all processes that have connected since the last call."""
        with contextlib.suppress(OSError):  # no more of them, or one has ended
            while True:
                connection, _ = self._listener.accept()
                self._connections[connection.fileno()] = _Connection(connection, self._timing)
                self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, number: int) -> None:
        """Read the data that has arrived, and answer every complete message."""
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            data = connection.socket.recv(READ_BYTES)
            lines = [*connection.lines.add(data)]
        except BlockingIOError:
            return
        except (OSError, ValueError):
            data, lines = b"", []
        for line in lines:
            message = decode(line)
            if message is None:  # of another program, such as one that looks for open ports
                data = b""
                break
            self._send(self._hub.receive(number, message, time.monotonic()))
        if not data:
            self._close(number)

    def _send(self, replies: list[Reply]) -> None:
        """Send messages, encoding a message to all only once."""
        encoded: dict[tuple[MessageKind, int], bytes] = {}
        for to, kind, values in replies:
            connection = self._connections.get(to)
            if connection is None:
                continue
            key = kind, id(values)
            if key not in encoded:
                encoded[key] = encode(kind, **values)
            connection.put(encoded[key])
            self._flush(to)

    def _flush(self, number: int) -> None:
        """Send what a connection accepts, and wait until it accepts more."""
        connection = self._connections.get(number)
        if connection is None:
            return
        try:
            connection.send()
        except OSError:
            self._close(number)
            return
        if bool(connection.unsent) != (number in self._blocked):
            is_blocked = bool(connection.unsent)
            (self._blocked.add if is_blocked else self._blocked.remove)(number)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if is_blocked else 0)
            self._selector.modify(connection.socket, events)

    def _close(self, number: int) -> None:
        connection = self._connections.pop(number, None)
        if connection is None:
            return
        self._blocked.discard(number)
        self._selector.unregister(connection.socket)
        connection.socket.close()
        self._send(self._hub.close(number, time.monotonic()))


class _Service:
    """JAX's coordination service, imported while the processes of the run join."""

    def __init__(self, host: str, count: int):
        """Start the import; `host` is empty if JAX has connected the processes already."""
        self._host, self._count = host, count
        self._thread = threading.Thread(target=self._import, daemon=True)
        if host:
            self._thread.start()

    def start(self) -> str:
        """Start the service, and return its address."""
        if not self._host:
            return ""
        self._thread.join()
        with listen(0) as probe:
            port = int(probe.getsockname()[1])
        self._running = self._start_service(port, self._count)
        return f"{self._host}:{port}"

    def _import(self) -> None:
        from shardplan.runtime.private_jax import start_coordination_service  # takes a second

        self._start_service = start_coordination_service


def raise_file_limit() -> None:
    """Raise this process's limit of open files, and so of connections, as far as the system allows."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems allow less than they say
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    """Serve one run, as the hub's process."""
    raise_file_limit()
    # they are for the processes of the run, with which the hub ends
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    count, limit_s, host = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    server = HubServer(socket.socket(fileno=0), Hub(count, limit_s, time.monotonic(), _Service(host, count).start))
    try:
        server.serve()
    except Exception as error:  # whose traceback nobody would see
        server.fail(error)


if __name__ == "__main__":
    main()
