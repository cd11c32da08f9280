"""The protocol of a run's hub: its replies to processes. Pure: no sockets, and the time is an argument.

All processes of a run are connected to one hub, which is a process of its own beside process 0, so that it goes on when
that one is stuck or killed. Before JAX connects the processes, they meet here: JAX would wait five minutes for one that
was never started, and not say which. From then on the hub passes on the values that they exchange, and watches them.
Its work for an exchange is in proportion to the number of processes, and for a sign of life the same for any number.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Any, NamedTuple

from shardplan.errors import ConfigError, PeerError, ShardplanError
from shardplan.runtime.environment import ADDRESS, PROCESS_COUNT, PROCESS_ID
from shardplan.runtime.processes.hub.exchanges import Exchanges
from shardplan.runtime.processes.hub.messages import Message, MessageKind, problem_values
from shardplan.runtime.processes.timing import TIMING, ProcessTiming
from shardplan.runtime.processes.watch.activity import Activity, CodeLocation, describe_stall, is_stalled, names_of

OWN_WORK = "working on its own"
"""Activity of a process that does other work while the others wait; it follows `while` in messages."""
AGAIN = "start the run again"
SHOWN = 3
"""Maximum number of hosts, and of differences, that a message names."""


@dataclass(frozen=True)
class Member:
    """The identity of a process, as it sends it when it joins."""

    index: int
    count: int
    """Number of processes for which this process was started."""
    host: str
    pid: int
    facts: Mapping[str, str]
    """Name -> value of each setting that must be equal in all processes."""

    def __str__(self) -> str:
        """Format the index of the process with its host and its pid."""
        return f"process {self.index} on {self.host} (pid {self.pid})"


class Reply(NamedTuple):
    """A message to send to a connection."""

    to: int
    kind: MessageKind
    values: Mapping[str, Any]


class _State(Enum):
    MEETING = auto()
    RUNNING = auto()
    REFUSED = auto()
    """The run will not start; processes that come late are told why."""


@dataclass
class _Peer:
    """The hub's state of a connected process."""

    member: Member
    activity: Activity
    heard: float
    """Time of the last message from the process."""
    depth: int = 0
    """Nesting depth of blocks of work that needs all processes."""
    entered: int = 0
    """Number of blocks of joint work entered so far; all processes enter the same blocks."""

    def progress(self, now: float) -> None:
        """Record that the process has made progress."""
        self.activity = replace(self.activity, since=now)


@dataclass
class _Entry:
    """Which process was the first to enter a block of joint work, and how many have entered it."""

    process: int
    is_end: bool
    """Whether the block of work is the wait for all other processes at the end of the run."""
    count: int = 0
    """Number of processes that have entered the block."""


class Hub:
    """The state of a run's hub: which processes have joined, what they do, and what they exchange."""

    def __init__(
        self,
        count: int,
        limit_s: float,
        now: float,
        start_service: Callable[[], str],
        timing: ProcessTiming = TIMING,
    ):
        """Wait for `count` processes for at most `limit_s` seconds.

        Args:
            start_service: called when all processes have joined; returns the address at which JAX connects them.
        """
        self._count, self._limit_s, self._start_service = count, limit_s, start_service
        self.timing = timing
        self._state, self._started = _State.MEETING, now
        self._peers: dict[int, _Peer] = {}
        self._connections: dict[int, int] = {}
        """Connection -> process."""
        self.silent = set[int]()
        """Connections of processes that are lost, though they have not ended."""
        self._ended: _Peer | None = None
        """The ended process that had entered the fewest blocks of work; None if none has ended."""
        self._most_entered, self._ahead_at = 0, now
        """How many blocks of work the process that is furthest ahead has entered, and when it entered the last one."""
        self._entries: dict[int, _Entry] = {}
        """Index of a block of work that not all have entered -> who entered it first."""
        self._has_failed = False
        """Whether the processes know of a problem; if so, a process that ends is no further problem."""
        self._exchanges = Exchanges(count)
        self._places: dict[int, CodeLocation] | None = None
        """Locations of processes in their code; None unless one is stuck."""
        self._places_due = 0.0
        self._alive_due = now
        self._lines = _line_times(limit_s, timing)
        self._next_line = next(self._lines)
        self._problem: ShardplanError | None = None
        self._ends = float("inf")

    @property
    def is_meeting(self) -> bool:
        """Whether some processes have not joined yet."""
        return self._state is _State.MEETING

    @property
    def is_running(self) -> bool:
        """Whether all processes have joined; some or all may have ended since."""
        return self._state is _State.RUNNING

    def is_over(self, now: float) -> bool:
        """Return whether the run cannot start, and late processes have had time to receive the reason."""
        return now >= self._ends

    def receive(self, connection: int, message: Message, now: float) -> list[Reply]:
        """Return the replies to a message."""
        if message["kind"] is MessageKind.HELLO:
            member = Member(**{name: message[name] for name in Member.__dataclass_fields__})
            return self._greet(connection, member, now)
        index = self._connections.get(connection)
        if index is None:
            return []
        peer = self._peers[index]
        peer.heard = now
        match message["kind"]:
            case MessageKind.BEAT:
                peer.activity = peer.activity.updated(message["activity"], now)
                return [self._progress(connection, peer.activity)] if index == 0 else []
            case MessageKind.ENTER:
                peer.progress(now)
                return self._enter(connection, peer, message["is_end"], now)
            case MessageKind.LEAVE:
                peer.progress(now)
                peer.depth -= 1
                if message["problem"] is None:
                    return []
                return self._tell_others(index, f"process {index} of {self._count} failed: {message['problem']}")
            case MessageKind.PLACE:
                if self._places is not None:
                    self._places[index] = CodeLocation(**message["place"])
                return []
            case _:
                peer.progress(now)
                return self._exchange(index, message, now)

    def close(self, connection: int, now: float) -> list[Reply]:
        """Handle the end of a process or of its connection; return the messages to the others."""
        index = self._connections.pop(connection, None)
        if index is None:
            return []
        peer = self._peers.pop(index)
        if self._state is not _State.RUNNING:  # it is missing again
            return []
        if self._ended is None or peer.entered < self._ended.entered:
            self._ended = peer
        if peer.depth > 0 and not self._has_failed:
            return self._tell_others(
                index, f"{peer.member} of {self._count} was lost while {peer.activity.phase}: its connection is closed"
            )
        if self._most_entered <= peer.entered:  # nobody waits for it; a fleet that ends asks this thousands of times
            return []
        for to, index in self._connections.items():
            other = self._peers[index]
            if other.depth > 0 and other.entered > peer.entered:
                return self._tell_of_end(peer, to)
        return []

    def _tell_of_end(self, peer: _Peer, to: int) -> list[Reply]:
        """Inform all processes (only `to`, if a problem is known already) that a process ended before joint work."""
        problem = problem_values(
            PeerError(f"{peer.member} of {self._count} has ended, and does not take part; {AGAIN}")
        )
        if self._has_failed:
            return [Reply(to, MessageKind.PROBLEM, problem)]
        self._has_failed = True
        return self._to_all(MessageKind.PROBLEM, problem)

    def tick(self, now: float) -> list[Reply]:
        """Return the messages that are due at this time."""
        if self._state is _State.MEETING:
            return self._remind(now)
        if self._state is not _State.RUNNING:
            return []
        alive: list[Reply] = []
        if now >= self._alive_due:
            self._alive_due, alive = now + self.timing.hub_beat_s, self._to_all(MessageKind.ALIVE, {})
        return alive + self._watch(now)

    @property
    def _missing(self) -> list[int]:
        return [index for index in range(self._count) if index not in self._peers]

    def _greet(self, connection: int, member: Member, now: float) -> list[Reply]:
        """Admit a process to the run, or send it the reason why it does not belong to the run."""
        if self._state is _State.REFUSED:
            assert self._problem is not None
            return [Reply(connection, MessageKind.PROBLEM, problem_values(self._problem))]
        present = self._peers.get(member.index)
        if self._state is _State.RUNNING:
            first = present.member if present else f"process {member.index}"
            error = ConfigError(
                f"a run of {self._count} processes has started already, with {first}: this one has the {PROCESS_ID} of "
                f"another, or is of another run; give it a number of its own, or set another port in {ADDRESS}"
            )
            return [Reply(connection, MessageKind.PROBLEM, problem_values(error))]
        problem = self._find_problem(member, present.member if present else None)
        if problem is not None:
            return [Reply(connection, MessageKind.PROBLEM, problem_values(problem)), *self._refuse(problem, now)]
        self._connections[connection] = member.index
        self._peers[member.index] = _Peer(member, Activity(since=now), now)
        if len(self._peers) < self._count:
            return []
        self._state = _State.RUNNING
        for peer in self._peers.values():
            peer.heard = now
        return self._to_all(MessageKind.GO, {"address": self._start_service()})

    def _find_problem(self, member: Member, present: Member | None) -> ShardplanError | None:
        """Return the reason why a process cannot join the run; None if it can."""
        if member.count != self._count:
            return ConfigError(
                f"{member} was started for {member.count} processes, and process 0 for {self._count}; set "
                f"{PROCESS_COUNT} to the same number everywhere"
            )
        if present is not None:
            return ConfigError(
                f"{present} and {member} have the same id; set {PROCESS_ID} to another number in each process, 0 to "
                f"{self._count - 1}"
            )
        first = next(iter(self._peers.values())).member if self._peers else member
        if first.facts == member.facts:
            return None
        names = sorted({*first.facts, *member.facts})
        pairs = {name: (first.facts.get(name), member.facts.get(name)) for name in names}
        values = [f"{name} is {a} in {first} and {b} in {member}" for name, (a, b) in pairs.items() if a != b]
        more = f" (and {len(values) - SHOWN} more differences)" if len(values) > SHOWN else ""
        return ConfigError(
            f"{'; '.join(values[:SHOWN])}{more}; start the same command in the same environment everywhere"
        )

    def _refuse(self, problem: ShardplanError, now: float) -> list[Reply]:
        self._state, self._problem, self._ends = _State.REFUSED, problem, now + self.timing.late_s
        return self._to_all(MessageKind.PROBLEM, problem_values(problem))

    def _remind(self, now: float) -> list[Reply]:
        """Inform all joined processes from time to time which processes are missing."""
        seconds = now - self._started
        if seconds < self._next_line:
            return []
        missing = self._missing
        if seconds >= self._limit_s:
            problem = PeerError(
                f"{names_of(missing)} of {self._count} did not start within {self._limit_s:.0f} s; {self._remedy}"
            )
            return self._refuse(problem, now)
        self._next_line = next(self._lines)
        text = f"waiting for {names_of(missing)} ({len(missing)} of {self._count} missing), {seconds:.0f} s"
        if seconds >= self.timing.remedy_after_s:
            text = f"{text}; {self._remedy}"
        return self._to_all(MessageKind.WAITING, {"text": text})

    @property
    def _remedy(self) -> str:
        hosts = sorted({peer.member.host for peer in self._peers.values()})
        shown = ", ".join([*hosts[:SHOWN], "..."] if len(hosts) > SHOWN else hosts)
        return (
            f"there: {names_of(sorted(self._peers))} (on {shown}); start the same command with every {PROCESS_ID} from "
            f"0 to {self._count - 1}, or set {PROCESS_COUNT} to the number of processes"
        )

    def _enter(self, connection: int, peer: _Peer, is_end: bool, now: float) -> list[Reply]:
        """Record that a process enters joint work, or that it waits for the others at its end."""
        peer.depth, peer.entered = peer.depth + 1, peer.entered + 1
        if peer.entered > self._most_entered:
            self._most_entered, self._ahead_at = peer.entered, now
        if self._ended is not None and self._ended.entered < peer.entered:
            return self._tell_of_end(self._ended, connection)
        index = peer.member.index
        first = self._entries.setdefault(peer.entered, _Entry(index, is_end))
        first.count += 1
        if first.count == self._count:
            del self._entries[peer.entered]
        if first.is_end == is_end or self._has_failed:
            return []
        ended, other = (index, first.process) if is_end else (first.process, index)
        self._has_failed = True
        error = PeerError(
            f"process {ended} of {self._count} has come to its end, and process {other} begins work that needs all of "
            f"them; call the same functions of shardplan in every process, and {AGAIN}"
        )
        return self._to_all(MessageKind.PROBLEM, problem_values(error))

    def _exchange(self, index: int, message: Message, now: float) -> list[Reply]:
        """Store the value of a process, and return the replies that are now possible."""
        answers = self._exchanges.add(index, message)
        if not answers:
            return []
        for process in answers.keys() & self._peers.keys():
            self._peers[process].progress(now)
        return [Reply(to, *answers[process]) for to, process in self._connections.items() if process in answers]

    def _progress(self, connection: int, own: Activity) -> Reply:
        """Return the total progress in the phase of process 0, and the slowest process."""
        done = {index: each.activity.done for index, each in self._peers.items() if each.activity.number == own.number}
        return Reply(
            connection, MessageKind.PROGRESS, {"done": sum(done.values()), "slowest": min(done, key=lambda i: done[i])}
        )

    def _watch(self, now: float) -> list[Reply]:
        """Inform all processes about a silent process, or about a stall."""
        if self._has_failed:
            return []
        working = {index: peer for index, peer in self._peers.items() if peer.depth > 0}
        for index, peer in working.items():
            if now - peer.heard > self.timing.silence_s:
                text = (
                    f"{peer.member} of {self._count} was lost while {peer.activity.phase}: no sign of life for "
                    f"{self.timing.silence_s:.0f} s"
                )
                self.silent.update(to for to, process in self._connections.items() if process == index)
                return self._tell_others(index, text)
        activities = {index: peer.activity for index, peer in working.items()} | self._expected(working)
        waiting = self._exchanges.waiting
        if not is_stalled(activities, waiting, now):
            self._places = None  # it has gone on meanwhile
            return []
        if self._places is None:
            self._places, self._places_due = {}, now + self.timing.locate_s
            return self._to_all(MessageKind.LOCATE, {})
        if not activities.keys() <= self._places.keys() and now < self._places_due:
            return []
        stall = describe_stall(activities, waiting, self._places, now)
        self._has_failed = True
        return self._to_all(MessageKind.PROBLEM, problem_values(PeerError(f"{stall}; {AGAIN}")))

    def _expected(self, working: Mapping[int, _Peer]) -> dict[int, Activity]:
        """Return the activities of processes that have not begun joint work in which others wait for them.

        Such a process does work of its own, which it may have begun hours before the others began to wait. Its time
        without progress counts from when they began.
        """
        if not working:
            return {}
        return {
            index: replace(peer.activity, phase=OWN_WORK, since=max(peer.activity.since, self._ahead_at))
            for index, peer in self._peers.items()
            if peer.depth == 0 and peer.entered < self._most_entered
        }

    def _tell_others(self, index: int, text: str) -> list[Reply]:
        """Inform all processes but one about a problem."""
        self._has_failed = True
        values = problem_values(PeerError(f"{text}; {AGAIN}"))
        return [Reply(to, MessageKind.PROBLEM, values) for to, process in self._connections.items() if process != index]

    def _to_all(self, kind: MessageKind, values: Mapping[str, Any]) -> list[Reply]:
        return [Reply(connection, kind, values) for connection in self._connections]


def _line_times(limit_s: float, timing: ProcessTiming) -> Iterator[float]:
    """Yield the seconds after which progress lines are due, and finally the limit."""
    seconds = 0.0
    for seconds in timing.lines_at_s:
        if seconds < limit_s:
            yield seconds
    while (seconds := seconds + timing.line_interval_s) < limit_s:
        yield seconds
    yield limit_s
