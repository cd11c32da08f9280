"""The process of the hub: `python -m shardplan.runtime.processes.hub_process COUNT LIMIT HOST`, started by process 0.

It inherits a socket that listens at the port of the run as file descriptor 0, and ends when all processes have ended.
It also is the process of JAX's coordination service: if that were in process 0, as JAX has it, the end of process 0
would end all others by SIGABRT before they can say why.
"""

import contextlib
import os
import selectors
import signal
import socket
import sys
import threading
import time

from shardplan.errors import PeerError, one_line
from shardplan.runtime.processes.hub import Hub, Reply
from shardplan.runtime.processes.messages import Kind, Lines, decode, encode, listen, problem_values

TICK_S = 0.5
"""Seconds between two looks at the time."""
SEND_S = 5.0
"""Most seconds to send a message; a process that does not receive it then is lost."""
READ_BYTES = 2**20


class HubServer:
    """The connections of a hub."""

    def __init__(self, listener: socket.socket, hub: Hub):
        """Serve `hub` to those who connect to `listener`."""
        self._hub = hub
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Lines] = {}
        self._sockets: dict[int, socket.socket] = {}
        self._listener = listener
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ)

    def serve(self) -> None:
        """Answer until all have ended, or process 0 has while the others come: the next one starts a new hub."""
        parent = os.getppid()
        while not self._hub.is_over(time.monotonic()):
            if self._hub.is_meeting and os.getppid() != parent:
                break
            if self._hub.is_running and not self._sockets:
                break
            for key, _ in self._selector.select(TICK_S):
                if key.fileobj is self._listener:
                    with contextlib.suppress(OSError):  # it has ended meanwhile
                        self._accept()
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._read(key.fileobj)
            self._send(self._hub.tick(time.monotonic()))
            while self._hub.silent:
                self._close(self._hub.silent.pop())
        for connection in (self._listener, *self._sockets.values()):
            connection.close()

    def fail(self, error: Exception) -> None:
        """Tell all processes that the hub cannot go on."""
        problem = problem_values(PeerError(f"the hub of the run failed: {type(error).__name__}: {one_line(error)}"))
        self._send([Reply(to, Kind.PROBLEM, problem) for to in [*self._sockets]])

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        number = connection.fileno()
        self._lines[number], self._sockets[number] = Lines(), connection
        self._selector.register(connection, selectors.EVENT_READ)

    def _read(self, connection: socket.socket) -> None:
        """Read what has arrived, and answer every message that is complete."""
        number = connection.fileno()
        if number not in self._sockets:
            return
        try:
            data = connection.recv(READ_BYTES)
            lines = [*self._lines[number].add(data)]
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
        for to, kind, values in replies:
            connection = self._sockets.get(to)
            if connection is None:
                continue
            try:
                connection.sendall(encode(kind, **values))
            except OSError:
                self._close(to)

    def _close(self, number: int) -> None:
        connection = self._sockets.pop(number, None)
        if connection is None:
            return
        del self._lines[number]
        self._selector.unregister(connection)
        connection.close()
        self._send(self._hub.close(number, time.monotonic()))


class _Service:
    """JAX's coordination service, which is imported while the processes of the run come."""

    def __init__(self, host: str, count: int):
        """Begin to import it; `host` is empty if JAX has connected the processes already."""
        self._host, self._count = host, count
        self._thread = threading.Thread(target=self._import, daemon=True)
        if host:
            self._thread.start()

    def start(self) -> str:
        """Start it, and return its address."""
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


def main() -> None:
    """Serve one run."""
    for number in (signal.SIGINT, signal.SIGTERM):  # they are for the processes of the run, with which the hub ends
        signal.signal(number, signal.SIG_IGN)
    count, limit_s, host = int(sys.argv[1]), float(sys.argv[2]), sys.argv[3]
    server = HubServer(socket.socket(fileno=0), Hub(count, limit_s, time.monotonic(), _Service(host, count).start))
    try:
        server.serve()
    except Exception as error:  # whose traceback nobody would see
        server.fail(error)


if __name__ == "__main__":
    main()
