"""The walk through a traced program that lists its tasks and the live buffers at every point."""

from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple

from shardplan.program.fusion import Fusion
from shardplan.program.live_buffers import BufferRole, LiveBuffer, ProgramPoint
from shardplan.program.named_arrays import TracedArray, is_scores
from shardplan.program.operations import Operation, OperationKind
from shardplan.program.tasks import Step, Task, TaskKind, sums_over_queries
from shardplan.program.trace import Trace

BACKWARD_SCOPE, REMATERIALIZED_SCOPE = "transpose(", "rematted_computation"
"""JAX's named scopes of the backward pass, and of what `jax.checkpoint` computes again in it."""
TASK_KINDS = {
    OperationKind.CONTRACTION: TaskKind.CONTRACTION,
    OperationKind.LOOKUP: TaskKind.LOOKUP,
    OperationKind.SCATTER_ADD: TaskKind.SCATTER_ADD,
    OperationKind.ELEMENTWISE: TaskKind.ELEMENTWISE,
    OperationKind.RESHARD: TaskKind.RESHARD,
    OperationKind.PSUM: TaskKind.PSUM,
}
"""Kind of operation -> kind of task outside of attention. A loop is no task; the operations of its body are."""


def build_step(trace: Trace) -> Step:
    """The tasks and program points of `trace`."""
    tasks: list[Task] = []
    # the consumers of the results, such as the optimizer's update, are fused with what computes them
    fusion = Fusion(trace.operations, trace.arrays, set(trace.results), writes_outputs=False)
    points = _Sequence(fusion, tasks, 1, frozenset(trace.arguments)).run(set(), ())
    return Step(
        tuple(tasks),
        tuple(dict.fromkeys(points)),
        trace.merged_axes,
        dict(trace.unnamed),
        trace.resized_axes,
        dict(trace.approximations),
        unpriced=dict(trace.unpriced),
    )


class _HeldForGradients(NamedTuple):
    """Values that stay in memory after their last use, until the gradients of experts are computed."""

    values: Mapping[BufferRole, Set[int]]
    """Role after the last use -> values."""
    end: int
    """Index of the operation until which they stay."""


class _Sequence:
    """Operations that run one after the other: the program, or the body of a loop."""

    def __init__(self, fusion: Fusion, tasks: list[Task], executions: int, stored: Set[int]) -> None:
        self.fusion, self.arrays, self.tasks, self.executions = fusion, fusion.arrays, tasks, executions
        self.stored = stored
        """Values that are parameters in their stored sharding."""
        self.used_weights: set[str] = set()
        """Parameters that a matmul has used so far."""

    def run(self, carried: Set[int], outside: ProgramPoint) -> list[ProgramPoint]:
        """Add the tasks of the sequence; returns its program points.

        Args:
            carried: values that are in memory from the start until their last use.
            outside: buffers of enclosing sequences, in memory throughout.
        """
        fusion = self.fusion
        last_uses, weight_uses = self._last_uses(), self._weight_uses()
        held = self._held_for_gradients()
        live = set(carried)
        used_up: set[int] = set()
        points: list[ProgramPoint] = []
        for i, operation in enumerate(fusion.operations):
            if not fusion.is_executed(operation):
                continue
            is_loop = operation.kind == OperationKind.LOOP
            stacks = {result for result in operation.results if is_loop and not is_scores(self.arrays[result])}
            live |= stacks | {result for result in operation.results if result in fusion.written}
            late = [each for role, values in held.values.items() for each in self._buffers(role, used_up & values)]
            here = (*outside, *late, *self._gathered(i, weight_uses))
            if is_loop:
                points += self._add_loop(operation, live, here)
            else:
                points.append((*here, *self._live(live), *self._transient(operation), *self._copied_after(i)))
                self.tasks += map(self._make_task, (*fusion.fused_matmuls(operation), operation))
            needed = {value for value in live if last_uses.get(value, -1) > i or value in fusion.held_for_outputs}
            used_up = used_up | live - needed if i < held.end else set()
            live = needed
        return points

    def _last_uses(self) -> dict[int, int]:
        """Value -> the last operation that reads it."""
        return {
            source: i
            for i, operation in enumerate(self.fusion.operations)
            if self.fusion.is_executed(operation)
            for source in self.fusion.reads(operation)
        }

    def _held_for_gradients(self) -> _HeldForGradients:
        """The rows of experts that stay in memory until the gradients of experts are computed.

        Some compilers compute these gradients last, and free none of the rows before; a sum over devices reuses the
        memory of its operand. Other compilers look the rows up again, except where grouped matmuls take slices of them.
        """
        operations = self.fusion.operations
        grouped = [operation for operation in operations if operation.groups > 1]
        sizes = {self.arrays[operation.operands[0]].elements for operation in grouped}
        if all(self.arrays[operation.results[0]].elements in sizes for operation in grouped):
            return _HeldForGradients({}, -1)
        results = {result for operation in grouped for result in operation.results}
        end = max(
            i for i, operation in enumerate(operations) if results & set(map(self.fusion.base_of, operation.operands))
        )
        lookups = [operation for operation in operations if operation.kind == OperationKind.LOOKUP]
        summed = {self.fusion.base_of(o.operands[0]) for o in operations if o.kind == OperationKind.PSUM}
        rows = {value for value in self.fusion.written if self.arrays[value].elements in sizes}
        operands = {self.fusion.base_of(operand) for operation in grouped for operand in operation.operands}
        tokens = {self.fusion.base_of(lookup.operands[0]) for lookup in lookups if lookup.results[0] in rows}
        unfreed = rows - summed
        return _HeldForGradients(
            {
                BufferRole.UNFREED_ROWS: unfreed,
                BufferRole.SLICED_ROWS: unfreed & operands,
                BufferRole.ROUTED_TOKENS: tokens - rows,
            },
            end,
        )

    def _weight_uses(self) -> dict[TracedArray, tuple[int, int]]:
        """Parameter -> the first and the last operation that multiplies with it."""
        uses: dict[TracedArray, tuple[int, int]] = {}
        for i, operation in enumerate(self.fusion.operations):
            if not self.fusion.is_executed(operation):
                continue
            for each in (operation, *self.fusion.fused_matmuls(operation)):
                is_plain_matmul = each.kind == OperationKind.CONTRACTION and each.groups == 1
                for operand in each.operands if is_plain_matmul else ():
                    array = self.arrays[operand]
                    if array.weight is not None:
                        uses[array] = (uses.get(array, (i, i))[0], i)
        return uses

    def _gathered(self, i: int, weight_uses: dict[TracedArray, tuple[int, int]]) -> ProgramPoint:
        """Gathered and prefetched weights while operation `i` runs."""
        used = [weight for weight, (first, last) in weight_uses.items() if first <= i <= last]
        prefetched = [weight for weight, (first, _) in weight_uses.items() if self._may_prefetch(i, first)]
        return (
            *(LiveBuffer(BufferRole.GATHERED_WEIGHT, weight) for weight in used),
            *(LiveBuffer(BufferRole.PREFETCHED_WEIGHT, weight) for weight in prefetched),
        )

    def _may_prefetch(self, i: int, first: int) -> bool:
        """Whether a transfer for operation `first` may run during operation `i`: at most one loop lies between."""
        between = [each for each in self.fusion.operations[i:first] if each.kind == OperationKind.LOOP]
        return i < first and len(between) <= 1

    def _add_loop(self, loop: Operation, live: Set[int], outside: ProgramPoint) -> list[ProgramPoint]:
        """Add the tasks of a loop; returns the points of its body."""
        written = {value for stack, value in loop.slices if stack in loop.results}
        ends = written | {end for _, _, end, _ in loop.carried}
        starts = {start for _, start, _, _ in loop.carried if self.arrays[start].dims}
        # the carry has one buffer: before the loop, in it and after it
        elsewhere = {self.fusion.base_of(value) for before, _, _, after in loop.carried for value in (before, after)}
        fusion = Fusion(loop.body, self.arrays, ends, writes_outputs=True)
        body = _Sequence(fusion, self.tasks, self.executions * loop.trips, frozenset())
        return body.run(starts, (*outside, *self._live(live - elsewhere), *self._copied(loop)))

    def _copied_after(self, i: int) -> ProgramPoint:
        """Copies of stacked parameters that the next loop after operation `i` reads."""
        loops = (each for each in self.fusion.operations[i:] if each.kind == OperationKind.LOOP)
        return next(map(self._copied, loops), ())

    def _copied(self, loop: Operation) -> ProgramPoint:
        """Stacks of stored parameters that the loop takes slices of, and contracts along one dimension."""
        contracted = {
            self.arrays[operand].weight
            for operation in loop.body if operation.kind == OperationKind.CONTRACTION and len(operation.contracted) == 1
            for operand in operation.operands
        }  # fmt: skip
        stacks = [self.arrays[stack] for stack, _ in loop.slices if self.fusion.base_of(stack) in self.stored]
        copied = contracted - {None}
        return tuple(LiveBuffer(BufferRole.COPIED_STACK, array) for array in stacks if array.weight in copied)

    def _live(self, values: Set[int]) -> ProgramPoint:
        summands = {value for value in values if self.fusion.is_grouped_summand(value)}
        others = self._buffers(BufferRole.LIVE, values - summands)
        return (*others, *self._buffers(BufferRole.FLOAT32_SUMMAND, summands))

    def _buffers(self, role: BufferRole, values: Set[int]) -> ProgramPoint:
        return tuple(
            LiveBuffer(
                role, self.arrays[value], is_between_grouped_matmuls=self.fusion.is_between_grouped_matmuls(value)
            )
            for value in sorted(values)
        )

    def _transient(self, operation: Operation) -> ProgramPoint:
        """The buffers that are live only while `operation` runs."""
        fusion = self.fusion
        operands, results = self._arrays(operation.operands), self._arrays(operation.results)
        if operation.kind == OperationKind.LOOKUP:
            return (LiveBuffer(BufferRole.LOOKUP_RESULT, results[0], (operands[0],)),)
        if operation.kind != OperationKind.CONTRACTION:
            return ()
        if operation.groups > 1:
            values = {value for value in operation.results if not fusion.is_grouped_summand(value)}
            return self._buffers(BufferRole.FLOAT32_RESULT, values)
        unscattered = tuple(LiveBuffer(BufferRole.UNSCATTERED_RESULT, array) for array in results)
        scores = next((array for array in (*operands, *results) if is_scores(array)), None)
        if scores is None:
            return unscattered
        if sums_over_queries(operation.contracted, results[0]):
            of_keys = LiveBuffer(BufferRole.KEYS_OR_VALUES_GRADIENT, results[0])
        else:
            keys = [array for array in operands if not is_scores(array)][-1]
            of_keys = LiveBuffer(BufferRole.KEYS_OR_VALUES, keys, () if is_scores(results[0]) else results)
        return (*unscattered, LiveBuffer(BufferRole.SCORES, scores), of_keys)

    def _make_task(self, operation: Operation) -> Task:
        """Return the task of an operation with all that is fused into it, and note the weights that it uses.

        An elementwise operation reads the inputs of its whole fusion, except those of fused matmuls.
        """
        fusion = self.fusion
        if operation.kind == OperationKind.ELEMENTWISE:
            matmuls = fusion.fused_matmuls(operation)
            of_matmuls = {fusion.base_of(operand) for matmul in matmuls for operand in matmul.operands}
            reads = sorted(value for value in fusion.reads(operation) - of_matmuls if self.arrays[value].axes)
            writes = [result for result in operation.results if result in fusion.written]
            operands, results = self._arrays(reads), self._arrays(writes)
        else:
            operands, results = self._arrays(operation.operands), self._arrays(operation.results)
        is_matmul = operation.kind == OperationKind.CONTRACTION
        is_attention = is_matmul and any(map(is_scores, (*operands, *results)))
        weights = [array.weight for array in operands if array.weight is not None]
        first_used = tuple(weight for weight in weights if weight not in self.used_weights)
        self.used_weights |= set(weights) if is_matmul else set()
        return Task(
            kind=TaskKind.ATTENTION if is_attention else TASK_KINDS[operation.kind],
            operands=operands,
            results=results,
            contracted=operation.contracted,
            batched=operation.batched,
            groups=operation.groups,
            executions=self.executions,
            first_used_weights=first_used,
            reduces_partial_sums=not is_matmul or fusion.reduces_partial_sums(operation.results[0]),
            feeds_only_grouped_matmuls=(
                operation.groups > 1 and fusion.is_between_grouped_matmuls(operation.results[0])
            ),
            mesh_axes=operation.mesh_axes,
            is_backward=BACKWARD_SCOPE in operation.label and REMATERIALIZED_SCOPE not in operation.label,
            label=weights[0] if weights else operation.label,
        )

    def _arrays(self, values: Sequence[int]) -> tuple[TracedArray, ...]:
        return tuple(self.arrays[value] for value in values)
