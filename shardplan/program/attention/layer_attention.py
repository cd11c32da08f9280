"""Assigns a kind of attention to each layer, by the order of the attention calls in a traced program.

A loop over stacked layers has the calls of its body once for each of its iterations.
"""

from collections.abc import Iterable, Iterator, Sequence

from shardplan.program.marked.attention_kind import UNMARKED, AttentionKind
from shardplan.program.marked.marked_attention import kind_of_label
from shardplan.program.named_arrays import TracedArray, is_scores
from shardplan.program.operations import REMATERIALIZED_SCOPE, Operation, OperationKind


def attention_calls(operations: Iterable[Operation], arrays: Sequence[TracedArray]) -> Iterator[AttentionKind]:
    """Yield the kind of each call of attention in the forward pass, in the order of the program.

    A call is a matmul that makes scores, or a call of Native Sparse Attention; rematerialization does not count.

    Args:
        arrays: the values that operations refer to by index.
    """
    for operation in operations:
        if operation.kind == OperationKind.LOOP:
            calls = tuple(attention_calls(operation.body, arrays))
            if calls:
                yield from calls * operation.trips
        elif operation.sparse is not None:
            if not _is_for_gradients(operation):
                yield operation.sparse
        elif _makes_scores(operation, arrays) and not _is_for_gradients(operation):
            yield kind_of_label(operation.label) or UNMARKED


def _makes_scores(operation: Operation, arrays: Sequence[TracedArray]) -> bool:
    return operation.kind == OperationKind.CONTRACTION and is_scores(arrays[operation.results[0]])


def _is_for_gradients(operation: Operation) -> bool:
    return operation.is_backward or REMATERIALIZED_SCOPE in operation.label
