"""The backward kernels of the compressed branch; weights are computed again from scores and their log-sum-exp.

| kernel | grid | computes |
|---|---|---|
| gradient of queries | heads, tiles, chunks | dq = scale * sum over chunks of ds k |
| gradients of keys and values | heads, chunks, tiles | dk = scale * sum over tiles of ds q, dv = sum of p do |

with ds = p (do v - delta), where delta is the sum over channels of output * do. The last axis of a grid runs in order.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.compressed_tiles import CompressedTiles
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    launch,
    multiply,
    multiply_transposed,
    row_to_column,
    transpose_multiply,
)

GRID = ("parallel", "parallel", "arbitrary")


def compressed_query_gradients(
    sizes: CompressedTiles,
    first_positions: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
) -> jax.Array:
    """Return dq, [tile, row, d].

    Args:
        first_positions: int32[tiles of a sequence].
        queries: [tile, row, d].
        keys: [b * g, c, d], with padding to complete chunks; values are alike.
        gradients: [tile, row, d], of the output.
        row_sums: float32[tile, 2, row], the log-sum-exp of scores and delta.
    """
    _, rows, size = queries.shape

    def kernel(first, q, k, v, do, sums, dq, accumulated) -> None:  # type: ignore[no-untyped-def]
        first_position, chunk = first[pl.program_id(1)], pl.program_id(2)

        @pl.when(chunk == 0)
        def clear() -> None:
            accumulated[...] = jnp.zeros_like(accumulated)

        @pl.when(chunk < sizes.visible_chunks(first_position))
        def add_chunk() -> None:
            scores = sizes.masked_scores(q[0], k[0], first_position, chunk)
            weights = jnp.exp(scores - row_to_column(sums[0, 0:1]))
            of_weights = multiply_transposed(do[0], v[0]) - row_to_column(sums[0, 1:2])
            accumulated[...] += multiply((weights * of_weights).astype(k.dtype), k[0])

        @pl.when(chunk == sizes.chunks - 1)
        def write() -> None:
            dq[0] = (accumulated[...] * sizes.config.scale).astype(dq.dtype)

    (result,) = launch(
        kernel,
        grid=(len(keys), sizes.tiles.per_sequence, sizes.chunks),
        semantics=GRID,
        in_specs=[
            sizes.of_tile(rows, size), sizes.of_chunk(size), sizes.of_chunk(values.shape[-1]),
            sizes.of_tile(rows, values.shape[-1]), sizes.of_tile(2, rows),
        ],
        out_specs=[sizes.of_tile(rows, size)],
        out_shapes=[jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        scratch=[pltpu.VMEM((rows, size), jnp.float32)],
        name="compressed_attention_dq",
    )(first_positions, queries, keys, values, gradients, row_sums)  # fmt: skip
    return result


def compressed_key_value_gradients(
    sizes: CompressedTiles,
    first_positions: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return dk and dv, float32[b * g, c, d]; the arguments are those of `compressed_query_gradients`."""
    _, rows, size = queries.shape
    heads, length, value_size = values.shape

    def kernel(first, q, k, v, do, sums, dk, dv) -> None:  # type: ignore[no-untyped-def]
        chunk, tile = pl.program_id(1), pl.program_id(2)
        first_position = first[tile]

        @pl.when(tile == 0)
        def clear() -> None:
            dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)

        @pl.when(chunk < sizes.visible_chunks(first_position))
        def add_tile() -> None:
            scores = sizes.masked_scores(q[0], k[0], first_position, chunk)
            weights = jnp.exp(scores - row_to_column(sums[0, 0:1]))
            of_weights = multiply_transposed(do[0], v[0]) - row_to_column(sums[0, 1:2])
            of_scores = (weights * of_weights * sizes.config.scale).astype(q.dtype)
            dk[0] += transpose_multiply(of_scores, q[0])
            dv[0] += transpose_multiply(weights.astype(do.dtype), do[0])

    def of_tile(rows: int, size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, rows, size), lambda head, c, i, _: (head * sizes.tiles.per_sequence + i, 0, 0))

    def of_chunk(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, sizes.chunk, size), lambda head, c, i, _: (head, c, 0))

    dk, dv = launch(
        kernel,
        grid=(heads, sizes.chunks, sizes.tiles.per_sequence),
        semantics=GRID,
        in_specs=[
            of_tile(rows, size), of_chunk(size), of_chunk(value_size), of_tile(rows, value_size), of_tile(2, rows),
        ],
        out_specs=[of_chunk(size), of_chunk(value_size)],
        out_shapes=[
            jax.ShapeDtypeStruct((heads, length, size), jnp.float32),
            jax.ShapeDtypeStruct((heads, length, value_size), jnp.float32),
        ],
        scratch=[],
        name="compressed_attention_dkv",
    )(first_positions, queries, keys, values, gradients, row_sums)  # fmt: skip
    return dk, dv
