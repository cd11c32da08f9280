"""The lines of JSON that the processes of a run exchange with the hub."""

import json
import socket
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
LINE_BYTES = 2**30
"""Maximum bytes of a message; a program that sends more without a line break is not part of the run."""


class MessageKind(StrEnum):
    """The kinds of messages, given in their element `kind`."""

    HELLO = "hello"
    """A process joins: the fields of `Member`."""
    WAITING = "waiting"
    """The hub waits for processes: `text` for people."""
    GO = "go"
    """All processes have joined: `address` of JAX's coordination service."""
    PROBLEM = "problem"
    """The run ends: `error`, a class of `shardplan.errors`, and `text`."""
    BEAT = "beat"
    """A process is alive: the fields of `Activity`."""
    ALIVE = "alive"
    """The hub is alive."""
    LOCATE = "locate"
    """A process is stuck; the hub asks each process for its location in the code."""
    PLACE = "place"
    """Location of a process in the code: the fields of `CodeLocation`."""
    PROGRESS = "progress"
    """For process 0: `done` of all processes in its phase, and the `slowest` process."""
    GATHER = "gather"
    """A process sends its value: `name`, `value`; the hub replies with `values` by process."""
    BROADCAST = "broadcast"
    """Process 0 sends `name` and `value`, or `problem`, for all others, which send `name` when they wait for it."""
    MAXIMUM = "maximum"
    """A process sends a number: `name`, `value`; the hub replies with the largest number as `value`."""
    EXCHANGE = "exchange"
    """A process sends values to others: `name`, `values` by process; the hub replies with the values sent to it."""
    AGREE = "agree"
    """A process sends digests: `name`, `parts` or `problem`; the hub replies with the differences, or nothing."""
    ENTER = "enter"
    """A process begins work that needs all processes; `is_end`: it has come to its end, and waits for the others."""
    LEAVE = "leave"
    """A process has ended work that needs all processes: `problem` if it failed."""


def encode(kind: MessageKind, **values: Any) -> bytes:
    """Encode a message as a line of bytes."""
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """Decode a message; None for a line of another program."""
    try:
        message = json.loads(line)
        message["kind"] = MessageKind(message["kind"])
    except (ValueError, KeyError, TypeError):
        return None
    return message


class Lines:
    """Assembles the lines of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._searched = 0
        """Number of received bytes that are known to contain no end of a line."""

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes; lines not consumed are yielded first by the next call.

        Raises:
            ValueError: a line is longer than any message.
        """
        self._received += data
        while (end := self._received.find(b"\n", self._searched)) >= 0:
            line, self._searched = bytes(self._received[:end]), 0
            del self._received[: end + 1]
            yield line
        self._searched = len(self._received)
        if len(self._received) > LINE_BYTES:
            raise ValueError("a line without an end")

    @property
    def unfinished(self) -> bytes:
        """The received part of the next line."""
        return bytes(self._received)


def host_and_port(address: str) -> tuple[str, int]:
    """Split an address into its host and its port."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def listen(port: int) -> socket.socket:
    """Return a socket that listens at `port` of all interfaces; 0 stands for any free port."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=has_both)


def set_options(connection: socket.socket, silence_s: float) -> None:
    """Make a socket send messages at once, and close if the network carries nothing for `silence_s` seconds."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; without it nothing closes a connection whose network is broken
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))


def problem_values(error: Exception) -> Mapping[str, str]:
    """Return the message elements for an error of `shardplan.errors`."""
    return {"error": type(error).__name__, "text": str(error)}
