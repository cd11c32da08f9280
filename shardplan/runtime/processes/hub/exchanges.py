"""Collects values that processes send to the hub, until all have sent theirs. Pure."""

from collections.abc import Iterator, Mapping, Set
from typing import Any

from shardplan.runtime.processes.hub.messages import Message, MessageKind

Answer = tuple[MessageKind, Mapping[str, Any]]


class Exchanges:
    """The exchanges of a run in which some processes have not sent their message yet."""

    def __init__(self, count: int):
        """Prepare for exchanges among `count` processes; in an exchange, every process sends one message."""
        self._count = count
        self._messages: dict[str, dict[int, Message]] = {}
        self._waiting = set[int]()

    @property
    def waiting(self) -> Set[int]:
        """Return the processes that have sent their message and wait for the messages of others."""
        return self._waiting

    def add(self, process: int, message: Message) -> Mapping[int, Answer]:
        """Store the message of a process; return process -> reply, for replies that are now possible."""
        name, kind = message["name"], message["kind"]
        given = self._messages.setdefault(name, {})
        answers: Mapping[int, Answer] = {}
        if kind is MessageKind.BROADCAST:
            is_waiting = process != 0 and 0 not in given
            given[process] = {}
            if process == 0:
                values = {key: value for key, value in message.items() if key != "kind"}
                answers = dict.fromkeys(range(1, self._count), (kind, values))
        else:
            first = next(iter(given.values()), message)
            given[process] = first if first == message else message  # nearly always equal, and kept once
            is_waiting = len(given) < self._count
            if not is_waiting:
                answers = _answer_all(name, kind, dict(sorted(given.items())))
        if len(given) == self._count:
            del self._messages[name]
        if is_waiting:
            self._waiting.add(process)
        self._waiting.difference_update(answers)
        return answers


def _answer_all(name: str, kind: MessageKind, messages: Mapping[int, Message]) -> Mapping[int, Answer]:
    """Return each process's reply after all have sent their values."""
    if kind is MessageKind.EXCHANGE:
        return dict(_sort_by_receiver(name, messages))
    if kind is MessageKind.AGREE:
        values: Mapping[str, Any] = _disagreement(messages)
    else:
        given = [each["value"] for each in messages.values()]
        values = {"value": max(given)} if kind is MessageKind.MAXIMUM else {"values": given}
    return dict.fromkeys(messages, (kind, {"name": name, **values}))


def _sort_by_receiver(name: str, messages: Mapping[int, Message]) -> Iterator[tuple[int, Answer]]:
    """Yield each process with the messages that others sent to it."""
    received: dict[str, dict[int, Any]] = {str(process): {} for process in messages}
    for sender, message in messages.items():
        for receiver, value in message["values"].items():
            received[receiver][sender] = value
    for process in messages:
        yield process, (MessageKind.EXCHANGE, {"name": name, "values": received[str(process)]})


def _disagreement(messages: Mapping[int, Message]) -> dict[str, Any]:
    """Return the first problem, or the first part in which a process differs from process 0, with both values."""
    for process, message in messages.items():
        if message["problem"] is not None:
            return {"process": process, "problem": message["problem"]}
    expected = messages[0]["parts"]
    for process, message in messages.items():
        if message is messages[0]:
            continue
        parts = message["parts"]
        for part in dict.fromkeys([*expected, *parts]):
            if parts.get(part) != expected.get(part):
                return {"process": process, "part": part, "values": [parts.get(part), expected.get(part)]}
    return {}
