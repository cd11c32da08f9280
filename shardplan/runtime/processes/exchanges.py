"""Values that processes give the hub, until all have given theirs. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

from shardplan.runtime.processes.messages import Kind, Message

Answer = tuple[Kind, Mapping[str, Any]]


class Exchanges:
    """The exchanges of a run that are under way."""

    def __init__(self, count: int):
        """Expect the values of `count` processes in each exchange."""
        self._count = count
        self._messages: dict[str, dict[int, Message]] = {}

    def add(self, process: int, message: Message) -> Mapping[int, Answer]:
        """Keep the value of a process; once all have given theirs, return process -> what it gets."""
        name = message["name"]
        given = self._messages.setdefault(name, {})
        first = next(iter(given.values()), message)
        given[process] = first if first == message else message  # nearly always equal, and kept once
        if len(given) < self._count:
            return {}
        del self._messages[name]
        messages = dict(sorted(given.items()))
        if message["kind"] is Kind.EXCHANGE:
            return dict(_sort_by_receiver(name, messages))
        answer = message["kind"], {"name": name, **_answer_all(message["kind"], messages)}
        return dict.fromkeys(messages, answer)


def _answer_all(kind: Kind, messages: Mapping[int, Message]) -> Mapping[str, Any]:
    """Return the elements of the answer that all processes get."""
    if kind is Kind.AGREE:
        return _disagreement(messages)
    values = [each["value"] for each in messages.values()]
    return {"value": max(values)} if kind is Kind.MAXIMUM else {"values": values}


def _sort_by_receiver(name: str, messages: Mapping[int, Message]) -> Iterator[tuple[int, Answer]]:
    """Yield each process, and what others have sent to it."""
    received: dict[str, dict[int, Any]] = {str(process): {} for process in messages}
    for sender, message in messages.items():
        for receiver, value in message["values"].items():
            received[receiver][sender] = value
    for process in messages:
        yield process, (Kind.EXCHANGE, {"name": name, "values": received[str(process)]})


def _disagreement(messages: Mapping[int, Message]) -> dict[str, Any]:
    """Return the first problem, or the first part that differs from that of process 0, with both values."""
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
