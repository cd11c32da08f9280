"""Records how each attempt of a run spent its time: goodput.json."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ATTEMPTS = "attempts"


@dataclass(frozen=True)
class Attempt:
    """One start of a run, up to its end or to where it was stopped; durations are seconds."""

    started: str
    """Local time."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase, such as loading -> its duration."""
    steps: float = 0.0
    """Time from the results of the first step to the results of the last."""
    waiting: float = 0.0
    """Time in which devices waited for inputs."""
    blocked: float = 0.0
    """Time in which the host had nothing to do but to wait for the devices."""
    stalled: float = 0.0
    """Time of steps that took more than three times the usual, beyond the usual."""
    windows: int = 0
    """Windows that were scored, or sequences that were trained on."""
    is_completed: bool = False

    @property
    def compiling(self) -> float:
        """Time in which the program of a step was compiled."""
        return self.phases.get("compiling", 0.0)

    @property
    def host(self) -> float:
        """Seconds of steps in which the host works, for example writes results."""
        return max(0.0, self.steps - self.blocked - self.waiting)

    @property
    def useful(self) -> float:
        """Time in which devices computed steps at their usual speed."""
        return max(0.0, self.steps - self.waiting - self.stalled)


def now_text() -> str:
    """Return the local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def describe_goodput(earlier: Sequence[Mapping[str, Any]], attempt: Attempt) -> dict[str, Any]:
    """Return all attempts of a run, and the part of their time in which devices computed steps.

    Args:
        earlier: attempts, as this function returned them.
    """
    rows = [*earlier, {**asdict(attempt), "seconds": sum(attempt.phases.values()), "useful": attempt.useful}]
    seconds = sum(row["seconds"] for row in rows)
    return {
        "goodput": sum(row["useful"] for row in rows) / seconds if seconds else 0.0,
        "seconds": seconds,
        ATTEMPTS: rows,
    }
