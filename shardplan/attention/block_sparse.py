"""Causal attention to blocks of tokens that any rule has selected, on named arrays.

It is the selected branch of Native Sparse Attention (`shardplan.decoder.parts.attention.sparse`), with the numbers of
blocks from outside: a rule such as that of MoBA, https://arxiv.org/abs/2502.13189, or an indexer computes them.
"""

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

from shardplan.decoder.parts.attention.sparse.block_call import BlockCall, compute_block_call
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import QUERIES_PER_CHUNK
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse.kernels.refusal import check_kernel
from shardplan.decoder.parts.attention.sparse.sharding.mesh_sharding import device_count, resolve_mesh_sharding
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.errors import ConfigError, nearest
from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.positions.sequence_order import SequenceOrder

SUBJECT = "attend_to_blocks"
BATCH, POSITION, KV_HEAD, Q_HEADS, HEAD_SIZE = "batch", "position", "kv_head", "q_heads_per_group", "head_size"


@named_call  # for profiles and reports
def attend_to_blocks(
    queries: NamedArray,
    keys: NamedArray,
    values: NamedArray,
    blocks: NamedArray,
    block_size: int,
    method: str = SelectedMethod.DENSE_MASK,
    *,
    layout: str = SequenceOrder.CONTIGUOUS,
    queries_per_chunk: int = QUERIES_PER_CHUNK,
) -> NamedArray:
    """Compute causal attention of each query to the tokens of given blocks.

    Block j has the tokens from j * block_size on, and the sequence's last block may be shorter. Scores have the factor
    head_size ** -0.5. The result is sharded as the current `hax.axis_mapping` shards batch, position, kv_head and
    q_heads_per_group over the mesh of `jax.set_mesh`; where positions are sharded, devices gather keys and values.

    >>> Pos, KVHead, QHead, HeadSize = hax.make_axes(position=6, kv_head=1, q_heads_per_group=2, head_size=4)
    >>> queries, keys = hax.ones((Pos, KVHead, QHead, HeadSize)), hax.ones((Pos, KVHead, HeadSize))
    >>> values = hax.arange(Pos).astype(float).broadcast_axis((KVHead, HeadSize))
    >>> chosen = [[0, -1], [0, -1], [0, 1], [0, 1], [2, -1], [-1, -1]]
    >>> blocks = hax.named(jnp.array(chosen), (Pos, "selected")).broadcast_axis(KVHead)
    >>> output = attend_to_blocks(queries, keys, values, blocks, block_size=2)
    >>> output["kv_head", 0, "q_heads_per_group", 0, "head_size", 0].array.tolist()
    [0.0, 0.5, 1.0, 1.5, 4.0, 0.0]

    Args:
        queries: {batch, position, kv_head, q_heads_per_group, head_size}, in any order, and batch may be missing; the
            heads of a group attend to the same blocks.
        keys: {batch, position, kv_head, head_size}.
        values: {batch, position, kv_head, ...}; the last axis is the head size of values, and may have any name.
        blocks: int{batch, position, kv_head, ...}; the last axis counts the blocks of a query, and may have any name.
            They are in any order. -1 stands for no block, and a block after the query's own adds nothing. No query may
            have a block twice, and no number may be below -1; neither is checked, because numbers are known only when a
            program runs. No gradient flows through the numbers; the name of `blocks` for gradient checkpointing is
            `ActivationName.SELECTED_BLOCKS`.
        block_size: tokens of a block.
        method: dense_mask (scores of all tokens, most of them masked: for short sequences), gathered_blocks (copies
            the tokens of its blocks for each query), or kernel (Pallas: neighbouring queries attend together to the
            union of their blocks; for long sequences in which neighbours select similar blocks; the block size is a
            multiple of 8 tokens). It changes no result.
        layout: the order that positions are in already: contiguous or zigzag; see
            `shardplan.positions.sequence_layout`. The numbers of blocks count from the start of the sequence.
        queries_per_chunk: queries of a device that are computed at a time; it bounds the memory of dense_mask and
            gathered_blocks.

    Returns:
        The axes of queries but head_size, in their order, then the head size of values; zero, with zero gradients, for
        a query without a token.

    Raises:
        ConfigError: an array has other axes, `blocks` is not an integer array, the method or layout is unknown, the
            axis mapping does not divide a size evenly, or there is no kernel for the block size.
    """
    for name, given, valid in (("method", method, SelectedMethod), ("layout", layout, SequenceOrder)):
        if given not in [*valid]:
            raise ConfigError(f"{SUBJECT}: {name} is {given!r}; {nearest(given, valid)}")
    method, layout = SelectedMethod(method), SequenceOrder(layout)
    if block_size < 1:
        raise ConfigError(f"{SUBJECT}: block_size is {block_size}; it must be at least 1")
    if method is SelectedMethod.KERNEL:
        check_kernel(SUBJECT, "block_size", block_size)
    if not jnp.issubdtype(blocks.dtype, jnp.integer):
        raise ConfigError(f"{SUBJECT}: blocks are {blocks.dtype}; pass their numbers, int32")
    _check_axes(queries, keys, values, blocks)

    Batch = queries.resolve_axis(BATCH) if queries.has_axis(BATCH) else Axis(BATCH, 1)
    Pos, KVHeads, QHeads = (queries.resolve_axis(name) for name in (POSITION, KV_HEAD, Q_HEADS))
    ValueSize = _last_axis(values)
    sharding = resolve_mesh_sharding(SUBJECT, Batch, Pos, KVHeads, QHeads)
    parts = PositionParts(Pos.size, device_count(sharding.position), layout)
    parts.check(SUBJECT, block_size)

    def arrange(x: NamedArray, *own: Axis) -> jax.Array:
        """Return the array of `x` with the axes batch, position and kv_head first, then the axes `own`."""
        with_batch = x if x.has_axis(BATCH) else x.broadcast_axis(Batch)
        return with_batch.rearrange((Batch, Pos, KVHeads, *own)).array

    call = BlockCall(
        block_size,
        parts,
        sharding,
        method,
        queries_per_chunk,
        queries=arrange(queries, QHeads, queries.resolve_axis(HEAD_SIZE)),
        blocks=arrange(ActivationName.SELECTED_BLOCKS(blocks), _last_axis(blocks)).astype(jnp.int32),
        keys=arrange(keys, keys.resolve_axis(HEAD_SIZE)),
        values=arrange(values, ValueSize),
    )
    output = compute_block_call(call)
    result = hax.named(output, (Batch, Pos, KVHeads, QHeads, ValueSize))
    if not queries.has_axis(BATCH):
        result = result[BATCH, 0]
    return result.rearrange((*(axis for axis in queries.axes if axis.name != HEAD_SIZE), ValueSize))


def _check_axes(queries: NamedArray, keys: NamedArray, values: NamedArray, blocks: NamedArray) -> None:
    """Check that the arrays have the axes that `attend_to_blocks` requires.

    Raises:
        ConfigError: an array has other axes, or axes of other sizes.
    """
    batch = [BATCH] * queries.has_axis(BATCH)
    required = [*batch, POSITION, KV_HEAD, Q_HEADS, HEAD_SIZE]
    if {axis.name for axis in queries.axes} != {*required}:
        raise ConfigError(f"{SUBJECT}: queries are {_shown(queries)}; they must have the axes {', '.join(required)}")
    shared = [queries.resolve_axis(name) for name in (*batch, POSITION, KV_HEAD)]
    for name, x, last in (
        ("keys", keys, queries.resolve_axis(HEAD_SIZE)), ("values", values, None), ("blocks", blocks, None),
    ):  # fmt: skip
        own = [axis for axis in x.axes if axis not in shared]
        if len(own) != 1 or len(x.axes) != len(shared) + 1 or last not in (None, *own):
            sizes = ", ".join(f"{axis.name}: {axis.size}" for axis in (*shared, *([last] if last else [])))
            others = "" if last else ", and one axis more"
            raise ConfigError(f"{SUBJECT}: {name} are {_shown(x)}; they must have the axes {sizes}{others}")


def _last_axis(x: NamedArray) -> Axis:
    """Return the axis of values or blocks that is not batch, position or kv_head."""
    return next(axis for axis in x.axes if axis.name not in (BATCH, POSITION, KV_HEAD))


def _shown(x: NamedArray) -> str:
    return ", ".join(f"{axis.name}: {axis.size}" for axis in x.axes)
