"""The lines of JSON that the processes of a run exchange with the hub."""

import json
import socket
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

Message = dict[str, Any]
LINE_BYTES = 2**30
"""Most bytes of a message; a program that sends more without a line break is another one."""


class MessageKind(StrEnum):
    """The kinds of messages, in their element `kind`."""

    HELLO = "hello"
    """A process comes: the fields of `Member`."""
    WAITING = "waiting"
    """The hub waits for processes: `text`."""
    GO = "go"
    """All processes are there: `address` of JAX's coordination service."""
    PROBLEM = "problem"
    """The run ends: `error`, a class of `shardplan.errors`, and `text`."""
    BEAT = "beat"
    """A process is alive: the fields of `Activity`."""
    ALIVE = "alive"
    """The hub is there."""
    LOCATE = "locate"
    """A process is stuck: the hub asks each of them where it is."""
    PLACE = "place"
    """Where a process is: the fields of `CodeLocation`."""
    PROGRESS = "progress"
    """For process 0: `done` of all processes in its phase, and the `slowest` of them."""
    GATHER = "gather"
    """A process gives its value: `name`, `value`; the hub answers with `values` by process."""
    BROADCAST = "broadcast"
    """Process 0 gives `name` and `value`, or `problem`, which the others get; they send `name` when they wait."""
    MAXIMUM = "maximum"
    """A process gives a number: `name`, `value`; the hub answers with the greatest one, as `value`."""
    EXCHANGE = "exchange"
    """A process gives values to others: `name`, `values` by process; the hub answers with those for it, by process."""
    AGREE = "agree"
    """A process gives digests: `name`, `parts` or `problem`; the hub answers with what differs, or nothing."""
    ENTER = "enter"
    """A process begins work that needs all of them; `is_end`: it has come to its end, and waits for the others."""
    LEAVE = "leave"
    """A process has ended that work: `problem` if it failed."""


def encode(kind: MessageKind, **values: Any) -> bytes:
    """Encode a message as a line of bytes."""
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


def decode(line: bytes) -> Message | None:
    """Return a message; None for the line of another program."""
    try:
        message = json.loads(line)
        message["kind"] = MessageKind(message["kind"])
    except (ValueError, KeyError, TypeError):
        return None
    return message


class Lines:
    """Puts together the lines of a stream that arrives in pieces."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._searched = 0
        """How much of what has arrived has no end of a line."""

    def add(self, data: bytes) -> Iterator[bytes]:
        """Yield the lines that `data` completes; lines that are not consumed are yielded first by the next call.

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
    """Return a socket that listens at a port of all interfaces; at any free one for 0."""
    has_both = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if has_both else socket.AF_INET
    return socket.create_server(("", port), family=family, backlog=4096, dualstack_ipv6=has_both)


def set_options(connection: socket.socket, silence_s: float) -> None:
    """Have messages sent at once, and the connection closed if the network carries nothing for `silence_s`."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux; without it nothing closes a connection whose network is broken
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(1000 * silence_s))


def problem_values(error: Exception) -> Mapping[str, str]:
    """Return the elements of a message for an error of `shardplan.errors`."""
    return {"error": type(error).__name__, "text": str(error)}
