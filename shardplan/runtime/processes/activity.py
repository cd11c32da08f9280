"""What a process of a run is doing, and which process is stuck when nothing goes on. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

DEADLINE_S = 3600.0
"""Most seconds without progress in a phase that has no deadline of its own."""


@dataclass(frozen=True)
class Activity:
    """What a process is doing, and since when without progress."""

    phase: str = "starting"
    """Such as `loading`: words that follow `while`."""
    number: int = 0
    """How many phases it began before this one: all processes have the same ones, in one order."""
    done: float = 0.0
    """How much it has done in this phase; any unit, it only increases."""
    deadline_s: float = DEADLINE_S
    """Most seconds without progress."""
    is_waiting: bool = False
    """Whether it has given a value, and waits for those of others."""
    since: float = 0.0
    """When it last made progress, by the clock of the hub."""

    def updated(self, values: Mapping[str, Any], now: float) -> "Activity":
        """Return the activity that a process reports, with the time of its last progress."""
        new = replace(self, **values)
        has_progress = (new.number, new.done) != (self.number, self.done)
        return replace(new, since=now if has_progress else self.since)

    def report(self) -> dict[str, Any]:
        """Return what a process sends of it."""
        values = asdict(self)
        del values["since"]
        return values


def describe_stall(activities: Mapping[int, Activity], now: float) -> str | None:
    """Return who is stuck, in which phase and since when, and who waits for it; None while all is well.

    A stall is one process that has made no progress within the deadline of its phase. Of all processes those are stuck
    that are furthest behind: the others wait in a collective that these have not entered, or for their values.

    Args:
        activities: process -> what it does.
    """
    if not any(now - each.since > each.deadline_s for each in activities.values()):
        return None
    busy = {index: each for index, each in activities.items() if not each.is_waiting} or activities
    behind = min((each.number, each.done) for each in busy.values())
    stuck = sorted(index for index, each in busy.items() if (each.number, each.done) == behind)
    others = sorted({*activities} - {*stuck})
    seconds = now - min(activities[index].since for index in stuck)
    is_one = len(stuck) == 1
    text = (
        f"{names_of(stuck)} {'is' if is_one else 'are'} stuck while {activities[stuck[0]].phase}, without progress for "
        f"{seconds:.0f} s"
    )
    if not others:
        return text
    return f"{text}; {names_of(others)} only wait{'s' if len(others) == 1 else ''} for {'it' if is_one else 'them'}"


def names_of(indices: Iterable[int]) -> str:
    """Return `process 3`, or `processes 0-2, 7`, of increasing numbers."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"process{'' if is_one else 'es'} {', '.join(texts)}"
