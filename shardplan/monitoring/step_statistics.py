"""Counts and durations of the steps of a run. Pure."""

from dataclasses import dataclass
from typing import NamedTuple

MIN_REGULAR, STALL_FACTOR = 3, 3.0
"""A step is a stall if it takes more than `STALL_FACTOR` times the mean of at least `MIN_REGULAR` steps before it."""


MIN_DEADLINE_S, DEADLINE_FACTOR = 300.0, 30.0
"""A run is stuck if no step ends within `MIN_DEADLINE_S` seconds and `DEADLINE_FACTOR` times the predicted time."""


def step_deadline(predicted_s: float) -> float:
    """Return the seconds without a finished step after which a run counts as stuck.

    Args:
        predicted_s: seconds that a step takes by the plan.
    """
    return max(MIN_DEADLINE_S, DEADLINE_FACTOR * predicted_s)


class Count(NamedTuple):
    """Number of windows and of scored tokens in some sequences."""

    windows: int
    tokens: int
    """Number of scored tokens."""


@dataclass
class LoopStatistics:
    """Counts and durations of a run."""

    steps: int = 0
    windows: int = 0
    """Number of windows scored; in training, of sequences."""
    tokens: int = 0
    """Number of tokens scored, without context and padding."""
    timed_windows: int = 0
    """Number of windows whose results came after the first step's."""
    timed_tokens: int = 0
    """Number of tokens in the timed windows."""
    timed_steps: int = 0
    """Number of steps with the timed windows."""
    seconds: float = 0.0
    """Seconds from the first step's results to the last step's."""
    compile_seconds: float = 0.0
    programs: int = 0
    """Number of programs compiled."""
    waiting_seconds: float = 0.0
    """Seconds in which the devices had nothing to compute, because sequences were not made yet."""
    blocked_seconds: float = 0.0
    """Seconds in which the host only waited for the devices' results."""
    stalled_seconds: float = 0.0
    """Seconds by which stalled steps exceed the usual time; a stalled step takes more than three times the usual."""
    usual_step_seconds: float = 0.0
    """Mean seconds of the steps that did not stall."""

    @property
    def windows_per_second(self) -> float | None:
        """Windows per second, without the first step; None after one step."""
        return self.timed_windows / self.seconds if self.seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Mean seconds of a step, without the first; None after one step."""
        return self.seconds / self.timed_steps if self.timed_steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second, without the first step; None after one step."""
        return self.timed_tokens / self.seconds if self.seconds else None


class StepTimer:
    """Adds finished steps to statistics; the first step after a start is counted but not timed."""

    def __init__(self, statistics: LoopStatistics):
        """Start without finished steps."""
        self._statistics = statistics
        self._previous: float | None = None
        """Time at which the results of the previous step came; None before the first step."""
        self._stalls = 0

    def start(self) -> None:
        """Start again: the next step is counted but not timed."""
        self._previous = None

    def add(self, scored: Count, now: float) -> None:
        """Add a step.

        Args:
            scored: number of windows and tokens that the step has scored.
            now: time at which the step's results arrived, in seconds.
        """
        statistics = self._statistics
        statistics.windows += scored.windows
        statistics.tokens += scored.tokens
        if self._previous is not None:
            statistics.timed_windows += scored.windows
            statistics.timed_tokens += scored.tokens
            self._add_time(now - self._previous)
        self._previous = now

    def _add_time(self, seconds: float) -> None:
        """Count the time between the results of two steps as usual or as stalled."""
        statistics = self._statistics
        usual, regular = statistics.usual_step_seconds, statistics.timed_steps - self._stalls
        statistics.timed_steps += 1
        statistics.seconds += seconds
        if regular >= MIN_REGULAR and seconds > STALL_FACTOR * usual:
            self._stalls += 1
            statistics.stalled_seconds += seconds - usual
        else:
            statistics.usual_step_seconds = (usual * regular + seconds) / (regular + 1)
