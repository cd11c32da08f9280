"""The forward kernels of the compressed branch: its output, and then the importance of blocks.

The importance is a sum of weights, and weights are known when the log-sum-exp of all scores is. Scores are computed a
second time for them, and are summed over heads and mapped to selection blocks on the chip: no scores reach memory.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.compressed_tiles import CompressedTiles
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LANES,
    LOG2_E,
    MASKED_SCORE,
    launch,
    multiply,
    multiply_transposed,
    row_to_column,
    transpose,
)
from shardplan.decoder.parts.attention.sparse.kernels.online_softmax import OnlineSoftmax
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles

GRID = ("parallel", "parallel", "arbitrary")
"""Semantics of the grid's dimensions: key heads of all sequences, tiles, chunks."""


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

    def kernel(first, q, k, v, output, log_sums, *scratch) -> None:  # type: ignore[no-untyped-def]
        *state, transposed_q = scratch
        first_position, chunk = first[pl.program_id(1)], pl.program_id(2)

        @pl.when(chunk == 0)
        def clear() -> None:
            OnlineSoftmax.clear(state)
            transposed_q[...] = transpose(q[0])

        @pl.when(chunk < sizes.visible_chunks(first_position))
        def add_chunk() -> None:
            softmax = OnlineSoftmax.load(state)
            parts = [slice(i, i + LANES) for i in range(0, sizes.chunk, LANES)]
            products = [multiply(k[0, part], transposed_q[...]) for part in parts]
            for part, scores in zip(parts, products, strict=True):
                is_visible = sizes.visible_rows(first_position, chunk * sizes.chunk + part.start, LANES)
                scores = jnp.where(is_visible, scores * (sizes.config.scale * LOG2_E), MASKED_SCORE)
                softmax, _, _ = softmax.add(scores, v[0, part])
            softmax.store(state)

        @pl.when(chunk == sizes.chunks - 1)
        def write() -> None:
            softmax = OnlineSoftmax.load(state)
            output[0], log_sums[0] = softmax.output().astype(output.dtype), softmax.log_sums()

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
        scratch=[*OnlineSoftmax.scratch(rows, value_size), pltpu.VMEM((size, rows), queries.dtype)],
        name="compressed_attention",
    )(first_positions, queries, keys, values)
    return output, log_sums


def sum_importance(
    sizes: CompressedTiles, first_positions: jax.Array, queries: jax.Array, keys: jax.Array, log_sums: jax.Array
) -> jax.Array:
    """Return the importance float32[tile, query of the tile, j], with j padded to complete chunks.

    Args:
        first_positions: int32[tiles of a sequence].
        queries: [tile, row, d].
        keys: [b * g, c, d], with padding to complete chunks.
        log_sums: float32[tile, 1, row], of `attend_compressed_tiles`; large for padded heads, whose weights are then 0.
    """
    (count, rows, size), tiles, config = queries.shape, sizes.tiles, sizes.config
    own_weights, next_weights = sizes.importance_weights()

    def kernel(first, q, k, sums, own, after, importance, carry, by_query, head_q, head_sums) -> None:  # type: ignore[no-untyped-def]
        first_position, chunk = first[pl.program_id(1)], pl.program_id(2)
        is_visible = chunk < sizes.visible_chunks(first_position)

        @pl.when(chunk == 0)
        def clear() -> None:
            carry[...] = jnp.zeros_like(carry)
            _reorder_rows(tiles, q[0], by_query, head_q)
            columns = jnp.broadcast_to(row_to_column(sums[0]) * LOG2_E, (rows, LANES))
            _reorder_rows(tiles, columns, by_query, head_sums)

        @pl.when(is_visible)
        def add_chunk() -> None:
            of_parts = []
            for start in range(0, sizes.chunk, LANES):
                scores = multiply_transposed(head_q[...], k[0, start : start + LANES]) * (config.scale * LOG2_E)
                exponents = (scores - head_sums[...]).reshape(tiles.heads, tiles.queries, LANES)
                mask = sizes.visible_blocks(first_position, chunk * sizes.chunk + start, LANES)
                weights = jnp.exp2(jnp.where(mask, exponents, MASKED_SCORE))
                of_parts.append(weights.sum(axis=0))
            importance[0] = _multiply_exactly(jnp.concatenate(of_parts, axis=1), own[...]) + carry[...]
            carry[...] = _multiply_exactly(of_parts[-1], after[...])

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
        scratch=[
            pltpu.VMEM((tiles.queries, LANES), jnp.float32), pltpu.VMEM((rows, LANES), jnp.float32),
            pltpu.VMEM((rows, size), queries.dtype), pltpu.VMEM((rows, LANES), jnp.float32),
        ],
        name="block_importance",
    )(first_positions, queries, keys, log_sums, own_weights, next_weights)  # fmt: skip
    return importance


def _reorder_rows(tiles: QueryTiles, x: jax.Array, scratch: Any, target: Any) -> None:
    """Store rows [query, head] as [head, query], so that sums over heads add whole registers."""
    # rows at a distance can be read from registers of one column only
    for start in range(0, x.shape[1], LANES):
        columns = slice(start, min(start + LANES, x.shape[1]))
        width = columns.stop - start
        scratch[:, :width] = x[:, columns].astype(jnp.float32)
        for head in range(tiles.heads):
            of_head = scratch[pl.ds(head, tiles.queries, stride=tiles.heads)]
            target[pl.ds(head * tiles.queries, tiles.queries), columns] = of_head[:, :width].astype(target.dtype)


def _multiply_exactly(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x y without rounding x: float32 x is split into 3 bfloat16 parts, and y is exact in bfloat16."""
    parts = []
    for _ in range(3):
        upper_bits = jax.lax.bitcast_convert_type(x, jnp.int32) & -(2**16)
        parts.append(jax.lax.bitcast_convert_type(upper_bits, jnp.float32))
        x -= parts[-1]
    product = multiply(jnp.concatenate(parts).astype(y.dtype), y)
    upper, middle, lower = jnp.split(product, 3)
    return upper + (middle + lower)
