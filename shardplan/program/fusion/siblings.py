"""Sibling fusion: one operation computes the elementwise gradients that read the same rows of experts. Pure.

The kernels of grouped matmuls fuse nothing, so that what follows them is a loop of its own. The gradients of the two
factors in a gated MLP are one loop, which writes both over rows that it reads.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import replace

from shardplan.program.fusion.fusion import Fusion
from shardplan.program.named_arrays import TracedArray
from shardplan.program.operations import Operation, OperationKind


def fuse_with_siblings(
    operations: Sequence[Operation], arrays: Sequence[TracedArray], outputs: Set[int], writes_outputs: bool
) -> Fusion:
    """Fuse a sequence of operations, joining two gradients that read the same rows into one operation.

    The joint operation runs in the place of the second gradient, and operations that read the first gradient move
    behind it. The arguments are the same as for `Fusion`.
    """
    fusion = Fusion(operations, arrays, outputs, writes_outputs)
    first_of = {second: first for first, second in _siblings(fusion)}
    return Fusion(_reorder(operations, first_of), arrays, outputs, writes_outputs) if first_of else fusion


def _siblings(fusion: Fusion) -> Iterator[tuple[int, int]]:
    """Yield pairs of gradients, first and second, that read the same results of grouped matmuls."""
    producer = {result: i for i, operation in enumerate(fusion.operations) for result in operation.results}
    rows = {result for operation in fusion.operations if operation.groups > 1 for result in operation.results}
    first, read_by_first = -1, set[int]()
    for i, operation in enumerate(fusion.operations):
        is_gradient = operation.kind == OperationKind.ELEMENTWISE and operation.is_backward
        if not is_gradient or not fusion.is_executed(operation):
            continue
        reads = fusion.reads(operation)
        # the second must not read what is computed from the first, or after it
        if read_by_first and read_by_first <= reads and all(producer.get(value, -1) < first for value in reads):
            yield first, i
            read_by_first = set()
        elif reads & rows:
            first, read_by_first = i, reads


def _reorder(operations: Sequence[Operation], first_of: dict[int, int]) -> list[Operation]:
    """Return the operations with each pair joined; `first_of` maps the second of a pair to the first."""
    firsts = set(first_of.values())
    ordered: list[Operation] = []
    waiting: list[Operation] = []
    missing = set[int]()
    for i, operation in enumerate(operations):
        if i in firsts:
            missing.update(operation.results)
        elif i in first_of:
            first = operations[first_of[i]]
            operands, results = first.operands + operation.operands, first.results + operation.results
            ordered += [replace(operation, operands=operands, results=results), *waiting]
            waiting, missing = [], set()
        elif missing & set(operation.operands):
            missing.update(operation.results)
            waiting.append(operation)
        else:
            ordered.append(operation)
    return ordered
