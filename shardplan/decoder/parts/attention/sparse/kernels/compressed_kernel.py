"""The compressed branch by kernels: converts arrays to tiles and back, and chooses the kernels of the gradients."""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.attention_gradients import KEYS_PER_STEP, attention_gradients
from shardplan.decoder.parts.attention.sparse.kernels.block_walk import WalkSizes
from shardplan.decoder.parts.attention.sparse.kernels.compressed_forward import (
    attend_compressed_tiles,
    sum_importance,
)
from shardplan.decoder.parts.attention.sparse.kernels.compressed_tiles import CompressedTiles
from shardplan.decoder.parts.attention.sparse.kernels.launch import LANES, MASKED_SCORE
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks


class CompressedResiduals(NamedTuple):
    """Values that the forward pass keeps for the backward pass."""

    positions: jax.Array
    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    output: jax.Array
    """Output of the branch, [tile, row, d]."""
    log_sums: jax.Array
    """Log-sum-exp of each row's scores, float32[tile, 1, row]."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_to_compressed_by_kernel(
    config: NativeSparseConfig,
    selection_blocks: int,
    positions: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Attend to the compressed blocks that each query sees.

    Args:
        selection_blocks: number J of selection blocks of the sequence.
        positions: int[t], of the queries: runs of consecutive positions, each of complete selection blocks but for the
            end of the last one, as `PositionShards.positions` returns them.
        queries: [b, t, g, r, d].
        keys: [b, c, g, d], of all compressed blocks, in order.
        values: [b, c, g, d].

    Returns:
        The output [b, t, g, r, d], zero for queries that see no block; and the importance float32[b, t, g, j], through
        which no gradient flows.
    """
    return _forward(config, selection_blocks, positions, queries, keys, values)[0]


def _forward(
    config: NativeSparseConfig,
    selection_blocks: int,
    positions: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array], CompressedResiduals]:
    sizes, batch = CompressedTiles.of(config, len(positions), selection_blocks), len(queries)
    first_positions, rows = sizes.tiles.first_positions(positions), _pad_heads(sizes, queries)
    key_chunks, value_chunks = (_by_head(sizes, x.astype(queries.dtype)) for x in (keys, values))
    output, log_sums = attend_compressed_tiles(sizes, first_positions, rows, key_chunks, value_chunks)
    is_head = jnp.arange(sizes.tiles.rows) % sizes.tiles.heads < config.heads_per_group
    # the weights of padded heads are exp(score + MASKED_SCORE) = 0
    of_heads = jnp.where(is_head, log_sums, -MASKED_SCORE)
    importance = sum_importance(sizes, first_positions, rows, key_chunks, of_heads)
    by_query = importance.reshape(batch, -1, sizes.tiles.per_sequence * sizes.tiles.queries, importance.shape[-1])
    by_query = by_query.swapaxes(1, 2)[:, : len(positions), :, :selection_blocks]
    residuals = CompressedResiduals(positions, queries, keys, values, output, log_sums)
    return (_join_heads(sizes, output, batch), by_query), residuals


def _backward(
    config: NativeSparseConfig,
    selection_blocks: int,
    residuals: CompressedResiduals,
    gradients: tuple[jax.Array, jax.Array],
) -> tuple[None, jax.Array, jax.Array, jax.Array]:
    positions, queries, keys, values, output, log_sums = residuals
    sizes, batch = CompressedTiles.of(config, len(positions), selection_blocks), len(queries)
    # as in the selected branch, without the padding of heads
    tiles = QueryTiles.of(config.selection_block, len(positions), config.heads_per_group)
    walk = WalkSizes(
        tiles, SelectionBlocks(LANES), config.scale, KEYS_PER_STEP, stride=config.stride, lag=config.block - 1
    )
    of_output = gradients[0].astype(queries.dtype)
    delta = (_join_heads(sizes, output, batch).astype(jnp.float32) * of_output.astype(jnp.float32)).sum(axis=-1)
    of_rows = sizes.tiles.join_heads(log_sums, batch)[..., : config.heads_per_group], delta
    key_chunks, value_chunks = (_by_head(sizes, x.astype(queries.dtype)) for x in (keys, values))
    dq, dk, dv = attention_gradients(
        walk,
        tiles.first_positions(positions),
        None,
        tiles.split(queries),
        key_chunks,
        value_chunks,
        tiles.split(of_output),
        jnp.concatenate([tiles.split_heads(x) for x in of_rows], axis=1),
    )
    of_keys, of_values = (
        x[:, : like.shape[1]].reshape(batch, keys.shape[2], -1, x.shape[-1]).swapaxes(1, 2).astype(like.dtype)
        for x, like in ((dk, keys), (dv, values))
    )
    return None, tiles.join(dq, batch), of_keys, of_values


attend_to_compressed_by_kernel.defvjp(_forward, _backward)


def _pad_heads(sizes: CompressedTiles, x: jax.Array) -> jax.Array:
    """Pad heads: [b, t, g, r, d] -> [tile, row, d]."""
    return sizes.tiles.split(jnp.pad(x, [(0, 0), (0, 0), (0, 0), (0, sizes.padding), (0, 0)]))


def _join_heads(sizes: CompressedTiles, x: jax.Array, batch: int) -> jax.Array:
    """Remove padded heads: [tile, row, d] -> [b, t, g, r, d]."""
    return sizes.tiles.join(x, batch)[:, :, :, : sizes.config.heads_per_group]


def _by_head(sizes: CompressedTiles, x: jax.Array) -> jax.Array:
    """Reorder by head: [b, c, g, d] -> [b * g, c, d], padded to complete chunks with keys that no query sees."""
    batch, count, groups, size = x.shape
    padded = jnp.pad(x, [(0, 0), (0, sizes.chunks * sizes.chunk - count), (0, 0), (0, 0)])
    return padded.swapaxes(1, 2).reshape(batch * groups, -1, size)
