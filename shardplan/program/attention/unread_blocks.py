"""Removes the selected-blocks result from recomputed calls of Native Sparse Attention, if the forward pass kept it.

Such a call attends to the kept blocks, and selects none. Its operation has the other results: the sum of the branches
and their outputs.
"""

from collections.abc import Iterable
from dataclasses import replace

from shardplan.program.marked.marked_sparse import SPARSE_ATTENTION
from shardplan.program.operations import REMATERIALIZED_SCOPE, Operation


def without_unread_blocks(operations: Iterable[Operation]) -> tuple[Operation, ...]:
    """Drop the unread selected-blocks results of recomputed calls; return all operations, changed or not."""
    operations = tuple(
        replace(each, body=without_unread_blocks(each.body)) if each.body else each for each in operations
    )
    read = {operand for operation in operations for operand in operation.operands}
    changed = []
    for operation in operations:
        is_again = operation.primitive == SPARSE_ATTENTION and REMATERIALIZED_SCOPE in operation.label
        if is_again and operation.results[-1] not in read:
            operation = replace(operation, results=operation.results[:-1])
        changed.append(operation)
    return tuple(changed)
