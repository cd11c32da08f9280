"""The loop over the steps of a run: inputs are made ahead, and results fetched while the devices compute."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray

from shardplan.eval.shards import Shards
from shardplan.eval.windows import Count, Rows, Windows
from shardplan.eval.workers import make_rows
from shardplan.step.aot_program import Program

STEPS_AHEAD = 2
"""Steps that are given to the devices before the results of an earlier one are fetched."""
SHARDS_AHEAD = 2
"""Shards whose sequences are made before the devices need them."""


@dataclass(frozen=True)
class Lanes:
    """The parts of a batch that different devices compute, and which of them are this process's."""

    count: int
    sequences: int
    """Sequences of a lane in one step."""
    own: tuple[int, ...]
    """Lanes of which this process has a device, in order."""
    written: tuple[int, ...]
    """Lanes whose results this process writes: it is the first of those that have them."""


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

    @property
    def windows_per_second(self) -> float | None:
        """Rate without the first step; None if there is no other one."""
        return self.timed_windows / self.seconds if self.seconds else None

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
        started = time.perf_counter()
        self._step = program.compile(options)
        self.statistics.compile_seconds, self.statistics.programs = time.perf_counter() - started, 1

    def run(
        self,
        shards: Shards,
        remaining: Iterable[int],
        windows: Windows,
        workers: Executor,
        on_lane: Callable[[int, int, Rows, Mapping[str, np.ndarray]], None],
        goes_on: Callable[[int], bool],
        on_step: Callable[[Count], None],
        check_token: Callable[[int], None],
    ) -> bool:
        """Run the program over the sequences of the `remaining` shards.

        Args:
            on_lane: takes a shard, a lane, its sequences, and output -> [sequence, position]; called for every lane
                that this process writes.
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
                ranges = {lane: shards.lane_range(shard, lane) for lane in self._lanes.own}
                made.append((shard, {lane: workers.submit(make_rows, windows.job(*r)) for lane, r in ranges.items()}))

        def fetch() -> None:
            nonlocal started
            shard, step, scores = waiting.popleft()
            for name, array in zip(self._outputs, scores, strict=True):
                for lane, values in self._to_host(array.array).items():
                    results.setdefault(lane, {}).setdefault(name, []).append(values)
            count = _count(windows, shards.step_ranges(shard, step))
            self._add(count, started)
            started = started or time.perf_counter()
            on_step(count)
            if step == shards.steps_of(shard) - 1:
                for lane in self._lanes.written:
                    columns = {name: np.concatenate(parts) for name, parts in results[lane].items()}
                    on_lane(shard, lane, rows[shard][lane], columns)
                results.clear()
                del rows[shard]

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
                scores = scores if isinstance(scores, tuple) else (scores,)
                for array in scores:
                    array.array.copy_to_host_async()
                waiting.append((shard, step, scores))
                self.statistics.steps += 1
                if len(waiting) > STEPS_AHEAD:
                    fetch()
        while waiting:
            fetch()
        return completed

    def _add(self, count: Count, started: float | None) -> None:
        """Add what a step scored, `started` being the time at which the results of the first one came."""
        statistics = self.statistics
        statistics.windows, statistics.tokens = statistics.windows + count.windows, statistics.tokens + count.tokens
        if started is not None:
            statistics.timed_windows += count.windows
            statistics.timed_tokens += count.tokens
            statistics.timed_steps += 1
            statistics.seconds = time.perf_counter() - started

    def _collect(self, jobs: Mapping[int, Future[Rows]], waiting: Sequence[tuple[NamedArray, ...]]) -> dict[int, Rows]:
        """Return the sequences of every lane; count the time that the devices wait for them."""
        started = time.perf_counter()
        if waiting and not all(job.done() for job in jobs.values()):
            jax.block_until_ready(waiting[-1][0].array)
            started = time.perf_counter()
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
        height = self._lanes.sequences
        lanes: dict[int, np.ndarray] = {}
        for shard in array.addressable_shards:
            lane = (shard.index[0].start or 0) // height
            if lane in self._lanes.written:
                values = lanes.setdefault(lane, np.empty((height, self._shape[1]), array.dtype))
                values[:, shard.index[1]] = np.asarray(shard.data)
        return lanes


def _count(windows: Windows, ranges: Iterable[tuple[int, int]]) -> Count:
    """Return how much ranges of sequences hold."""
    ends = [(windows.count(first), windows.count(last)) for first, last in ranges]
    return Count(*(sum(end[i] - first[i] for first, end in ends) for i in range(2)))
