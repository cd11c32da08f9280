"""Tables of the blocks that tiles of queries attend to.

A tile's table is the union of its queries' blocks, ascending, with one bit per query that has selected the block.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles


class BlockTables(NamedTuple):
    """For every tile of queries, the blocks that its queries selected."""

    blocks: jax.Array
    """Blocks of each tile, int32[tile, 1, u], ascending; 0 after the last one."""
    members: jax.Array
    """Queries that selected each block, int32[tile, 1, u]: bit i is query i of the tile; 0 after the last block."""


def make_block_tables(tiles: QueryTiles, blocks: jax.Array, count: int, multiple: int) -> BlockTables:
    """Make the table of every tile from the blocks that each query selected.

    Args:
        blocks: int32[b, t, g, n], negative where unused.
        count: blocks of the sequence, J.
        multiple: number that divides the size u of the tables.
    """
    b, _, g, n = blocks.shape
    padded = jnp.pad(blocks, [(0, 0), (0, tiles.padding), (0, 0), (0, 0)], constant_values=-1)
    by_tile = padded.reshape(b, tiles.per_sequence, tiles.queries, g, n).transpose(0, 3, 1, 2, 4)
    queries = jnp.arange(tiles.queries)[:, None]
    # unused entries sort behind all blocks
    keys = jnp.where(by_tile < 0, count, by_tile) * tiles.queries + queries
    keys = jnp.sort(keys.reshape(b * g * tiles.per_sequence, tiles.queries * n), axis=-1)
    selected, bits = keys // tiles.queries, jnp.left_shift(1, keys % tiles.queries)
    distance = 1
    while distance < tiles.queries:
        # a block occurs once per query, so that sums of so many neighbours reach from the first to the last of it
        is_same = _shift(selected, distance, -1) == selected
        bits += jnp.where(is_same, _shift(bits, distance, 0), 0)
        distance *= 2
    is_last = (selected != jnp.roll(selected, -1, axis=-1)) | (jnp.arange(tiles.queries * n) == tiles.queries * n - 1)
    is_block = is_last & (selected < count)
    union, members = jax.lax.sort((jnp.where(is_block, selected, count), bits), num_keys=1, is_stable=False)
    size = min(count, tiles.queries * n)
    missing = -size % multiple
    is_used = union < count
    union, members = (
        jnp.pad(jnp.where(is_used, x, 0)[:, :size], [(0, 0), (0, missing)])[:, None] for x in (union, members)
    )
    return BlockTables(union, members)


def _shift(x: jax.Array, distance: int, fill: int) -> jax.Array:
    """Shift the elements of each row to the right."""
    return jnp.pad(x, [(0, 0), (distance, 0)], constant_values=fill)[:, : x.shape[1]]
