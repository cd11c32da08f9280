"""Finds the log-sum-exp that is kept with each output of attention.

Kernels of attention give their output and the log-sum-exp of its scores one name (`ActivationName.CONTEXT`), since
their gradients need both: a policy that keeps the one keeps the other. Traced programs have no kernels, so that the
stack of the contexts of all layers is found here by this name, and the array beside it is made up.

Kernels of Native Sparse Attention and of `attend_to_blocks` name neither. A policy that keeps the context, which is the
sum of the branches, keeps nothing of the kernels, and their forward pass runs again for gradients. Where everything is
kept, there is a log-sum-exp for the output of each branch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.program.live_buffers import BufferRole, LiveBuffer
from shardplan.program.marked.marked_blocks import BLOCK_ATTENTION
from shardplan.program.marked.marked_sparse import SPARSE_ATTENTION
from shardplan.program.named_arrays import TracedArray
from shardplan.program.operations import Operation, OperationKind

FLOAT32_BYTES = 4


def log_sums(loop: Operation, arrays: Sequence[TracedArray]) -> dict[int, LiveBuffer]:
    """Map each stack of attention outputs that a loop over layers writes to the log-sum-exp that kernels write too.

    Args:
        arrays: the values of the trace; an output is {..., heads, head size}, maybe with both axes in one dimension.
    """
    contexts, by_output = _contexts(loop.body), dict(_outputs_of_blocks(loop.body))
    found = {}
    for stack, value in loop.slices:
        if stack not in loop.results:
            continue
        array = _log_sum(arrays[stack])
        if value in contexts:
            found[stack] = LiveBuffer(BufferRole.LOG_SUM_EXP, array)
        elif value in by_output:
            call = by_output[value]
            role = BufferRole.LOG_SUM_EXP_OF_BLOCKS
            found[stack] = LiveBuffer(role, array, attention=call.sparse, blocks=call.blocks)
    return found


def _contexts(operations: Sequence[Operation]) -> set[int]:
    """Return the attention outputs named CONTEXT whose kernel also names its log-sum-exp, and their copies."""
    found, of_blocks = set[int](), set[int]()
    for operation in operations:
        is_copy = operation.kind == OperationKind.HOST_COPY or operation.primitive == "reduce_precision"
        computes_blocks = operation.primitive in (SPARSE_ATTENTION, BLOCK_ATTENTION)
        if computes_blocks or (operation.operands and of_blocks.issuperset(operation.operands)):
            of_blocks.update(operation.results)
        elif operation.activation == ActivationName.CONTEXT or (is_copy and found.issuperset(operation.operands)):
            found.update(operation.results)
    return found


def _outputs_of_blocks(operations: Sequence[Operation]) -> Iterator[tuple[int, Operation]]:
    """Yield the outputs of branches that attend to selected blocks, each with the call that computes them."""
    for operation in operations:
        if operation.primitive == SPARSE_ATTENTION:
            _, outputs, *_ = operation.results
            yield outputs, operation
        elif operation.primitive == BLOCK_ATTENTION:
            (output,) = operation.results
            yield output, operation


def _log_sum(output: TracedArray) -> TracedArray:
    """Return the array of the log-sum-exp of an attention output: the same axes without head size, in float32."""
    *dims, last = output.dims
    heads = last[:-1]
    return replace(output, dims=(*dims, heads) if heads else tuple(dims), itemsize=FLOAT32_BYTES)
