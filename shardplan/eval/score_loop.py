"""The loop over the steps of a scoring run: inputs are made ahead, and results fetched while the devices compute."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from shardplan.eval.extraction.windows import Shards, WindowIndex, WindowRows
from shardplan.eval.window_maker import make_rows
from shardplan.model.registry import Model
from shardplan.model.token_scores import TokenScores
from shardplan.plan.plan import Plan
from shardplan.step import score_program

STEPS_AHEAD = 2
"""Steps that are given to the devices before the results of an earlier one are fetched."""
SHARDS_AHEAD = 2
"""Shards whose windows are made before the devices need them."""


@dataclass(frozen=True)
class Lanes:
    """The parts of a batch that different devices compute, and which of them are this process's."""

    count: int
    own: tuple[int, ...]
    """Lanes of which this process has a device, in order."""
    written: tuple[int, ...]
    """Lanes whose results this process writes: it is the first of those that have them."""


def find_lanes(sharding: NamedSharding, shape: tuple[int, ...]) -> Lanes:
    """Return the lanes of an array [batch, position] with a sharding."""
    first: dict[int, int] = {}
    own = set[int]()
    for device, index in sharding.devices_indices_map(shape).items():
        row = index[0].start or 0
        first[row] = min(device.process_index, first.get(row, device.process_index))
        if device.process_index == jax.process_index():
            own.add(row)
    lanes = {row: i for i, row in enumerate(sorted(first))}
    written = sorted(lanes[row] for row in own if first[row] == jax.process_index())
    return Lanes(len(lanes), tuple(sorted(lanes[row] for row in own)), tuple(written))


@dataclass
class LoopStatistics:
    """Counts and durations of a scoring run."""

    steps: int = 0
    windows: int = 0
    """Windows that were scored, without padding."""
    timed_windows: int = 0
    """Those of them whose results came after those of the first step."""
    seconds: float = 0.0
    """Time from the results of the first step to those of the last."""
    compile_seconds: float = 0.0
    programs: int = 0
    """Programs that were compiled."""
    waiting_seconds: float = 0.0
    """Time in which the devices had nothing to compute, because windows were not made yet."""


class ScoreLoop:
    """Scores the windows of shards on the devices of a plan."""

    def __init__(self, module: Any, model: Model, plan: Plan, mesh: Mesh):
        """Compile the program of the plan.

        Args:
            module: the Levanter model with its arrays, sharded by the plan's parameter mapping.
        """
        self._module = module
        program = score_program(model, plan, mesh)
        self._like = program.arguments[1]
        workload = plan.workload
        self._window = workload.window or workload.position
        self._windows_per_row = workload.position // self._window
        self._shape = (workload.batch, workload.position)
        self.lanes = find_lanes(self._like.array.sharding, self._shape)
        self.statistics = LoopStatistics()
        started = time.perf_counter()
        self._step = program.compile(plan.compiler_options)
        self.statistics.compile_seconds, self.statistics.programs = time.perf_counter() - started, 1

    @property
    def lane_windows(self) -> int:
        """Windows of a lane in one step."""
        return self._shape[0] // self.lanes.count * self._windows_per_row

    def run(
        self,
        shards: Shards,
        remaining: Iterable[int],
        index: WindowIndex,
        sizes: list[np.ndarray],
        workers: Executor,
        on_lane: Callable[[int, int, WindowRows, Mapping[str, np.ndarray]], None],
        goes_on: Callable[[int], bool],
        on_windows: Callable[[int], None],
        check_token: Callable[[int], None],
    ) -> bool:
        """Score the windows of the `remaining` shards.

        Args:
            sizes: tokens of the pieces of every text; see `WindowMaker.make`.
            on_lane: takes a shard, a lane, its windows, and column -> scores [window, suffix token]; called for every
                lane that this process writes.
            goes_on: whether to begin a shard; it must be the same in all processes.
            on_windows: takes the number of windows of each step.
            check_token: raises if the model has no embedding for a token; called with the largest of each shard.

        Returns:
            Whether all shards were scored.
        """
        made: deque[tuple[int, dict[int, Future[WindowRows]]]] = deque()
        waiting: deque[tuple[int, int, TokenScores]] = deque()
        rows: dict[int, dict[int, WindowRows]] = {}
        results: dict[int, dict[str, list[np.ndarray]]] = {}
        ahead = iter(remaining)
        started: float | None = None

        def submit() -> None:
            shard = next(ahead, None)
            if shard is not None:
                ranges = {lane: shards.lane_range(shard, lane) for lane in self.lanes.own}
                jobs = {lane: workers.submit(make_rows, index, sizes, *each) for lane, each in ranges.items()}
                made.append((shard, jobs))

        def fetch() -> None:
            nonlocal started
            shard, step, scores = waiting.popleft()
            for name, array in zip(scores._fields, scores, strict=True):
                for lane, values in self._to_host(array.array, index.protocol.prefix).items():
                    results.setdefault(lane, {}).setdefault(name, []).append(values)
            step_windows = self.lane_windows * self.lanes.count
            count = min(step_windows, shards.total - shard * shards.size - step * step_windows)
            self.statistics.windows += count
            if started is None:
                started = time.perf_counter()
            else:
                self.statistics.timed_windows += count
                self.statistics.seconds = time.perf_counter() - started
            on_windows(count)
            if step == shards.steps_of(shard) - 1:
                for lane in self.lanes.written:
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
            rows[shard] = self._collect(jobs, waiting)
            check_token(max(int(each.tokens.max()) for each in rows[shard].values()))
            submit()
            for step in range(shards.steps_of(shard)):
                scores = self._step(self._module, self._place(rows[shard], step))
                for array in scores:
                    array.array.copy_to_host_async()
                waiting.append((shard, step, scores))
                self.statistics.steps += 1
                if len(waiting) > STEPS_AHEAD:
                    fetch()
        while waiting:
            fetch()
        return completed

    def _collect(
        self, jobs: Mapping[int, Future[WindowRows]], waiting: deque[tuple[int, int, TokenScores]]
    ) -> dict[int, WindowRows]:
        """Return the windows of every lane; count the time that the devices wait for them."""
        started = time.perf_counter()
        if waiting and not all(job.done() for job in jobs.values()):
            jax.block_until_ready(waiting[-1][2].log_prob.array)
            started = time.perf_counter()
        rows = {lane: job.result() for lane, job in jobs.items()}
        if self.statistics.steps:
            self.statistics.waiting_seconds += time.perf_counter() - started
        return rows

    def _place(self, rows: Mapping[int, WindowRows], step: int) -> hax.NamedArray:
        """Put the tokens of a step on the devices of this process."""
        batch, position = self._shape
        height = batch // self.lanes.count

        def part(index: tuple[slice, ...]) -> np.ndarray:
            lane = (index[0].start or 0) // height
            windows = rows[lane].tokens[step * self.lane_windows : (step + 1) * self.lane_windows]
            packed = np.zeros((height, position), np.int32)
            packed[:, : self._windows_per_row * self._window] = windows.reshape(height, -1)
            return packed[:, index[1]]

        array = jax.make_array_from_callback(self._shape, self._like.array.sharding, part)
        return hax.named(array, self._like.axes)

    def _to_host(self, array: jax.Array, prefix: int) -> dict[int, np.ndarray]:
        """Return lane -> [window, suffix token] of the scores [batch, position] of a step, for written lanes."""
        batch, position = self._shape
        height = batch // self.lanes.count
        lanes: dict[int, np.ndarray] = {}
        for shard in array.addressable_shards:
            lane = (shard.index[0].start or 0) // height
            if lane in self.lanes.written:
                values = lanes.setdefault(lane, np.empty((height, position), array.dtype))
                values[:, shard.index[1]] = np.asarray(shard.data)
        # the score of a token is that of the position before it
        used = self._windows_per_row * self._window
        return {lane: values[:, :used].reshape(-1, self._window)[:, prefix - 1 : -1] for lane, values in lanes.items()}
