"""The memory of Native Sparse Attention on one device, beyond its operands and results. Pure."""

from typing import assert_never

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.kernels import kernel_bytes
from shardplan.cost.sparse.work import SparseWork, sparse_work
from shardplan.plan.attention_plan import SparseKernel
from shardplan.program.live_buffers import BufferRole, LiveBuffer

KEPT_OF_GRADIENT = 3
"""Arrays that a gradient holds per array that the forward pass keeps until the branches are added: the recomputed
array, its gradient, and the gradient of the sum."""


def sparse_buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a call's buffers while it runs, beyond its operands and results.

    These are the float32 keys and values of the sequence, rotated queries, the outputs of branches, the importance of
    blocks, and the scores and gathered rows of one chunk of queries, or what kernels need. A gradient has gradients of
    them, too; those of gathered rows are added up at once. docs/log.md compares it with XLA's temporaries.
    """
    assert buffer.attention is not None
    work = sparse_work(buffer.attention, buffer.array, assignment)
    is_gradient = buffer.role is BufferRole.SPARSE_GRADIENT
    keys, kept = _keys_bytes(work), _kept_bytes(work)
    if is_gradient:
        keys, kept = 2 * keys, KEPT_OF_GRADIENT * kept
    if work.method is SparseKernel.KERNEL:
        return keys + kept + kernel_bytes(work, is_gradient)
    return keys + kept + (2 if is_gradient else 1) * _score_bytes(work) + _gathered_bytes(work)


def _gathered_bytes(work: SparseWork) -> float:
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


def _score_bytes(work: SparseWork) -> float:
    """Return the bytes of the float32 scores and weights of a chunk, in the branch with most of them."""
    heads = work.sequences * work.chunk * work.groups * work.config.heads_per_group
    return 2 * FLOAT32_BYTES * heads * max(work.selected_keys, work.compressed_blocks, work.window_keys)


def _keys_bytes(work: SparseWork) -> float:
    """Return the bytes of the float32 keys and values of a sequence: of all tokens, and of compressed blocks."""
    rows = work.sequences * work.groups * (work.parts.length + work.compressed_blocks)
    return FLOAT32_BYTES * rows * work.channels


def _kept_bytes(work: SparseWork) -> float:
    """Return the bytes kept until the branches are added: rotated queries, outputs, importance, and the sum."""
    config = work.config
    heads = work.rows * config.heads_per_group
    queries, outputs = heads * config.key_size * work.itemsize, 3 * heads * config.value_size * work.itemsize
    importance = work.rows * config.selection_blocks(work.parts.length) * FLOAT32_BYTES
    return queries + outputs + importance + heads * config.value_size * FLOAT32_BYTES
