"""The memory of Native Sparse Attention and of `attend_to_blocks` on one device, beyond operands and results. Pure."""

from typing import assert_never

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.kernels import kernel_bytes, selected_kernel_bytes
from shardplan.cost.sparse.work import SelectedWork, SparseWork, given_block_work, sparse_work
from shardplan.plan.attention_plan import SparseKernel
from shardplan.program.live_buffers import BufferRole, LiveBuffer
from shardplan.program.marked.marked_sparse import BRANCHES

KEPT_OF_GRADIENT = 3
"""Arrays that a gradient holds per array that the forward pass keeps until the branches are added: the recomputed
array, its gradient, and the gradient of the sum. For outputs of branches, which the gradient reads, it holds the last
two."""


def sparse_buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a call's buffers while it runs, beyond its operands and results.

    These are the float32 keys and values of the sequence, rotated queries, the importance of blocks, and the float32
    sum of branches; and the scores and gathered rows of one chunk of queries, or the buffers of kernels. A backward
    pass also has the gradients of these buffers and of the branches' outputs. docs/log.md compares the estimate with
    XLA's temporaries.
    """
    assert buffer.attention is not None
    work = sparse_work(buffer.attention, buffer.array, assignment)
    is_gradient = buffer.role is BufferRole.SPARSE_GRADIENT
    keys, kept = _float32_bytes(work, work.parts.length + work.compressed_blocks), _kept_bytes(work)
    if is_gradient:
        keys = 2 * keys
        kept = KEPT_OF_GRADIENT * kept + (KEPT_OF_GRADIENT - 1) * _output_bytes(work)
    if work.method is SparseKernel.KERNEL:
        return keys + kept + kernel_bytes(work, is_gradient)
    most_keys = max(work.selected_keys, work.compressed_blocks, work.window_keys)
    return keys + kept + _chunk_bytes(work, most_keys, is_gradient)


def given_block_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of the buffers of a call of `attend_to_blocks` while it runs, beyond its operands and results.

    These are what the selected branch of Native Sparse Attention needs: the float32 keys and values of the sequence,
    and the scores and gathered rows of one chunk of queries, or the buffers of the kernel. A backward pass also has the
    gradients of these buffers.
    """
    assert buffer.blocks is not None
    work = given_block_work(buffer.blocks, buffer.array, assignment)
    is_gradient = buffer.role is BufferRole.BLOCK_GRADIENT
    return selected_branch_bytes(work, is_gradient)


def selected_branch_bytes(work: SelectedWork, is_gradient: bool) -> float:
    """Return the bytes that attention to selected blocks needs while it runs, beyond its operands and results."""
    keys = (2 if is_gradient else 1) * _float32_bytes(work, work.parts.length)
    if work.method is SparseKernel.KERNEL:
        return keys + selected_kernel_bytes(work, is_gradient)
    return keys + _chunk_bytes(work, work.selected_keys, is_gradient)


def _chunk_bytes(work: SelectedWork, keys: float, is_gradient: bool) -> float:
    """Return the bytes of a chunk of queries that XLA computes: scores of `keys` keys, and gathered rows."""
    return (2 if is_gradient else 1) * _score_bytes(work, keys) + _gathered_bytes(work)


def _gathered_bytes(work: SelectedWork) -> float:
    """Return the bytes of rows gathered for a chunk of queries, in float32, and in the queries' type if narrower."""
    assert work.method is not SparseKernel.KERNEL
    match work.method:
        case SparseKernel.GATHERED_BLOCKS:
            narrow = work.itemsize if work.itemsize < FLOAT32_BYTES else 0
            rows = work.sequences * work.chunk * work.groups * work.selected_keys
            return rows * work.channels * (FLOAT32_BYTES + narrow)
        case SparseKernel.DENSE_MASK:
            return 0.0
        case _:
            assert_never(work.method)


def _score_bytes(work: SelectedWork, keys: float) -> float:
    """Return the bytes of the float32 scores and weights of a chunk of queries with `keys` keys each."""
    heads = work.sequences * work.chunk * work.groups * work.config.heads_per_group
    return 2 * FLOAT32_BYTES * heads * keys


def _float32_bytes(work: SelectedWork, keys: float) -> float:
    """Return the bytes of `keys` float32 keys and values of every sequence and group."""
    return FLOAT32_BYTES * work.sequences * work.groups * keys * work.channels


def _kept_bytes(work: SparseWork) -> float:
    """Return the bytes kept until the branches are added: rotated queries, importance, and the sum; without outputs."""
    config = work.config
    heads = work.rows * config.heads_per_group
    queries = heads * config.key_size * work.itemsize
    importance = work.rows * config.selection_blocks(work.parts.length) * FLOAT32_BYTES
    return queries + importance + heads * config.value_size * FLOAT32_BYTES


def _output_bytes(work: SparseWork) -> float:
    """Return the bytes of the outputs of all branches."""
    return BRANCHES * work.rows * work.config.heads_per_group * work.config.value_size * work.itemsize
