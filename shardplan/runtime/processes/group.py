"""Values that all processes of a run exchange or agree on, within work that needs all of them.

A collective waits for ever for a process that does not enter it. So the processes compare what must be equal before
they enter one, and each of them learns at once when another is lost or fails, as a `PeerError`.
"""

import contextlib
import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import jax

from shardplan.errors import CheckpointError, ShardplanError, check_argument
from shardplan.runtime.processes.hub.messages import MessageKind, problem_values
from shardplan.runtime.processes.link import Link, PhaseProgress, error_of
from shardplan.runtime.processes.start import current_watch
from shardplan.runtime.processes.watch.activity import DEADLINE_S, Activity
from shardplan.runtime.processes.watch.watch import Watch, handle_problem

SHOWN = 200
"""Number of characters from which a text is compared by its digest."""
Disagreement = Callable[[str, int, str | None, str | None], ShardplanError]
"""Makes the error from: the differing part, the process, its value, and process 0's value."""


class Advance(Protocol):
    """Reports the progress of a phase."""

    def __call__(self, done: float, doing: str = "") -> None:
        """Report how much is done, in any unit, and what is done next."""


_groups_opened = 0
_phases_begun = 0


def _other_checkpoint(part: str, process: int, value: str | None, expected: str | None) -> ShardplanError:
    return CheckpointError(
        f"the version of {part} is {value} in process {process} and {expected} in process 0; make all processes read "
        "the same checkpoint"
    )


class ProcessGroup:
    """All processes of a run, during work that needs all of them."""

    def __init__(self, name: str, watch: Watch) -> None:
        """Make the group of all processes.

        Args:
            name: name that separates the values of this group from the values of other groups.
            watch: a `Link` to the hub if there are other processes.
        """
        self.process_index, self.process_count = jax.process_index(), jax.process_count()
        self._name, self.watch = name, watch
        self._link = watch if isinstance(watch, Link) else None

    @contextlib.contextmanager
    def phase(self, phase: str, deadline_s: float = DEADLINE_S) -> Iterator[Advance]:
        """Name the activity of this process within the context, such as `loading`.

        All processes have the same phases in the same order. A process without progress for `deadline_s` seconds counts
        as stuck.

        Yields:
            A function to call with the amount of work done, and a description of what is done next.
        """
        global _phases_begun
        _phases_begun += 1
        before = self.watch.activity
        activity = Activity(phase, _phases_begun, 0.0, deadline_s)
        self.watch.set_activity(activity)

        def advance(done: float, doing: str = "") -> None:
            # not the number that it began with: phases inside of it may have begun and ended meanwhile
            self.watch.set_activity(dataclasses.replace(activity, number=_phases_begun, done=done, doing=doing))

        try:
            yield advance
        finally:
            _phases_begun += 1
            self.watch.set_activity(dataclasses.replace(before, number=_phases_begun))

    def progress(self) -> PhaseProgress | None:
        """Return how much all processes have done in this phase; None if unknown."""
        return None if self._link is None else self._link.progress

    def agree[T](
        self,
        name: str,
        compute: Callable[[], T],
        describe: Callable[[T], Mapping[str, str]],
        disagreement: Disagreement = _other_checkpoint,
    ) -> T:
        """Compute a value in every process, check that all processes have equal values, and return it.

        Args:
            name: key of the exchange; it must be new in this group.
            compute: function that computes the value of this process.
            describe: maps a value to the name and the digest (or text) of each of its parts, which must be equal in all
                processes.
            disagreement: function that makes the error if they are not equal.

        Raises:
            ShardplanError: the error of `disagreement`, or an error that `compute` raised in this process or in
                another.
        """
        if self._link is None:
            return compute()
        own: ShardplanError | None = None
        parts: Mapping[str, str] = {}
        try:
            value = compute()
            parts = dict(describe(value))
        except ShardplanError as error:
            own = error
        problem = None if own is None else problem_values(own)
        answer = self._ask(MessageKind.AGREE, name, parts=parts, problem=problem)
        if answer.get("process") is None:
            return value
        process = answer["process"]
        if own is not None and process == self.process_index:
            raise _shared(own)
        if "problem" in answer:
            other = error_of(answer["problem"])
            raise _shared(type(other)(f"process {process}: {other}"))
        raise _shared(disagreement(answer["part"], process, *answer["values"]))

    def wait_for_all(self, name: str) -> None:
        """Wait until all processes have called this method.

        Args:
            name: key of the exchange; it must be new in this group.
        """
        if self._link is not None:
            self._ask(MessageKind.AGREE, name, parts={}, problem=None)

    def maximum(self, name: str, value: int) -> int:
        """Return the largest of the numbers of all processes.

        Args:
            name: key of the exchange; it must be new in this group.
        """
        return value if self._link is None else int(self._ask(MessageKind.MAXIMUM, name, value=value)["value"])

    def gather(self, name: str, value: Any) -> dict[int, Any]:
        """Send a JSON value to all processes, and return process -> value after all have sent theirs.

        All values are sent to every process, so that the traffic grows with the square of the number of processes.
        """
        if self._link is None:
            return {self.process_index: value}
        return dict(enumerate(self._ask(MessageKind.GATHER, name, value=value)["values"]))

    def broadcast(self, name: str, compute: Callable[[], Any]) -> Any:
        """Compute a JSON value in process 0, and return it in all processes.

        Args:
            name: key of the exchange; it must be new in this group.

        Raises:
            ShardplanError: `compute` raised this error; it is raised in all processes.
        """
        if self._link is None:
            return compute()
        key = f"{self._name}/{name}"
        if self.process_index == 0:
            try:
                value = compute()
            except ShardplanError as error:
                self._link.send(MessageKind.BROADCAST, name=key, problem=problem_values(error))
                raise _shared(error) from None
            self._link.send(MessageKind.BROADCAST, name=key, value=value)
            return value
        answer = self._ask(MessageKind.BROADCAST, name)
        if "problem" in answer:
            other = error_of(answer["problem"])
            raise _shared(type(other)(f"process 0: {other}"))
        return answer["value"]

    def exchange(self, name: str, messages: Mapping[int, Any]) -> dict[int, Any]:
        """Send messages to some processes, and return sending process -> message for each message to this process.

        Args:
            name: key of the exchange; it must be new in this group.
            messages: process -> JSON value for it.
        """
        if self._link is None:
            return dict(messages)
        values = {str(process): message for process, message in messages.items()}
        received = self._ask(MessageKind.EXCHANGE, name, values=values)["values"]
        return {int(process): message for process, message in received.items()}

    def _ask(self, kind: MessageKind, name: str, **values: Any) -> dict[str, Any]:
        """Send a message, and return the reply, which comes after all processes have sent theirs."""
        assert self._link is not None
        key = f"{self._name}/{name}"
        self._link.send(kind, name=key, **values)
        return self._link.wait_for(kind, key)


def short_text(text: str) -> str:
    """Return the text to show if processes disagree: the text itself, or a digest of a long one."""
    return text if len(text) < SHOWN else hashlib.sha256(text.encode()).hexdigest()


def _shared(error: ShardplanError) -> ShardplanError:
    """Mark an error as one that all processes raise, so that it is not reported to the others."""
    error.is_shared = True
    return error


@contextlib.contextmanager
def open_process_group() -> Iterator[ProcessGroup]:
    """Open the group of all processes; within the context, each learns at once if another is lost or fails.

    Every process must enter the block the same number of times.

    Raises:
        PeerError: another process was lost, failed, or is stuck, now or before.
    """
    global _groups_opened
    _groups_opened += 1
    watch = current_watch()
    group = ProcessGroup(str(_groups_opened), watch)
    with watch.work():
        try:
            yield group
        except ShardplanError:
            raise
        except Exception:
            # most likely a collective failed because a process was lost, which the hub knows a little later
            problem = watch.await_problem() if isinstance(watch, Link) else None
            if problem is None:
                raise
            raise problem from None


@contextlib.contextmanager
def watch(
    phase: str, deadline_s: float, on_problem: Callable[[ShardplanError], None] | None = None
) -> Iterator[Advance]:
    """Watch the processes of a run while they do work that needs all of them, such as the steps of a training.

    Every process must enter the block the same number of times; all processes begin it together. If a process is lost,
    fails, or is stuck, every process is informed in a separate thread, because its main thread may be in a collective
    that never returns.

    Args:
        phase: what the processes do, such as `training`.
        deadline_s: most seconds without progress.
        on_problem: called with the problem in the separate thread; default: the problem is logged as an error.

    Yields:
        A function to call with the number of finished steps, and optionally with a description of what is done next.

    Raises:
        PeerError: another process was lost or failed, and the main thread noticed.
    """
    check_argument("watch", "phase", phase, str, "what the processes do, such as 'training'")
    check_argument("watch", "deadline_s", deadline_s, (int, float), "the most seconds without progress")
    with contextlib.ExitStack() as stack:
        if on_problem is not None:
            stack.enter_context(handle_problem(on_problem))
        processes = stack.enter_context(open_process_group())
        processes.wait_for_all("begin")
        yield stack.enter_context(processes.phase(phase, deadline_s))
