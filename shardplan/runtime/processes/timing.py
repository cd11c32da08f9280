"""Time limits of the processes of a run and of their hub, in one object, which tests replace by shorter ones.

A process that is stopped, or whose network is cut, closes no connection: only the lack of its messages shows that it is
lost. So every process sends a sign of life in each interval, and the hub does; each side counts the other as lost after
several of them are missing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessTiming:
    """Intervals and limits of the processes of a run, in seconds."""

    start_limit_s: float = 300.0
    """Most seconds to wait for processes that have not started."""
    lines_at_s: tuple[float, ...] = (2.0, 5.0, 10.0, 15.0, 20.0, 25.0)
    """Seconds after which all processes are told who is missing; then every `line_interval_s`."""
    line_interval_s: float = 30.0
    remedy_after_s: float = 10.0
    """Seconds from which on they are told what to do, too."""
    late_s: float = 3.0
    """Seconds for which those who come late are told why the run does not start."""
    connect_s: float = 2.0
    """Most seconds for an attempt to reach the hub."""
    retry_s: float = 0.5
    """Seconds between attempts to reach the hub."""
    no_hub_line_s: float = 5.0
    """Seconds between lines that say that the hub is not there."""
    beat_s: float = 2.0
    """Seconds between two signs of life of a process, and between two looks at what it does."""
    silence_s: float = 20.0
    """Seconds without a sign of life after which a process counts as lost."""
    hub_beat_s: float = 5.0
    """Seconds between two signs of life of the hub."""
    hub_silence_s: float = 20.0
    """Seconds without a sign of life after which the hub counts as lost."""
    locate_s: float = 3.0
    """Seconds in which every process whose Python code runs says where it is."""
    tick_s: float = 0.5
    """Seconds between two looks of the hub at the time."""
    send_s: float = 5.0
    """Most seconds without taking anything of a message; a process that does not receive it then is lost."""

    @property
    def problem_known_s(self) -> float:
        """Seconds after which the hub knows that a process was lost."""
        return self.silence_s + 2 * self.beat_s

    @property
    def meeting_silence_s(self) -> float:
        """While processes are missing, the hub counts as lost after this many seconds without a line from it."""
        return self.line_interval_s + self.hub_silence_s


TIMING = ProcessTiming()
