"""Time limits of a run's processes and their hub, in one object, which tests replace by shorter limits.

A process that is stopped, or whose network is cut, closes no connection: only the lack of its messages shows that it is
lost. So every process sends a sign of life in each interval, and the hub does; each side counts the other as lost after
several of them are missing.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class ProcessTiming:
    """Intervals and limits of the processes of a run, in seconds."""

    start_limit_s: float = 300.0
    """Maximum seconds to wait for processes that have not started."""
    lines_at_s: tuple[float, ...] = (2.0, 5.0, 10.0, 15.0, 20.0, 25.0)
    """Seconds after which all processes are told which ones are missing; repeated every `line_interval_s`."""
    line_interval_s: float = 30.0
    remedy_after_s: float = 10.0
    """Seconds after which lines about missing processes also give a remedy."""
    late_s: float = 3.0
    """Seconds for which processes that come late are told why the run does not start."""
    connect_s: float = 2.0
    """Maximum seconds for an attempt to reach the hub."""
    retry_s: float = 0.5
    """Seconds between attempts to reach the hub."""
    no_hub_line_s: float = 5.0
    """Seconds between lines that report that the hub is not there."""
    beat_s: float = 2.0
    """Seconds between two heartbeats of a process, and between two checks of its activity."""
    silence_s: float = 20.0
    """Seconds without a heartbeat after which a process counts as lost."""
    hub_beat_s: float = 5.0
    """Seconds between two heartbeats of the hub."""
    hub_silence_s: float = 20.0
    """Seconds without a heartbeat after which the hub counts as lost."""
    locate_s: float = 3.0
    """Seconds in which every process that can run Python code reports its location in the code."""
    tick_s: float = 0.5
    """Seconds between two checks of the time by the hub."""
    send_s: float = 5.0
    """Seconds after which a process that receives nothing of a sent message counts as lost."""

    @property
    def problem_known_s(self) -> float:
        """Seconds after which the hub knows that a process was lost."""
        return self.silence_s + 2 * self.beat_s

    @property
    def meeting_silence_s(self) -> float:
        """Seconds without a line from the hub after which it counts as lost, while processes are missing."""
        return self.line_interval_s + self.hub_silence_s


TIMING = ProcessTiming()
