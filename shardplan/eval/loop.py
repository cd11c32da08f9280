"""The loop over the steps of a run: inputs are made ahead, and results fetched while the devices compute."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.eval.shards import Shards
from shardplan.eval.windows import Count, Rows
from shardplan.execution.aot_program import Program

STEPS_AHEAD = 2
"""Steps that are given to the devices before the results of an earlier one are fetched."""
MIN_REGULAR, STALL_FACTOR = 3, 3.0
"""Steps from which on the usual time is known, and how many times that a step is a stall."""
SHARDS_AHEAD = 2
"""Shards whose sequences are made before the devices need them."""
MIN_DEADLINE_S, DEADLINE_FACTOR = 300.0, 30.0
"""Seconds without the results of a step after which a run counts as stuck: at least these, and so many times what the
plan predicts."""


def step_deadline(predicted_s: float) -> float:
    """Return the seconds without the results of a step after which a run counts as stuck.

    Args:
        predicted_s: seconds that a step takes by the plan.
    """
    return max(MIN_DEADLINE_S, DEADLINE_FACTOR * predicted_s)


@dataclass(frozen=True)
class Lanes:
    """The lanes of a batch, which are equal numbers of its rows, and those that concern this process."""

    count: int
    sequences: int
    """Sequences of a lane in one step."""
    own: tuple[int, ...]
    """Lanes of which this process has a device, in order."""
    written: tuple[int, ...]
    """Lanes whose results this process takes: it is the first of those that have them."""


def find_lanes(program: Program) -> Lanes:
    """Return the lanes of the batch of a program whose second argument is an array [batch, position]."""
    array = program.arguments[1].array
    first: dict[int, int] = {}
    own = set[int]()
    for device, index in array.sharding.devices_indices_map(array.shape).items():
        row = index[0].start or 0
        first[row] = min(device.process_index, first.get(row, device.process_index))
        if device.process_index == jax.process_index():
            own.add(row)
    lanes = {row: i for i, row in enumerate(sorted(first))}
    written = sorted(lanes[row] for row in own if first[row] == jax.process_index())
    own_lanes = tuple(sorted(lanes[row] for row in own))
    return Lanes(len(lanes), array.shape[0] // len(lanes), own_lanes, tuple(written))


class Scored(NamedTuple):
    """The sequences of a lane in a shard, and their scores."""

    rows: Rows
    scores: Mapping[str, np.ndarray]
    """Output of the program -> [sequence, position]."""


@dataclass
class LoopStatistics:
    """Counts and durations of a run."""

    steps: int = 0
    windows: int = 0
    """Windows that were scored."""
    tokens: int = 0
    """Tokens that were scored, without context and padding."""
    timed_windows: int = 0
    """Windows whose results came after those of the first step."""
    timed_tokens: int = 0
    """Tokens of these windows."""
    timed_steps: int = 0
    """Steps of these windows."""
    seconds: float = 0.0
    """Time from the results of the first step to those of the last."""
    compile_seconds: float = 0.0
    programs: int = 0
    """Programs that were compiled."""
    waiting_seconds: float = 0.0
    """Time in which the devices had nothing to compute, because sequences were not made yet."""
    blocked_seconds: float = 0.0
    """Time in which nothing was left to do but to wait for the results of the devices."""
    stalled_seconds: float = 0.0
    """Time of steps that took more than three times the usual, beyond the usual."""
    usual_step_seconds: float = 0.0
    """Mean time of the other steps."""

    @property
    def windows_per_second(self) -> float | None:
        """Rate without the first step; None if there is no other one."""
        return self.timed_windows / self.seconds if self.seconds else None

    @property
    def step_seconds(self) -> float | None:
        """Mean time of a step without the first one; None if there is no other one."""
        return self.seconds / self.timed_steps if self.timed_steps else None

    @property
    def tokens_per_second(self) -> float | None:
        """Rate without the first step; None if there is no other one."""
        return self.timed_tokens / self.seconds if self.seconds else None


class Loop:
    """Runs a program over the sequences of shards."""

    def __init__(self, module: Any, program: Program, options: Mapping[str, str], outputs: Sequence[str], lanes: Lanes):
        """Compile the program.

        Args:
            module: the Levanter model with its arrays: the program's first argument. Its others are arrays [batch,
                position] of one sharding, as are its results.
            options: compiler options, as in `Plan.compiler_options`.
            outputs: names of the results.
            lanes: those of the program.
        """
        self._module, self._outputs, self._inputs = module, outputs, program.arguments[1:]
        self._shape, self._lanes = self._inputs[0].array.shape, lanes
        self.statistics = LoopStatistics()
        self._stalls = 0
        started = time.perf_counter()
        self._step = _with_whole_rows(program).compile(options)
        self.statistics.compile_seconds, self.statistics.programs = time.perf_counter() - started, 1

    def run(
        self,
        shards: Shards,
        remaining: Iterable[int],
        make: Callable[[int, int], Future[Rows]],
        count: Callable[[int], Count],
        on_shard: Callable[[int, Mapping[int, Scored]], None],
        goes_on: Callable[[int], bool],
        on_step: Callable[[Count], None],
        check_token: Callable[[int], None],
    ) -> bool:
        """Run the program over the sequences of the `remaining` shards.

        Args:
            make: starts to make the sequences from a first to a last one, in another thread or process.
            count: `Windows.count`.
            on_shard: takes a shard, and the results of the lanes that are written by this process.
            goes_on: whether to begin a shard; it must be the same in all processes.
            on_step: takes how much was scored in each step.
            check_token: raises if the model has no embedding for a token; called with the largest of each shard.

        Returns:
            Whether all shards were scored.
        """
        made: deque[tuple[int, dict[int, Future[Rows]]]] = deque()
        waiting: deque[tuple[int, int, tuple[NamedArray, ...]]] = deque()
        rows: dict[int, dict[int, Rows]] = {}
        results: dict[int, dict[str, list[np.ndarray]]] = {}
        ahead = iter(remaining)
        started: float | None = None

        def submit() -> None:
            shard = next(ahead, None)
            if shard is not None:
                made.append((shard, {lane: make(*shards.lane_range(shard, lane)) for lane in self._lanes.own}))

        def fetch() -> None:
            nonlocal started
            shard, step, scores = waiting.popleft()
            waited = time.perf_counter()
            jax.block_until_ready([array.array for array in scores])
            self.statistics.blocked_seconds += time.perf_counter() - waited
            for name, array in zip(self._outputs, scores, strict=True):
                for lane, values in self._to_host(array.array).items():
                    results.setdefault(lane, {}).setdefault(name, []).append(values)
            scored = _count(count, shards.step_ranges(shard, step))
            self._add(scored, started)
            started = started or time.perf_counter()
            on_step(scored)
            if step == shards.steps_of(shard) - 1:
                own, parts = rows.pop(shard), {lane: results.pop(lane) for lane in self._lanes.written}
                joined = {
                    lane: {name: np.concatenate(each) for name, each in columns.items()}
                    for lane, columns in parts.items()
                }
                on_shard(shard, {lane: Scored(own[lane], scores) for lane, scores in joined.items()})

        for _ in range(SHARDS_AHEAD):
            submit()
        completed = True
        while made:
            shard, jobs = made.popleft()
            if not goes_on(shard):
                completed = False
                break
            rows[shard] = self._collect(jobs, [scores for _, _, scores in waiting])
            check_token(max(int(each.inputs[0].max()) for each in rows[shard].values()))
            submit()
            for step in range(shards.steps_of(shard)):
                scores = self._step(self._module, *self._place(rows[shard], step))
                for array in scores:
                    array.array.copy_to_host_async()
                waiting.append((shard, step, scores))
                self.statistics.steps += 1
                if len(waiting) > STEPS_AHEAD:
                    fetch()
        while waiting:
            fetch()
        return completed

    def _add(self, scored: Count, started: float | None) -> None:
        """Add a step to the statistics.

        Args:
            started: when the results of the first step came, from which on the run is timed; None if this is that step.
        """
        statistics = self.statistics
        statistics.windows, statistics.tokens = statistics.windows + scored.windows, statistics.tokens + scored.tokens
        if started is not None:
            statistics.timed_windows += scored.windows
            statistics.timed_tokens += scored.tokens
            seconds = time.perf_counter() - started
            self._add_step_time(seconds - statistics.seconds)
            statistics.seconds = seconds

    def _add_step_time(self, seconds: float) -> None:
        """Count the time between the results of two steps as usual, or as a stall."""
        statistics = self.statistics
        usual, regular = statistics.usual_step_seconds, statistics.timed_steps - self._stalls
        statistics.timed_steps += 1
        if regular >= MIN_REGULAR and seconds > STALL_FACTOR * usual:
            self._stalls += 1
            statistics.stalled_seconds += seconds - usual
        else:
            statistics.usual_step_seconds = (usual * regular + seconds) / (regular + 1)

    def _collect(self, jobs: Mapping[int, Future[Rows]], waiting: Sequence[tuple[NamedArray, ...]]) -> dict[int, Rows]:
        """Return the sequences of every lane; count the time that the devices wait for them."""
        started = time.perf_counter()
        if waiting and not all(job.done() for job in jobs.values()):
            jax.block_until_ready(waiting[-1][0].array)
            waited, started = started, time.perf_counter()
            self.statistics.blocked_seconds += started - waited
        rows = {lane: job.result() for lane, job in jobs.items()}
        if self.statistics.steps:
            self.statistics.waiting_seconds += time.perf_counter() - started
        return rows

    def _place(self, rows: Mapping[int, Rows], step: int) -> list[NamedArray]:
        """Put the inputs of a step on the devices of this process."""
        height = self._lanes.sequences
        part = slice(step * height, (step + 1) * height)

        def place(number: int, like: NamedArray) -> NamedArray:
            def values(index: tuple[slice, ...]) -> np.ndarray:
                lane = (index[0].start or 0) // height
                return rows[lane].inputs[number][part, index[1]]

            return hax.named(jax.make_array_from_callback(self._shape, like.array.sharding, values), like.axes)

        return [place(*each) for each in enumerate(self._inputs)]

    def _to_host(self, array: jax.Array) -> dict[int, np.ndarray]:
        """Return lane -> [sequence, position] of the results [batch, position] of a step, for written lanes."""
        shards = {(each.index[0].start or 0) // self._lanes.sequences: each for each in array.addressable_shards}
        return {lane: np.asarray(shards[lane].data) for lane in self._lanes.written}


def _with_whole_rows(program: Program) -> Program:
    """Return the program with a tuple of results whose rows are sharded like those of the tokens.

    Each lane has all of its positions on every device, so that one process can write it, and nothing else is
    replicated.
    """
    tokens = program.arguments[1]
    # not by Haliax, which in some versions leaves the sharding of axes without a mapping to the compiler
    by_row = NamedSharding(program.mesh, PartitionSpec(tokens.array.sharding.spec[0], None))

    def function(*arguments: Any) -> tuple[NamedArray, ...]:
        results = program.function(*arguments)
        several = [each.rearrange(tokens.axes) for each in (results if isinstance(results, tuple) else (results,))]
        return tuple(hax.named(jax.lax.with_sharding_constraint(each.array, by_row), each.axes) for each in several)

    return replace(program, function=function)


def _count(count: Callable[[int], Count], ranges: Iterable[tuple[int, int]]) -> Count:
    """Count windows and tokens in ranges of sequences."""
    ends = [(count(first), count(last)) for first, last in ranges]
    return Count(*(sum(end[i] - first[i] for first, end in ends) for i in range(2)))
