"""Finds the log-sum-exp that kernels keep with each context of attention (the weighted sum of values).

Kernels of attention give their output and the log-sum-exp of its scores one name (`ActivationName.CONTEXT`), since
their gradients need both: a policy that keeps the one keeps the other. Traced programs have no kernels, so that the
stack of the contexts of all layers is found here by this name, and the array beside it is made up.
"""

from collections.abc import Sequence
from dataclasses import replace

from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.program.named_arrays import TracedArray
from shardplan.program.operations import Operation, OperationKind

FLOAT32_BYTES = 4


def log_sums(loop: Operation, arrays: Sequence[TracedArray]) -> dict[int, TracedArray]:
    """Return stack of contexts (weighted sums of values) that a loop writes -> log-sum-exp kept with it.

    Args:
        arrays: the values of the trace; a context is {..., heads, head size}, maybe with both axes in one dimension.
    """
    contexts = _contexts(loop.body)
    stacks = [stack for stack, value in loop.slices if stack in loop.results and value in contexts]
    return {stack: _log_sum(arrays[stack]) for stack in stacks}


def _contexts(operations: Sequence[Operation]) -> set[int]:
    """Return the values that are named as a context (weighted sum of values in attention), and their copies."""
    found = set[int]()
    for operation in operations:
        is_copy = operation.kind == OperationKind.HOST_COPY or operation.primitive == "reduce_precision"
        if operation.activation == ActivationName.CONTEXT or (is_copy and found.issuperset(operation.operands)):
            found.update(operation.results)
    return found


def _log_sum(context: TracedArray) -> TracedArray:
    """Return the log-sum-exp array for the array of a context: float32, without the head size."""
    *dims, last = context.dims
    heads = last[:-1]
    return replace(context, dims=(*dims, heads) if heads else tuple(dims), itemsize=FLOAT32_BYTES)
