"""The forward kernel of the window branch: a tile of queries attends to the few blocks of keys around it."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.launch import MASKED_SCORE, launch, transpose_multiply
from shardplan.decoder.parts.attention.sparse.kernels.window.tiles import WindowTiles

GRID = ("parallel", "parallel", "arbitrary")
"""Semantics of the grid's dimensions: key heads of all sequences, tiles, steps."""


def attend_window_tiles(
    sizes: WindowTiles, first: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Compute the attention of consecutive queries to their windows, tile by tile.

    Args:
        first: int32[1], position of the first query.
        queries: [tile, row, d].
        keys: [b * g, s, d], as `WindowTiles.pad_keys` returns them; values have the same layout.

    Returns:
        The output [tile, row, d], and float32[tile, 1, row], the log-sum-exp of scores.
    """
    count, rows, size = queries.shape
    value_size, unit = values.shape[-1], sizes.blocks_per_step

    def kernel(first, q, *references) -> None:  # type: ignore[no-untyped-def]
        k_blocks, v_blocks = references[:unit], references[unit : 2 * unit]
        output, log_sums, largest, total, accumulated = references[2 * unit :]
        tile, step = pl.program_id(1), pl.program_id(2)
        first_block = sizes.first_key_block(tile) + step * unit

        @pl.when(step == 0)
        def clear() -> None:
            largest[...] = jnp.full_like(largest, MASKED_SCORE)
            total[...], accumulated[...] = jnp.zeros_like(total), jnp.zeros_like(accumulated)

        scores = [
            sizes.masked_scores(k[0], q[0], first_block + i, tile * sizes.tiles.queries, first[0])
            for i, k in enumerate(k_blocks)
        ]
        before, now = largest[...], largest[...]
        for each in scores:
            now = jnp.maximum(now, each.max(axis=0, keepdims=True))
        decay = jnp.exp(before - now)
        largest[...], total[...] = now, total[...] * decay
        added = accumulated[...] * decay
        for each, v in zip(scores, v_blocks, strict=True):
            weights = jnp.exp(each - now)
            total[...] += weights.sum(axis=0, keepdims=True)
            added += transpose_multiply(v[0], weights.astype(v.dtype))
        accumulated[...] = added

        @pl.when(step == sizes.steps - 1)
        def write() -> None:
            output[0] = (accumulated[...] / total[...]).T.astype(output.dtype)
            log_sums[0] = largest[...] + jnp.log(total[...])

    row = pltpu.VMEM((1, rows), jnp.float32)
    output, log_sums = launch(
        kernel,
        grid=(len(keys), sizes.tiles.per_sequence, sizes.steps),
        semantics=GRID,
        in_specs=[sizes.of_tile(rows, size), *sizes.of_key_blocks(size), *sizes.of_key_blocks(value_size)],
        out_specs=[sizes.of_tile(rows, value_size), sizes.of_tile(1, rows)],
        out_shapes=[
            jax.ShapeDtypeStruct((count, rows, value_size), queries.dtype),
            jax.ShapeDtypeStruct((count, 1, rows), jnp.float32),
        ],
        scratch=[row, row, pltpu.VMEM((value_size, rows), jnp.float32)],
        name="window_attention",
    )(first, queries, *[keys] * unit, *[values] * unit)
    return output, log_sums
