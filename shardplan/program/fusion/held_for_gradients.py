"""Predicts the values that a compiler keeps after their last use, until experts' gradients are computed. Pure.

Some compilers compute these gradients last, and free none of the rows routed to experts before; a sum over devices
reuses the memory of its operand, as do the pass that fills rows out of bounds and the gradients of the elementwise
operations between matmuls. Other compilers free the rows and look them up again, for which the tokens stay.
"""

from collections.abc import Sequence, Set
from typing import NamedTuple

from shardplan.hardware import CollectiveKind
from shardplan.program.fusion.fusion import Fusion
from shardplan.program.named_arrays import TracedArray
from shardplan.program.operations import OperationKind


class HeldForGradients(NamedTuple):
    """The values that a compiler keeps in memory after their last use, and until which operation."""

    unfreed_rows: Set[int] = frozenset()
    """Rows that stay after their last use, if the compiler does not free rows."""
    routed_tokens: Set[int] = frozenset()
    """Tokens from which rows are looked up; they stay after their last use if the compiler frees rows."""
    factors: Sequence[TracedArray] = ()
    """Resharded factors of products in the gradient of rows, which the gradient of the routing weights reads again."""
    gathered_rows: Set[int] = frozenset()
    """The experts' results, which the gradient of the routing weights needs again."""
    start: int = -1
    """Index of the first operation that computes a gradient of experts' parameters; `factors` and `gathered_rows` are
    in memory from there on."""
    end: int = -1
    """Index of the operation until which the held values stay; -1 for a program without gradients of experts."""


def hold_for_gradients(fusion: Fusion) -> HeldForGradients:
    """Return the values that stay in memory until the gradients of experts are computed."""
    operations, arrays = fusion.operations, fusion.arrays
    grouped = [operation for operation in operations if operation.groups > 1]
    sizes = {arrays[operation.operands[0]].elements for operation in grouped}
    # the gradient of the matrices is the one that has no rows
    computes_gradients = [o.groups > 1 and arrays[o.results[0]].elements not in sizes for o in operations]
    if not any(computes_gradients):
        return HeldForGradients()
    start = computes_gradients.index(True)
    results = {result for operation in grouped for result in operation.results}
    end = max(i for i, operation in enumerate(operations) if results & set(map(fusion.base_of, operation.operands)))
    rows = {value for value in fusion.written if arrays[value].elements in sizes}
    tokens = _tokens_of(rows, fusion)
    return HeldForGradients(
        rows - _overwritten(rows, fusion), tokens - rows, _resharded_factors(fusion, start), tokens & rows, start, end
    )


def _overwritten(rows: Set[int], fusion: Fusion) -> Set[int]:
    """Return the values whose memory an operation overwrites with its result."""
    overwritten = set[int]()
    for operation in fusion.operations:
        if operation.collective == CollectiveKind.ALL_REDUCE:
            overwritten.add(fusion.base_of(operation.operands[0]))
        if operation.kind != OperationKind.ELEMENTWISE:
            continue
        fills_rows = operation.results[0] in rows and len(operation.operands) == 1
        if fills_rows:
            overwritten.add(fusion.base_of(operation.operands[0]))
        if operation.is_backward and rows >= set(operation.results):
            overwritten.update(fusion.reads(operation))
    return overwritten


def _tokens_of(rows: Set[int], fusion: Fusion) -> set[int]:
    """Return the values of tokens from which an expert's rows are looked up."""
    lookups = [operation for operation in fusion.operations if operation.kind == OperationKind.LOOKUP]
    return {fusion.base_of(lookup.operands[0]) for lookup in lookups if lookup.results[0] in rows}


def _resharded_factors(fusion: Fusion, end: int) -> list[TracedArray]:
    """Return the factors of products that are resharded before the operation of index `end`."""
    factors: list[TracedArray] = []
    for operation in fusion.operations[:end]:
        if operation.kind == OperationKind.RESHARD:
            operands, results = fusion.resharded(operation)
            factors += results if len(operands) > 1 else ()
    return factors
