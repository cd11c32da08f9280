"""The forward kernels of the compressed branch: its output, and then the importance of blocks.

The importance is a sum of weights, and weights are known when the log-sum-exp of all scores is. Scores are computed a
second time for them, and are summed over heads and mapped to selection blocks on the chip: no scores reach memory.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.compressed_tiles import CompressedTiles
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LANES,
    MASKED_SCORE,
    column_to_row,
    launch,
    multiply,
    row_to_column,
)

GRID = ("parallel", "parallel", "arbitrary")
"""Heads of keys of all sequences, tiles, and chunks."""


def attend_compressed_tiles(
    sizes: CompressedTiles, first_positions: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Attend to the compressed blocks that each query sees.

    Args:
        first_positions: int32[tiles of a sequence].
        queries: [tile, row, d].
        keys: [b * g, c, d], with padding to complete chunks.
        values: [b * g, c, d].

    Returns:
        The output [tile, row, d], and float32[tile, 1, row], the log-sum-exp of scores; both are 0 for rows that see
        no block.
    """
    count, rows, size = queries.shape
    value_size = values.shape[-1]

    def kernel(first, q, k, v, output, log_sums, largest, total, accumulated) -> None:  # type: ignore[no-untyped-def]
        first_position, chunk = first[pl.program_id(1)], pl.program_id(2)

        @pl.when(chunk == 0)
        def clear() -> None:
            largest[...] = jnp.full_like(largest, MASKED_SCORE)
            total[...], accumulated[...] = jnp.zeros_like(total), jnp.zeros_like(accumulated)

        @pl.when(chunk < sizes.visible_chunks(first_position))
        def add_chunk() -> None:
            scores = sizes.masked_scores(q[0], k[0], first_position, chunk)
            before = largest[...]
            largest[...] = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            weights, decay = jnp.exp(scores - largest[...]), jnp.exp(before - largest[...])
            total[...] = total[...] * decay + weights.sum(axis=1, keepdims=True)
            accumulated[...] = accumulated[...] * decay + multiply(weights.astype(v.dtype), v[0])

        @pl.when(chunk == sizes.chunks - 1)
        def write() -> None:
            has_keys = largest[...] > MASKED_SCORE / 2
            output[0] = jnp.where(has_keys, accumulated[...] / total[...], 0.0).astype(output.dtype)
            log_sums[0] = column_to_row(jnp.where(has_keys, largest[...] + jnp.log(total[...]), 0.0))

    column = pltpu.VMEM((rows, 1), jnp.float32)
    output, log_sums = launch(
        kernel,
        grid=(len(keys), sizes.tiles.per_sequence, sizes.chunks),
        semantics=GRID,
        in_specs=[sizes.of_tile(rows, size), sizes.of_chunk(size), sizes.of_chunk(value_size)],
        out_specs=[sizes.of_tile(rows, value_size), sizes.of_tile(1, rows)],
        out_shapes=[
            jax.ShapeDtypeStruct((count, rows, value_size), queries.dtype),
            jax.ShapeDtypeStruct((count, 1, rows), jnp.float32),
        ],
        scratch=[column, column, pltpu.VMEM((rows, value_size), jnp.float32)],
        name="compressed_attention",
    )(first_positions, queries, keys, values)
    return output, log_sums


def sum_importance(
    sizes: CompressedTiles, first_positions: jax.Array, queries: jax.Array, keys: jax.Array, log_sums: jax.Array
) -> jax.Array:
    """Return the importance float32[tile, query of the tile, j], j padded to complete chunks.

    Args:
        first_positions: int32[tiles of a sequence].
        queries: [tile, row, d].
        keys: [b * g, c, d], with padding to complete chunks.
        log_sums: float32[tile, 1, row], of `attend_compressed_tiles`; large for padded heads, whose weights are then 0.
    """
    count, rows, size = queries.shape
    tiles = sizes.tiles
    own_weights, next_weights = sizes.importance_weights()

    def kernel(first, q, k, sums, own, after, importance, carry) -> None:  # type: ignore[no-untyped-def]
        first_position, chunk = first[pl.program_id(1)], pl.program_id(2)
        is_visible = chunk < sizes.visible_chunks(first_position)

        @pl.when(chunk == 0)
        def clear() -> None:
            carry[...] = jnp.zeros_like(carry)

        @pl.when(is_visible)
        def add_chunk() -> None:
            scores = sizes.masked_scores(q[0], k[0], first_position, chunk)
            weights = jnp.exp(scores - row_to_column(sums[0]))
            by_query = weights.reshape(tiles.queries, tiles.heads, sizes.chunk).sum(axis=1)
            importance[0] = multiply_exactly(by_query, own[...]) + carry[...]
            carry[...] = multiply_exactly(by_query[:, sizes.chunk - LANES :], after[...])

        @pl.when(~is_visible)
        def write_carry() -> None:
            importance[0] = carry[...]
            carry[...] = jnp.zeros_like(carry)

    def constant(shape: tuple[int, ...]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda head, i, c, _: (0, 0))

    (importance,) = launch(
        kernel,
        grid=(len(keys), tiles.per_sequence, sizes.chunks),
        semantics=GRID,
        in_specs=[
            sizes.of_tile(rows, size), sizes.of_chunk(size), sizes.of_tile(1, rows), constant(own_weights.shape),
            constant(next_weights.shape),
        ],
        out_specs=[
            pl.BlockSpec(
                (1, tiles.queries, LANES), lambda head, i, c, _: (head * tiles.per_sequence + i, 0, c)
            )
        ],
        out_shapes=[jax.ShapeDtypeStruct((count, tiles.queries, sizes.chunks * LANES), jnp.float32)],
        scratch=[pltpu.VMEM((tiles.queries, LANES), jnp.float32)],
        name="block_importance",
    )(first_positions, queries, keys, log_sums, own_weights, next_weights)  # fmt: skip
    return importance


def multiply_exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x y with all bits of float32, where `multiply` would round to bfloat16."""
    return jnp.dot(x, y, precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32)
