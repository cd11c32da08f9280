"""Records in goodput.json how each attempt of a run spent its time."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ATTEMPTS = "attempts"


@dataclass(frozen=True)
class Attempt:
    """One start of a run, until it ended or was stopped; durations are in seconds."""

    started: str
    """Local time of the start."""
    phases: dict[str, float] = field(default_factory=dict)
    """Phase, such as loading -> seconds."""
    steps: float = 0.0
    """Seconds from the first step's results to the last step's."""
    waiting: float = 0.0
    """Seconds in which devices waited for inputs."""
    blocked: float = 0.0
    """Seconds in which the host only waited for the devices."""
    stalled: float = 0.0
    """Seconds by which stalled steps exceed the usual time; a stalled step takes more than three times the usual."""
    windows: int = 0
    """Number of windows scored, or of sequences trained on."""
    is_completed: bool = False

    @property
    def compiling(self) -> float:
        """Seconds spent on compiling the program of a step."""
        return self.phases.get("compiling", 0.0)

    @property
    def host(self) -> float:
        """Seconds during steps that the host spent on work of its own, for example on writing results."""
        return max(0.0, self.steps - self.blocked - self.waiting)

    @property
    def useful(self) -> float:
        """Seconds during which devices computed steps at their usual speed."""
        return max(0.0, self.steps - self.waiting - self.stalled)


def now_text() -> str:
    """Return the local time."""
    return time.strftime("%Y-%m-%d %H:%M:%S")


def describe_goodput(earlier: Sequence[Mapping[str, Any]], attempt: Attempt) -> dict[str, Any]:
    """Return all attempts of a run, and the fraction of their time in which devices computed steps.

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
