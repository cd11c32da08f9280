"""Watches, from another thread, the activity of this process and whether it is stuck."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardplan.errors import PeerError, ShardplanError, one_line
from shardplan.runtime.environment import STARTED
from shardplan.runtime.processes.timing import TIMING, ProcessTiming
from shardplan.runtime.processes.watch.activity import Activity, describe_stall, is_stalled
from shardplan.runtime.processes.watch.frozen import expect_python
from shardplan.runtime.processes.watch.places import THREAD_PREFIX, find_place
from shardplan.runtime.processes.watch.stacks import process_stacks

logger = logging.getLogger(__name__)


class Watch:
    """The watch over a process that runs alone; `Link` is its counterpart for several processes."""

    def __init__(self, timing: ProcessTiming = TIMING) -> None:
        """Start to watch this process."""
        self.timing = timing
        self.activity = Activity(since=time.monotonic())
        """Activity of this process."""
        self._problem: ShardplanError | None = None
        self._changed = threading.Condition()
        self._depth = 0
        self._phase_started = STARTED
        self._seconds: dict[str, float] = {}
        process_stacks().activity_lines = self._activity_lines
        threading.Thread(target=self._beat, name=f"{THREAD_PREFIX}watch", daemon=True).start()

    @property
    def problem(self) -> ShardplanError | None:
        """Why the run cannot continue: this process is stuck, or another one was lost, failed, or is stuck."""
        return self._problem

    def seconds(self) -> dict[str, float]:
        """Return phase -> seconds spent in it so far."""
        return self._seconds | {self.activity.phase: self._seconds_of_phase(time.monotonic())}

    def _seconds_of_phase(self, now: float) -> float:
        """Return the seconds of this phase and of earlier phases with its name."""
        return self._seconds.get(self.activity.phase, 0.0) + now - self._phase_started

    @contextlib.contextmanager
    def work(self, *, is_end: bool = False) -> Iterator[None]:
        """Take part in work that needs all processes; within the context, the others wait for this process.

        Args:
            is_end: whether this process has done all of its work, and waits for the others.

        Raises:
            PeerError: the run has failed before.
        """
        self._note_progress()
        self._depth += 1  # before anything can be told that must be acted on
        try:
            self._enter(is_end)
        except ShardplanError:
            self._end_work()
            raise
        problem: str | None = None
        try:
            yield
        except KeyboardInterrupt:
            problem = "interrupted with Ctrl-C"
            raise
        except BaseException as error:
            is_known = error is self._problem or getattr(error, "is_shared", False)
            is_exit = isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)
            problem = None if is_known or is_exit else one_line(error) or type(error).__name__
            raise
        finally:
            self._leave(problem)
            self._note_progress()
            self._end_work()

    def _end_work(self) -> None:
        with self._changed:
            self._depth -= 1
            if self._depth == 0:
                expect_python(None)

    def set_activity(self, activity: Activity) -> None:
        """Set the current activity of this process."""
        now = time.monotonic()
        before = self.activity
        has_progress = (activity.number, activity.done) != (before.number, before.done)
        if activity.number != before.number:
            self._seconds[before.phase] = self._seconds_of_phase(now)
            self._phase_started = now
        self.activity = replace(activity, since=now if has_progress else before.since)
        if activity.number != before.number:
            self._report()
            self._expect_python()

    def _note_progress(self) -> None:
        """Record that this process has made progress."""
        self.activity = replace(self.activity, since=time.monotonic())

    def _enter(self, is_end: bool) -> None:
        """Inform the others that they may wait for this process; a process that runs alone forgets earlier stalls."""
        self._problem = None

    def _leave(self, problem: str | None) -> None:
        """Inform the others that they need not wait for this process any more, and why it failed, if it did."""

    def _report(self) -> None:
        """Check whether this process is stuck."""
        now, activities = time.monotonic(), {0: self.activity}
        if self._depth > 0 and is_stalled(activities, set(), now):
            self._fail(PeerError(f"{describe_stall(activities, set(), {0: find_place()}, now)}; start it again"))

    def _expect_python(self) -> None:
        """End this process if its Python code does not run within the limit, while others may wait for it."""
        with self._changed:
            if self._depth > 0:
                expect_python(self._seconds_left())

    def _seconds_left(self) -> float:
        """Return the seconds within which Python code of this process must run again."""
        return self.activity.deadline_s - (time.monotonic() - self.activity.since)

    def _activity_lines(self) -> list[str]:
        """Return lines on the activity of this process, for the file of stacks."""
        activity = self.activity
        seconds = time.monotonic() - activity.since
        return [f"this process was {activity.text}; its last progress was {seconds:.0f} s ago"]

    def _fail(self, problem: ShardplanError) -> None:
        """Record why this process cannot continue, and act on it, because its main thread may be stuck."""
        if self._depth > 0:  # before the main thread goes on
            problem = type(problem)(f"{problem}; {process_stacks().write(str(problem))}")
        with self._changed:
            if self._problem is not None:
                return
            self._problem = problem
            self._changed.notify_all()
        if self._depth > 0:
            if _on_problem is None:
                logger.error("%s", problem)
            else:
                _on_problem(problem)

    def _beat(self) -> None:
        while True:
            if self._problem is None:
                self._report()
                self._expect_python()
            time.sleep(self.timing.beat_s)


_on_problem: Callable[[ShardplanError], None] | None = None


@contextlib.contextmanager
def handle_problem(act: Callable[[ShardplanError], None]) -> Iterator[None]:
    """Within the context, call `act` from another thread if the run cannot continue with this process."""
    global _on_problem
    before, _on_problem = _on_problem, act
    try:
        yield
    finally:
        _on_problem = before
