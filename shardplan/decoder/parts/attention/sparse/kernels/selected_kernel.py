"""The selected branch by kernels: converts arrays to tiles and back, and chooses the kernels of the gradients.

A tile of neighbouring queries walks the union of their blocks, because one query has too few rows (its R heads) for the
matrix unit. Work grows with the union, so that it pays where neighbours select much the same blocks, and memory with
the length of the sequence only.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.kernels import attention_gradients, selected_forward
from shardplan.decoder.parts.attention.sparse.kernels.block_tables import BlockTables, make_block_tables
from shardplan.decoder.parts.attention.sparse.kernels.block_walk import WalkSizes
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks


class Residuals(NamedTuple):
    """Values that the forward pass keeps for the backward pass."""

    positions: jax.Array
    blocks: jax.Array
    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    output: jax.Array
    """Output of the branch, [tile, row, d]."""
    log_sums: jax.Array
    """Log-sum-exp of each row's scores, float32[tile, 1, row]."""


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def attend_by_kernel(
    selection: SelectionBlocks,
    with_free_mass: bool,
    positions: jax.Array,
    blocks: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> tuple[jax.Array, jax.Array | None]:
    """Attend causally, by kernels, to the tokens of each query's selected blocks.

    Args:
        with_free_mass: whether to return the weights outside forced blocks, through which no gradient flows.
        positions: int[t], of the queries: runs of consecutive positions, each of complete selection blocks but for the
            end of the last one, as `PositionShards.positions` returns them.
        blocks: int32[b, t, g, n], negative where unused.
        queries: [b, t, g, r, d].
        keys: [b, s, g, d], of the whole sequence, in order.
        values: [b, s, g, d].

    Returns:
        The output [b, t, g, r, d], and float32[b, t, g], the weights outside forced blocks, summed over r.
    """
    return _forward(selection, with_free_mass, positions, blocks, queries, keys, values)[0]


def _forward(
    selection: SelectionBlocks,
    with_free_mass: bool,
    positions: jax.Array,
    blocks: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> tuple[tuple[jax.Array, jax.Array | None], Residuals]:
    sizes, batch = _sizes(selection, queries, selected_forward.KEYS_PER_STEP), len(queries)
    key_blocks, value_blocks = (_by_head(selection, x.astype(queries.dtype)) for x in (keys, values))
    output, log_sums, free_mass = selected_forward.attend_tiles(
        sizes,
        sizes.tiles.first_positions(positions),
        _tables(sizes, blocks, keys.shape[1]),
        sizes.tiles.split(queries),
        key_blocks,
        value_blocks,
        with_free_mass,
    )
    free = None if free_mass is None else sizes.tiles.join_heads(free_mass, batch).sum(axis=-1)
    residuals = Residuals(positions, blocks, queries, keys, values, output, log_sums)
    return (sizes.tiles.join(output, batch), free), residuals


def _backward(
    selection: SelectionBlocks,
    with_free_mass: bool,
    residuals: Residuals,
    gradients: tuple[jax.Array, jax.Array | None],
) -> tuple[None, None, jax.Array, jax.Array, jax.Array]:
    positions, blocks, queries, keys, values, output, log_sums = residuals
    sizes, batch = _sizes(selection, queries, attention_gradients.KEYS_PER_STEP), len(queries)
    length = keys.shape[1]
    tables = _tables(sizes, blocks, length)
    of_output = sizes.tiles.split(gradients[0].astype(queries.dtype))
    delta = (output.astype(jnp.float32) * of_output.astype(jnp.float32)).sum(axis=-1)[:, None]
    first_positions = sizes.tiles.first_positions(positions)
    key_blocks, value_blocks = (_by_head(selection, x.astype(queries.dtype)) for x in (keys, values))
    dq, dk, dv = attention_gradients.attention_gradients(
        sizes,
        first_positions,
        tables,
        sizes.tiles.split(queries),
        key_blocks,
        value_blocks,
        of_output,
        jnp.concatenate([log_sums, delta], axis=1),
    )
    of_keys, of_values = (
        x[:, :length].reshape(batch, -1, length, x.shape[-1]).swapaxes(1, 2).astype(like.dtype)
        for x, like in ((dk, keys), (dv, values))
    )
    return None, None, sizes.tiles.join(dq, batch), of_keys, of_values


attend_by_kernel.defvjp(_forward, _backward)


def _sizes(selection: SelectionBlocks, queries: jax.Array, keys_per_step: int) -> WalkSizes:
    _, count, _, heads, size = queries.shape
    return WalkSizes(QueryTiles.of(selection.size, count, heads), selection, size**-0.5, keys_per_step)


def _tables(sizes: WalkSizes, blocks: jax.Array, length: int) -> BlockTables:
    return make_block_tables(sizes.tiles, blocks, sizes.selection.count(length), sizes.unit)


def _by_head(selection: SelectionBlocks, x: jax.Array) -> jax.Array:
    """Reorder by head: [b, s, g, d] -> [b * g, s, d], padded to complete blocks."""
    batch, length, groups, size = x.shape
    padding = selection.count(length) * selection.size - length
    padded = jnp.pad(x, [(0, 0), (0, padding), (0, 0), (0, 0)])
    return padded.swapaxes(1, 2).reshape(batch * groups, length + padding, size)
