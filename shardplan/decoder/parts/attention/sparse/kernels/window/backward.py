"""The backward kernels of the window branch, which recompute weights from scores and their log-sum-exp.

| kernel | grid | computes |
|---|---|---|
| gradient of queries | heads, tiles, steps | dq = scale * sum over blocks of keys of ds k |
| gradients of keys and values | heads, blocks of keys, runs of tiles | dk = scale * sum of ds q, dv = sum of p do |

with ds = p (do v - delta), where delta is the sum over channels of output * do. The last axis of a grid runs in order.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    launch,
    multiply,
    multiply_transposed,
    transpose_multiply,
)
from shardplan.decoder.parts.attention.sparse.kernels.window.forward import GRID
from shardplan.decoder.parts.attention.sparse.kernels.window.tiles import BLOCK, WindowTiles


def window_query_gradients(
    sizes: WindowTiles,
    first: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
) -> jax.Array:
    """Return the gradient of queries, [tile, row, d].

    Args:
        first: int32[1], position of the first query.
        queries: [tile, row, d].
        keys: [b * g, s, d], as `WindowTiles.pad_keys` returns them; values have the same layout.
        gradients: [tile, row, d], gradients of the output.
        row_sums: float32[tile, 2, row], the log-sum-exp of scores and delta.
    """
    _, rows, size = queries.shape
    value_size, unit = values.shape[-1], sizes.blocks_per_step

    def kernel(first, q, do, sums, *references) -> None:  # type: ignore[no-untyped-def]
        k_blocks, v_blocks = references[:unit], references[unit : 2 * unit]
        dq, accumulated = references[2 * unit :]
        tile, step = pl.program_id(1), pl.program_id(2)
        first_block = sizes.first_key_block(tile) + step * unit

        @pl.when(step == 0)
        def clear() -> None:
            accumulated[...] = jnp.zeros_like(accumulated)

        for i, (k, v) in enumerate(zip(k_blocks, v_blocks, strict=True)):
            scores = sizes.masked_scores(k[0], q[0], first_block + i, tile * sizes.tiles.queries, first[0])
            weights = jnp.exp(scores - sums[0, 0:1])
            of_scores = weights * (multiply_transposed(v[0], do[0]) - sums[0, 1:2])
            accumulated[...] += transpose_multiply(k[0], of_scores.astype(k.dtype))

        @pl.when(step == sizes.steps - 1)
        def write() -> None:
            dq[0] = (accumulated[...] * sizes.config.scale).T.astype(dq.dtype)

    (result,) = launch(
        kernel,
        grid=(len(keys), sizes.tiles.per_sequence, sizes.steps),
        semantics=GRID,
        in_specs=[
            sizes.of_tile(rows, size), sizes.of_tile(rows, value_size), sizes.of_tile(2, rows),
            *sizes.of_key_blocks(size), *sizes.of_key_blocks(value_size),
        ],
        out_specs=[sizes.of_tile(rows, size)],
        out_shapes=[jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        scratch=[pltpu.VMEM((size, rows), jnp.float32)],
        name="window_attention_dq",
    )(first, queries, gradients, row_sums, *[keys] * unit, *[values] * unit)  # fmt: skip
    return result


def window_key_value_gradients(
    sizes: WindowTiles,
    first: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of keys and values, float32[b * g, s, d]; see `window_query_gradients` for arguments."""
    _, rows, size = queries.shape
    heads, length, value_size = values.shape
    unit = sizes.tiles_per_step
    runs_per_block = sizes.tiles_per_block // unit
    runs = sizes.query_blocks * runs_per_block

    def run_of(block: jax.Array, step: jax.Array) -> jax.Array:
        """Return the run of tiles that a step adds to a key block; a run outside 0 .. runs - 1 is skipped."""
        return (block - (sizes.blocks - 1)) * runs_per_block + step

    def kernel(first, k, v, q, do, sums, dk, dv) -> None:  # type: ignore[no-untyped-def]
        block, step = pl.program_id(1), pl.program_id(2)
        run = run_of(block, step)

        @pl.when(step == 0)
        def clear() -> None:
            dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)

        @pl.when((run >= 0) & (run < runs))
        def add_tiles() -> None:
            for i in range(unit):
                first_query = (run * unit + i) * sizes.tiles.queries
                scores = sizes.masked_scores(k[0], q[i], block, first_query, first[0])
                weights = jnp.exp(scores - sums[i, 0:1])
                of_scores = weights * (multiply_transposed(v[0], do[i]) - sums[i, 1:2]) * sizes.config.scale
                dv[0] += multiply(weights.astype(do.dtype), do[i])
                dk[0] += multiply(of_scores.astype(q.dtype), q[i])

    def of_tiles(rows: int, size: int) -> pl.BlockSpec:
        def index(head: jax.Array, block: jax.Array, step: jax.Array, _: jax.Array) -> tuple[jax.Array, int, int]:
            # blocks at the ends have fewer runs: further steps read any run, and `add_tiles` skips it
            return head * runs + jnp.clip(run_of(block, step), 0, runs - 1), 0, 0

        return pl.BlockSpec((unit, rows, size), index)

    def of_keys(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, BLOCK, size), lambda head, block, step, _: (head, block, 0))

    dk, dv = launch(
        kernel,
        grid=(heads, sizes.key_blocks, sizes.blocks * runs_per_block),
        semantics=GRID,
        in_specs=[
            of_keys(size), of_keys(value_size), of_tiles(rows, size), of_tiles(rows, value_size), of_tiles(2, rows),
        ],
        out_specs=[of_keys(size), of_keys(value_size)],
        out_shapes=[
            jax.ShapeDtypeStruct((heads, length, size), jnp.float32),
            jax.ShapeDtypeStruct((heads, length, value_size), jnp.float32),
        ],
        scratch=[],
        name="window_attention_dkv",
    )(first, keys, values, queries, gradients, row_sums)  # fmt: skip
    return dk, dv
