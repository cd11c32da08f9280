"""The loop over the steps of a run, as an iterator over finished steps.

The devices never wait for their results to be used: `STEPS_AHEAD` further steps are given to them before the results of
a step are fetched and yielded. Whoever iterates does everything else between two steps: files, progress, records.
"""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import haliax as hax
import jax
import numpy as np
from haliax import NamedArray
from jax.sharding import NamedSharding, PartitionSpec

from shardplan.eval.loop.inputs import InputsAhead
from shardplan.eval.loop.lanes import Lanes
from shardplan.eval.windows import Rows
from shardplan.execution.aot_program import Program
from shardplan.execution.recorded_program import RecordedResults
from shardplan.experts.statistics.layer_record import LayerRecord
from shardplan.monitoring.step_statistics import Count, LoopStatistics, StepTimer

STEPS_AHEAD = 2
"""Number of steps that are given to the devices before the results of an earlier step are fetched."""


class Scored(NamedTuple):
    """The sequences of a lane in a shard, and their scores."""

    rows: Rows
    scores: Mapping[str, np.ndarray]
    """Output of the program -> its scores, [sequence, position]."""


@dataclass(frozen=True)
class FinishedStep:
    """A step whose results were fetched."""

    shard: int
    count: Count
    """Number of windows and tokens that the step has scored, over all devices of the run."""
    lanes: Mapping[int, Scored]
    """After a shard's last step: lane -> the lane's results in the whole shard, for the lanes that this process writes.

    Empty after every other step.
    """
    ends_shard: bool
    """Whether the step is the last one of its shard."""
    records: Sequence[tuple[LayerRecord, ...]]
    """How tokens were routed to experts, as in `RoutingRecording.segments`; empty if the program does not record it."""


@dataclass(frozen=True)
class _OpenShard:
    """A shard whose steps have not all finished."""

    number: int
    steps: int
    rows: Mapping[int, Rows]
    """Lane -> the lane's sequences."""
    scores: dict[int, dict[str, list[np.ndarray]]] = field(default_factory=dict)
    """Lane -> output of the program -> [sequence, position] of every finished step."""

    def join(self) -> dict[int, Scored]:
        """Return lane -> the lane's sequences, and their scores in all steps."""
        joined = {}
        for lane, outputs in self.scores.items():
            whole = {name: np.concatenate(parts) for name, parts in outputs.items()}
            joined[lane] = Scored(self.rows[lane], whole)
        return joined


class _PendingStep(NamedTuple):
    """A step that the devices compute, or whose results have not been fetched."""

    shard: _OpenShard
    number: int
    """Index of the step within the shard."""
    scores: tuple[NamedArray, ...]
    records: Sequence[tuple[LayerRecord, ...]]


class Loop:
    """Runs a program over the sequences of shards."""

    def __init__(
        self,
        module: Any,
        program: Program,
        options: Mapping[str, str],
        outputs: Sequence[str],
        lanes: Lanes,
        find_tokens: Callable[[Rows], np.ndarray] | None = None,
    ):
        """Compile the program.

        Args:
            module: the Levanter model with its arrays, the program's first argument. All other arguments and all
                results are arrays [batch, position] with the same sharding.
            options: compiler options, as in `Plan.compiler_options`.
            outputs: names of the results.
            lanes: the lanes of the program.
            find_tokens: returns the program's last argument, bool[sequence, position], True for elements that are not
                padding; None if the program has no such argument.
        """
        self._find_tokens = find_tokens
        self._module, self._outputs, self._inputs = module, outputs, program.arguments[1:]
        self._shape, self._lanes = self._inputs[0].array.shape, lanes
        self.statistics = LoopStatistics()
        self._timer = StepTimer(self.statistics)
        started = time.perf_counter()
        self._step = _with_whole_rows(program).compile(options)
        self.statistics.compile_seconds, self.statistics.programs = time.perf_counter() - started, 1

    def run(self, inputs: InputsAhead, shards: Iterable[int], count: Callable[[int], Count]) -> Iterator[FinishedStep]:
        """Run the program over the sequences of `shards`, and yield every step once its results are fetched.

        Args:
            inputs: the sequences of `shards`.
            shards: the shards to run, the same in all processes. Each is requested only when all steps of the shard
                before have been started, so that a generator can end the run.
            count: function like `Windows.count`.
        """
        self._timer.start()
        pending: deque[_PendingStep] = deque()
        for number in shards:
            rows = self._wait_for_rows(inputs.take(number), pending)
            inputs.check(rows)
            if self._find_tokens is not None:
                rows = {lane: each.with_input(self._find_tokens(each)) for lane, each in rows.items()}
            inputs.start_next()
            shard = _OpenShard(number, inputs.shards.steps_of(number), rows)
            for step in range(shard.steps):
                pending.append(self._start_step(shard, step))
                if len(pending) > STEPS_AHEAD:
                    yield self._finish_step(pending.popleft(), inputs, count)
        while pending:
            yield self._finish_step(pending.popleft(), inputs, count)

    def _wait_for_rows(self, futures: Mapping[int, Future[Rows]], pending: Sequence[_PendingStep]) -> dict[int, Rows]:
        """Return the sequences of every lane; count the time that the devices wait for them."""
        started = time.perf_counter()
        if pending and not all(future.done() for future in futures.values()):
            # the devices wait only from the end of their last step on
            jax.block_until_ready(pending[-1].scores[0].array)
            waited, started = started, time.perf_counter()
            self.statistics.blocked_seconds += started - waited
        rows = {lane: future.result() for lane, future in futures.items()}
        if self.statistics.steps:
            self.statistics.waiting_seconds += time.perf_counter() - started
        return rows

    def _start_step(self, shard: _OpenShard, step: int) -> _PendingStep:
        """Give a step to the devices, and start copying its results to the host."""
        scores, records = self._step(self._module, *self._place(shard.rows, step))
        for array in jax.tree.leaves((scores, records)):
            array.copy_to_host_async()
        self.statistics.steps += 1
        return _PendingStep(shard, step, scores, records)

    def _finish_step(self, step: _PendingStep, inputs: InputsAhead, count: Callable[[int], Count]) -> FinishedStep:
        """Wait for the results of a step, and add them to the results of its shard."""
        shard = step.shard
        started = time.perf_counter()
        jax.block_until_ready([array.array for array in step.scores])
        self.statistics.blocked_seconds += time.perf_counter() - started
        for name, array in zip(self._outputs, step.scores, strict=True):
            for lane, values in self._to_host(array.array).items():
                shard.scores.setdefault(lane, {}).setdefault(name, []).append(values)
        scored = _count(count, inputs.shards.step_ranges(shard.number, step.number))
        self._timer.add(scored, time.perf_counter())
        is_last = step.number == shard.steps - 1
        records = jax.tree.map(lambda array: np.asarray(array.addressable_data(0)), step.records)
        return FinishedStep(shard.number, scored, shard.join() if is_last else {}, is_last, records)

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
        """Return lane -> results [sequence, position] of a step, for written lanes, from results [batch, position]."""
        shards = {(each.index[0].start or 0) // self._lanes.sequences: each for each in array.addressable_shards}
        return {lane: np.asarray(shards[lane].data) for lane in self._lanes.written}


def _with_whole_rows(program: Program) -> Program:
    """Return the program with results sharded only by rows, like the tokens, and with replicated records.

    So each process has all records, and the process that writes a lane has all positions of the lane's rows.
    """
    tokens = program.arguments[1]
    # not by Haliax, which in some versions leaves the sharding of axes without a mapping to the compiler
    by_row = NamedSharding(program.mesh, PartitionSpec(tokens.array.sharding.spec[0], None))
    replicated = NamedSharding(program.mesh, PartitionSpec())

    def function(*arguments: Any) -> RecordedResults:
        returned = program.function(*arguments)
        results, records = returned if isinstance(returned, RecordedResults) else RecordedResults(returned, [])
        several = [each.rearrange(tokens.axes) for each in (results if isinstance(results, tuple) else (results,))]
        constrain = jax.lax.with_sharding_constraint
        by_lane = tuple(hax.named(constrain(each.array, by_row), each.axes) for each in several)
        return RecordedResults(by_lane, jax.tree.map(lambda array: constrain(array, replicated), records))

    return replace(program, function=function)


def _count(count: Callable[[int], Count], ranges: Iterable[tuple[int, int]]) -> Count:
    """Count the windows and tokens in ranges of sequences."""
    windows = tokens = 0
    for first, last in ranges:
        before, after = count(first), count(last)
        windows += after.windows - before.windows
        tokens += after.tokens - before.tokens
    return Count(windows, tokens)
