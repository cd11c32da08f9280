"""Walks through a traced program, and lists its tasks and the live buffers at every point."""

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import replace
from typing import NamedTuple

from shardplan.hardware import CollectiveKind
from shardplan.program.attention.kept_contexts import log_sums
from shardplan.program.attention.unread_blocks import without_unread_blocks
from shardplan.program.fusion.fusion import Fusion
from shardplan.program.fusion.held_for_gradients import hold_for_gradients
from shardplan.program.fusion.hoisting import invariant_copies
from shardplan.program.fusion.siblings import fuse_with_siblings
from shardplan.program.layer_flops import MatmulsBefore, PlacedTask
from shardplan.program.live_buffers import BufferRole, LiveBuffer
from shardplan.program.make_task import attention_kind, make_task
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.marked.expert_kind import ExpertKind
from shardplan.program.marked.marked_attention import without_mark
from shardplan.program.marked.marked_blocks import BLOCK_GRADIENT
from shardplan.program.marked.marked_sparse import SPARSE_GRADIENT
from shardplan.program.named_arrays import TracedArray, is_scores
from shardplan.program.operations import Operation, OperationKind, stacked_axes
from shardplan.program.tasks import PointLabel, Step, Task, sums_over_queries
from shardplan.program.trace import ArrayClass, Trace


class PlacedPoint(NamedTuple):
    """The live buffers at a point of the program, and the operation that runs."""

    place: tuple[int, bool]
    """First result of the operation, and whether it already writes its results; unique for each point."""
    label: PointLabel
    buffers: Counter[LiveBuffer]


class Walk(NamedTuple):
    """The tasks and live buffers of a program, in the order of the program."""

    tasks: list[PlacedTask]
    points: list[PlacedPoint]


def walk(trace: Trace) -> Walk:
    """List the tasks of `trace` and the live buffers at every point."""
    trace = replace(trace, operations=without_unread_blocks(trace.operations))
    tasks: list[PlacedTask] = []
    # other results than updates are small, or whoever calls the program computes with them at once
    writes_outputs = bool(trace.updates)
    fusion = fuse_with_siblings(trace.operations, trace.arrays, set(trace.results), writes_outputs=writes_outputs)
    stored = frozenset((*trace.arguments, *trace.updates, *_made_of_state(trace)))
    points = _Sequence(fusion, tasks, 1, stored, {}, None).run(set(), Counter())
    return Walk(tasks, points)


def build_step(trace: Trace) -> Step:
    """Return the tasks and program points of `trace`."""
    walked = walk(trace)
    # of points with equal buffers one is enough for a peak: unrolled layers have many
    points = {frozenset(point.buffers.items()): tuple(point.buffers.items()) for point in walked.points}
    labels: dict[frozenset[tuple[LiveBuffer, int]], PointLabel] = {}
    for _, label, buffers in walked.points:
        labels.setdefault(frozenset(buffers.items()), label)
    return Step(
        tuple(placed.task for placed in walked.tasks),
        tuple(points.values()),
        trace.merged_axes,
        dict(trace.unnamed),
        trace.resized_axes,
        approximations=dict(trace.approximations),
        unpriced=dict(trace.unpriced),
        stacked_axes=frozenset(stacked_axes(trace.operations, trace.arrays)),
        point_labels=tuple(labels.values()),
    )


def _made_of_state(trace: Trace) -> set[int]:
    """Return the values computed from stored state other than parameters, such as an optimizer's moments.

    The compiler updates one parameter after the other, so that no more than one of these is in memory at a time.
    """
    pairs = zip(trace.arguments, trace.argument_classes, strict=True)
    made = {index for index, array_class in pairs if array_class is ArrayClass.STATE}
    for operation in trace.operations:
        if made.intersection(operation.operands):
            made.update(operation.results)
    return made


class _Sequence:
    """Consecutive operations: the program, or a loop's body."""

    def __init__(
        self,
        fusion: Fusion,
        tasks: list[PlacedTask],
        executions: int,
        stored: Set[int],
        first_weights: dict[TracedArray, TracedArray],
        loop: int | None,
    ) -> None:
        self.fusion, self.arrays, self.tasks, self.executions = fusion, fusion.arrays, tasks, executions
        self.loop = loop
        """Identifier of the loop whose body this is (index of its first result); None for the program."""
        self.stored = stored
        """Values without own buffers: arguments, results written over them, and values made from stored state."""
        self.first_weights = first_weights
        """Parameter without its path -> the first parameter of this shape and type, which stands for all of them in
        program points: the layers of an unrolled model have equal ones."""
        loops = [operation.kind == OperationKind.LOOP for operation in fusion.operations]
        self.loops_before = [0, *itertools.accumulate(loops)]
        """Operation -> number of loops before it."""
        self.last_loop = max((i for i, is_loop in enumerate(loops) if is_loop and executions == 1), default=-1)
        """Index of the last loop of the program; -1 if there is none, or in a loop's body."""
        self.held = hold_for_gradients(fusion)
        self._live_buffers: dict[int, LiveBuffer] = {}
        self._log_sums = dict[int, LiveBuffer]()
        """Stack of outputs of attention -> the log-sum-exp that is kept with it."""
        for operation in fusion.operations:
            if operation.kind == OperationKind.LOOP:
                self._log_sums |= log_sums(operation, self.arrays)
        self.used_weights: set[str] = set()
        """Parameters that a matmul has used so far."""
        self.hoisted = frozenset[int]()
        """Values of a loop's body that are computed before the loop, and are in memory throughout."""
        self.outer_executions = executions
        """Number of executions of the operations that are computed before the loop."""
        self.matmuls_before = MatmulsBefore(loop)

    def run(self, carried: Set[int], outside: Counter[LiveBuffer]) -> list[PlacedPoint]:
        """Add the tasks of the sequence, and return the live buffers at each of its program points.

        Args:
            carried: values that are in memory from the start until their last use.
            outside: buffers of enclosing sequences, in memory throughout.
        """
        fusion = self.fusion
        last_uses, copied = self._last_uses(), self._copied_by_next_loop()
        gathered, reordered = self._gathered(), self._reordered()
        local_gradients: Counter[LiveBuffer] = Counter()
        ends: defaultdict[int, list[int]] = defaultdict(list)
        for value, i in last_uses.items():
            ends[i].append(value)
        live, entering = set[int](), set(carried)
        buffers: Counter[LiveBuffer] = Counter()
        used_up: set[int] = set()
        points: list[PlacedPoint] = []
        for i, operation in enumerate(fusion.operations):
            if not fusion.is_executed(operation):
                self.matmuls_before.add(len(self.tasks), (), operation)
                continue
            is_loop = operation.kind == OperationKind.LOOP
            done = () if is_loop else (*fusion.fused_matmuls(operation), operation)
            tasks = list(map(self._make_task, done))
            label = PointLabel(tasks[-1].label if tasks else without_mark(operation.label), self.executions)
            stacks = {result for result in operation.results if is_loop and not is_scores(self.arrays[result])}
            buffers.update(self._buffers_of(entering - live))
            live |= entering
            here = outside + gathered[i] + (local_gradients if i <= self.last_loop else Counter())
            here.update(self._held_for_gradients(i, used_up))
            if reordered[i]:  # before the operation writes its results
                points.append(PlacedPoint((operation.results[0], False), label, here + buffers + reordered[i]))
            new = (stacks | {result for result in operation.results if result in fusion.written}) - live - self.hoisted
            new -= self.stored
            live |= new
            buffers.update(self._buffers_of(new))
            if is_loop:
                points += self._add_loop(operation, live, here)
            gone = {
                value for value in (*ends[i], *entering, *new)
                if value in live and last_uses.get(value, -1) <= i and value not in fusion.held_for_outputs
            }  # fmt: skip
            if not is_loop:
                here.update(itertools.chain(self._transient(operation), copied[i]))
                if i < self.last_loop:
                    local_gradients.update(self._local_gradients(operation))
                while_writing = here + self._while_writing(operation, buffers, gone - new, new)
                points.append(PlacedPoint((operation.results[0], True), label, while_writing))
                self.matmuls_before.add(len(self.tasks), list(zip(done, tasks, strict=True)), operation)
                self.tasks += (PlacedTask(task, self.loop) for task in tasks)
            live -= gone
            buffers.subtract(self._buffers_of(gone))
            buffers = +buffers
            used_up = used_up | gone if i < self.held.end else set()
            entering = set()
        return points

    def _while_writing(
        self, operation: Operation, buffers: Counter[LiveBuffer], last_used: Set[int], written: Set[int]
    ) -> Counter[LiveBuffer]:
        """Return the live buffers while `operation` runs; elementwise results overwrite inputs of the same shape.

        Args:
            last_used: inputs that no later operation reads.
            written: results; they are among `buffers`.
        """
        if operation.kind != OperationKind.ELEMENTWISE:
            return buffers
        results = Counter(map(self._live_buffer, written))
        summands = {value for value in last_used if self.fusion.is_grouped_summand(value)}
        in_place = results & Counter(map(self._live_buffer, last_used - summands))
        sums = (results - in_place) & Counter(map(self._live_buffer, summands))
        summed = Counter({replace(buffer, role=BufferRole.SUMMED_ROWS): count for buffer, count in sums.items()})
        return buffers - in_place - sums + summed

    def _held_for_gradients(self, i: int, used_up: Set[int]) -> Iterator[LiveBuffer]:
        """Yield the buffers that stay in memory for the gradients of experts while operation `i` runs.

        Args:
            used_up: values that no later operation reads.
        """
        for value in used_up & self.held.unfreed_rows:
            yield self._buffer_of(BufferRole.UNFREED_ROWS, value)
        for value in used_up & self.held.routed_tokens:
            yield self._buffer_of(BufferRole.ROUTED_TOKENS, value)
        if self.held.start <= i <= self.held.end:
            yield from (self._make_buffer(BufferRole.FACTOR_OF_GRADIENT, array) for array in self.held.factors)
            yield from (self._buffer_of(BufferRole.GATHERED_ROWS, value) for value in self.held.gathered_rows)

    def _local_gradients(self, operation: Operation) -> Iterator[LiveBuffer]:
        """Yield each device's own gradients that `operation` sums over devices; the compiler delays the sum."""
        if operation.is_local and operation.collective == CollectiveKind.ALL_REDUCE:
            yield from (
                self._make_buffer(BufferRole.LOCAL_GRADIENT, array) for array in self._arrays(operation.operands)
            )

    def _last_uses(self) -> dict[int, int]:
        """Return value -> the last operation that reads it."""
        return {
            source: i
            for i, operation in enumerate(self.fusion.operations)
            if self.fusion.is_executed(operation)
            for source in self.fusion.reads(operation)
        }

    def _weight_uses(self) -> dict[TracedArray, tuple[int, int]]:
        """Return parameter -> the first and the last operation that multiplies by it."""
        uses: dict[TracedArray, tuple[int, int]] = {}
        for i, operation in enumerate(self.fusion.operations):
            if not self.fusion.is_executed(operation):
                continue
            for each in (operation, *self.fusion.fused_matmuls(operation)):
                is_plain_matmul = each.kind == OperationKind.CONTRACTION and each.groups == 1
                uses_weights = is_plain_matmul or each.experts is not None or each.sparse is not None
                for operand in each.operands if uses_weights else ():
                    array = self.arrays[operand]
                    if array.weight is not None:
                        uses[array] = (uses.get(array, (i, i))[0], i)
        return uses

    def _gathered(self) -> list[Counter[LiveBuffer]]:
        """Return the gathered and prefetched weights during each operation.

        A gather may run early, from the start of its loop body or of the program. After a loop, it either waits for the
        end of the loop, or runs at the start of the program.
        """
        changes: defaultdict[int, Counter[LiveBuffer]] = defaultdict(Counter)
        for weight, (first, last) in self._weight_uses().items():
            spans = [(BufferRole.GATHERED_WEIGHT, first, last + 1)]
            if self.loops_before[first] == 0:
                spans.append((BufferRole.PREFETCHED_WEIGHT, 0, first))
            elif self.executions == 1:
                spans.append((BufferRole.WEIGHT_GATHERED_FIRST, 0, first))
            for role, begin, end in spans:
                buffer = self._make_buffer(role, weight)
                changes[begin][buffer] += 1
                changes[end][buffer] -= 1
        current: Counter[LiveBuffer] = Counter()
        gathered = []
        for i in range(len(self.fusion.operations)):
            current.update(changes[i])
            gathered.append(+current)
        return gathered

    def _reordered(self) -> defaultdict[int, Counter[LiveBuffer]]:
        """Return, for each operation, the weights that are gathered and reordered right before it."""
        reordered: defaultdict[int, Counter[LiveBuffer]] = defaultdict(Counter)
        for weight, (first, _) in self._weight_uses().items():
            reordered[first][self._make_buffer(BufferRole.REORDERED_WEIGHT, weight)] += 1
        return reordered

    def _add_loop(self, loop: Operation, live: Set[int], outside: Counter[LiveBuffer]) -> list[PlacedPoint]:
        """Add the tasks of a loop, and return the points of its body."""
        written = {value for stack, value in loop.slices if stack in loop.results}
        ends = written | {end for _, _, end, _ in loop.carried}
        starts = {start for _, start, _, _ in loop.carried if self.arrays[start].dims}
        # the carry has one buffer: before the loop, in it and after it
        elsewhere = {self.fusion.base_of(value) for before, _, _, after in loop.carried for value in (before, after)}
        fusion = fuse_with_siblings(loop.body, self.arrays, ends, writes_outputs=True)
        # what is copied to the host is written into its stack there
        on_host = frozenset(value for value in written if self.arrays[value].is_on_host)
        executions = self.executions * loop.trips
        body = _Sequence(fusion, self.tasks, executions, on_host, self.first_weights, loop.results[0])
        body.hoisted = frozenset(invariant_copies(loop, self.arrays) & fusion.written)
        body.outer_executions = self.executions
        # gathered once, what the gradients gather again
        hoisted = dict.fromkeys(map(body._live_buffer, sorted(body.hoisted)))
        throughout = Counter([*self._buffers_of(sorted(live - elsewhere)), *self._copied(loop), *hoisted])
        first = len(self.tasks)
        points = body.run(starts, outside + throughout)
        body.matmuls_before.finish(self.tasks, first, executions)
        return points

    def _copied_by_next_loop(self) -> list[list[LiveBuffer]]:
        """Return, for each operation, the copies of stacked parameters that the next loop after it reads."""
        copied: list[list[LiveBuffer]] = []
        following: list[LiveBuffer] = []
        for operation in reversed(self.fusion.operations):
            following = self._copied(operation) if operation.kind == OperationKind.LOOP else following
            copied.append(following)
        return copied[::-1]

    def _copied(self, loop: Operation) -> list[LiveBuffer]:
        """Return the stacks of stored parameters that the loop slices and contracts along one dimension."""
        contracted = set()
        for operation in loop.body:
            is_plain = operation.kind == OperationKind.CONTRACTION and len(operation.contracted) == 1
            if is_plain or operation.experts is not None:
                contracted |= {self.arrays[operand].weight for operand in operation.operands}
        stacks = [self.arrays[stack] for stack, _ in loop.slices if self.fusion.base_of(stack) in self.stored]
        copied = contracted - {None}
        return [self._make_buffer(BufferRole.COPIED_STACK, array) for array in stacks if array.weight in copied]

    def _buffers_of(self, values: Iterable[int]) -> Iterator[LiveBuffer]:
        """Yield the buffers of values between their operations and their last uses."""
        for value in values:
            yield self._live_buffer(value)
            if value in self._log_sums:
                yield self._log_sums[value]

    def _live_buffer(self, value: int) -> LiveBuffer:
        """Return the buffer of a value between its operation and its last use."""
        if value not in self._live_buffers:
            self._live_buffers[value] = self._buffer_of(BufferRole.LIVE, value)
        return self._live_buffers[value]

    def _buffer_of(self, role: BufferRole, value: int) -> LiveBuffer:
        return self._make_buffer(role, self.arrays[value], is_grouped=self.fusion.is_read_by_grouped_matmuls(value))

    def _make_buffer(
        self,
        role: BufferRole,
        array: TracedArray,
        related: tuple[TracedArray, ...] = (),
        *,
        is_grouped: bool = False,
        attention: AttentionKind | None = None,
        experts: ExpertKind | None = None,
    ) -> LiveBuffer:
        """Make a buffer; all parameters of the same shape and type share the first one's."""
        array, *related_arrays = (
            each if each.weight is None else self.first_weights.setdefault(replace(each, weight=None), each)
            for each in (array, *related)
        )
        return LiveBuffer(role, array, tuple(related_arrays), is_grouped, attention, experts)

    def _transient(self, operation: Operation) -> Iterator[LiveBuffer]:
        """Yield the buffers that are live only while `operation` runs."""
        make = self._make_buffer
        operands, results = self._arrays(operation.operands), self._arrays(operation.results)
        if operation.kind == OperationKind.LOOKUP:
            yield make(BufferRole.LOOKUP_RESULT, results[0], operands[:1])
        if operation.experts is not None:
            is_gradient = len(results) > 1
            role = BufferRole.EXPERT_GRADIENT_ROWS if is_gradient else BufferRole.EXPERT_ROWS
            up = operands[2 + is_gradient + operation.experts.matrices - 1]
            yield make(role, operands[0], (up,), experts=operation.experts)
        if operation.sparse is not None:
            is_gradient = operation.primitive == SPARSE_GRADIENT
            role = BufferRole.SPARSE_GRADIENT if is_gradient else BufferRole.SPARSE_ATTENTION
            yield make(role, operands[is_gradient], attention=operation.sparse)
        if operation.blocks is not None:
            is_gradient = operation.primitive == BLOCK_GRADIENT
            role = BufferRole.BLOCK_GRADIENT if is_gradient else BufferRole.BLOCK_ATTENTION
            yield replace(make(role, operands[is_gradient]), blocks=operation.blocks)
        if operation.kind == OperationKind.CONVERSION:
            # the codes of one layer, out of the stack of all, and gathered
            yield make(BufferRole.LIVE, replace(operands[0], weight=None, is_local=True))
        if operation.kind != OperationKind.CONTRACTION:
            return
        if operation.groups > 1:
            yield from (self._buffer_of(BufferRole.FLOAT32_RESULT, value) for value in operation.results)
            return
        yield from (make(BufferRole.UNSCATTERED_RESULT, array) for array in results)
        is_attention = any(map(is_scores, (*operands, *results)))
        if is_attention and not sums_over_queries(operation.contracted, results[0]):
            kind = attention_kind(operation)
            keys = [array for array in operands if not is_scores(array)][-1]
            yield make(BufferRole.KEYS_OR_VALUES, keys, () if is_scores(results[0]) else results, attention=kind)

    def _make_task(self, operation: Operation) -> Task:
        """Return the task of an operation, and record the weights that it uses."""
        is_hoisted = not self.hoisted.isdisjoint(operation.results)
        executions = self.outer_executions if is_hoisted else self.executions
        return make_task(operation, self.fusion, executions, self.used_weights)

    def _arrays(self, values: Sequence[int]) -> tuple[TracedArray, ...]:
        return tuple(self.arrays[value] for value in values)
