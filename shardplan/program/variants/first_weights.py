"""The parameters that the layers of a loop use first, whose gathers may have nothing to hide behind.

A gather of a layer's parameters hides behind matmuls before its own. Before the first matmuls of a layer there are
none, unless the compiler starts the gathers of the next layer in this one.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from shardplan.program.named_arrays import TracedArray
from shardplan.program.operations import Operation, OperationKind, all_operations
from shardplan.program.tasks import Task, TaskKind

FIRST_WEIGHTS = 3
"""Number of parameters: those of queries, keys and values, for most models. Where the compiler for v5e starts no gather
ahead, it waits for three in the forward pass, and for three or four in the backward pass (docs/log.md, Activations)."""


def mark_first_weights(
    tasks: Iterable[Task], operations: Iterable[Operation], arrays: Sequence[TracedArray]
) -> Iterator[Task]:
    """Mark the matmuls whose parameter is among the first of a loop's body; yield all tasks."""
    first = {*_first_weights(operations, arrays)}
    for task in tasks:
        is_first = task.kind == TaskKind.CONTRACTION and not first.isdisjoint(task.first_used_weights)
        yield replace(task, has_first_weight=True) if is_first else task


def _first_weights(operations: Iterable[Operation], arrays: Sequence[TracedArray]) -> Iterator[str]:
    """Yield the paths of the first parameters that the matmuls of each loop over layers use, in the order of a pass."""
    for loop in all_operations(operations):
        stacked = {arrays[layer].weight for _, layer in loop.slices} - {None}
        used: dict[str, None] = {}
        for operation in loop.body:
            if operation.kind != OperationKind.CONTRACTION or operation.is_backward:
                continue
            weights = (arrays[value].weight for value in operation.operands)
            used.update(dict.fromkeys(weight for weight in weights if weight is not None and weight in stacked))
        yield from [*used][:FIRST_WEIGHTS]
