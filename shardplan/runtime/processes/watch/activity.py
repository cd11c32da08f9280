"""The activity of each process of a run, and which process delays the others. Pure."""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, replace
from typing import Any

DEADLINE_S = 3600.0
"""Maximum seconds without progress in a phase that has no deadline of its own."""


@dataclass(frozen=True)
class Activity:
    """The activity of a process, and the time of its last progress."""

    phase: str = "starting"
    """Name of the phase, such as `loading`, as it follows `while` in messages."""
    number: int = 0
    """Number of earlier phases of the process; all processes have the same phases in the same order."""
    done: float = 0.0
    """Amount done in this phase, in any unit; it only increases."""
    deadline_s: float = DEADLINE_S
    """Maximum seconds without progress."""
    doing: str = ""
    """The latest step begun in this phase, such as `step 12`."""
    since: float = 0.0
    """Time, by the hub's clock, of the last progress, or of the last beginning or end of joint work or an exchange."""

    @property
    def text(self) -> str:
        """The activity in words, such as `evaluating (step 12)`."""
        return f"{self.phase} ({self.doing})" if self.doing else self.phase

    def updated(self, values: Mapping[str, Any], now: float) -> "Activity":
        """Return the activity that a process reports, with the time of its last progress."""
        new = replace(self, **values)
        has_progress = (new.number, new.done) != (self.number, self.done)
        return replace(new, since=now if has_progress else self.since)

    def report(self) -> dict[str, Any]:
        """Return the message by which a process reports its activity."""
        values = asdict(self)
        del values["since"]
        return values


@dataclass(frozen=True)
class CodeLocation:
    """The lines of code at which a process's threads are."""

    text: str
    """The innermost line of the process's own code, such as `data.py:31 in next_batch`."""
    is_in_jax: bool
    """Whether no thread runs the process's own code; the main thread waits in JAX, most likely in a collective."""


def is_stalled(activities: Mapping[int, Activity], waiting: Set[int], now: float) -> bool:
    """Return whether a process has made no progress within the deadline of its phase.

    Args:
        activities: process -> its activity.
        waiting: processes that have sent a value in an exchange, and wait for values of others. They are not stalled
            while the others make progress. If all processes wait, they wait in different exchanges, and their deadlines
            count.
    """
    return any(now - each.since > each.deadline_s for each in _busy(activities, waiting).values())


def describe_stall(
    activities: Mapping[int, Activity], waiting: Set[int], places: Mapping[int, CodeLocation], now: float
) -> str:
    """Describe which processes are stuck, in which phase, where and since when, and which ones only wait for them.

    Among processes that do not wait in an exchange, the stuck ones are in the earliest phase, because the others wait
    in a collective that these have not entered. If there are several, processes outside of JAX count first, and among
    these the ones that have done the least work.

    Args:
        activities, waiting: as for `is_stalled`.
        places: process -> where it is in the code; a process whose Python code does not run reports no place.
    """
    busy = _busy(activities, waiting)
    first = min(each.number for each in busy.values())
    behind = sorted(index for index, each in busy.items() if each.number == first)
    behind = [index for index in behind if index not in places or not places[index].is_in_jax] or behind
    least = min(busy[index].done for index in behind)
    stuck = [index for index in behind if busy[index].done == least]
    others = sorted({*activities} - {*stuck})
    shown = activities[stuck[0]]
    seconds = now - min(activities[index].since for index in stuck)
    text = (
        f"{names_of(stuck)} {'is' if len(stuck) == 1 else 'are'} stuck while {shown.text}, without progress "
        f"for {seconds:.0f} s, {_place_text(stuck, places)}"
    )
    if not others:
        return text
    them = "it" if len(stuck) == 1 else "them"
    return f"{text}; {names_of(others)} only wait{'s' if len(others) == 1 else ''} for {them}"


def _busy(activities: Mapping[int, Activity], waiting: Set[int]) -> Mapping[int, Activity]:
    """Return the activities of processes that do not wait for others; all activities if every process waits."""
    return {index: each for index, each in activities.items() if index not in waiting} or activities


def _place_text(stuck: Sequence[int], places: Mapping[int, CodeLocation]) -> str:
    """Describe where in the code the first stuck process is."""
    place = places.get(stuck[0])
    if place is None:
        text = "and does not answer: its code does not let Python run, or its network is cut"
    else:
        text = f"at {place.text}{', which waits for the devices' if place.is_in_jax else ''}"
    return text if len(stuck) == 1 else f"process {stuck[0]} {text}"


def names_of(indices: Iterable[int]) -> str:
    """Format increasing process numbers as `process 3`, or `processes 0-2, 7`."""
    ranges: list[list[int]] = []
    for index in indices:
        if ranges and ranges[-1][1] == index - 1:
            ranges[-1][1] = index
        else:
            ranges.append([index, index])
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    is_one = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    return f"process{'' if is_one else 'es'} {', '.join(texts)}"
