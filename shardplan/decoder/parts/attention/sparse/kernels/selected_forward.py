"""The forward kernel of the selected branch: softmax attention of a tile of queries to the blocks of its table.

Softmax is computed in one walk, with the largest score and the sum of weights so far (online softmax). A step may mask
all its keys for some rows: their weights are wrong until a key is visible, and then multiplied by exp(-1e30) = 0.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels import block_walk
from shardplan.decoder.parts.attention.sparse.kernels.block_tables import BlockTables
from shardplan.decoder.parts.attention.sparse.kernels.block_walk import BlockWalk, TileStep, WalkSizes
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    MASKED_SCORE,
    column_to_row,
    launch,
    multiply,
    multiply_transposed,
)


def attend_tiles(
    sizes: WalkSizes,
    first_positions: jax.Array,
    tables: BlockTables,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    with_free_mass: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Attend to the blocks of the tables.

    Args:
        first_positions: int32[tiles of a sequence].
        queries: [tile, row, d].
        keys: [b * g, s, d], of complete blocks, in the dtype of queries.
        values: [b * g, s, d].
        with_free_mass: whether to sum the weights outside forced blocks.

    Returns:
        The output [tile, row, d], 0 for rows without a visible key; float32[tile, 1, row], the log-sum-exp of scores,
        0 for rows without a visible key; and float32[tile, 1, row], the weights outside forced blocks.
    """
    count, rows, size = queries.shape
    value_size, sums = values.shape[-1], 2 if with_free_mass else 1

    def kernel(*refs: Any) -> None:
        first, blocks, next_blocks, members, k, v, q, output, *row_outputs = refs[: 8 + sums]
        buffers, (largest, total, free, accumulated) = refs[8 + sums : 12 + sums], refs[12 + sums :]
        walk = BlockWalk(sizes, TileStep.current(), first, blocks, next_blocks, members, k, v, *buffers)
        largest[...] = jnp.full_like(largest, MASKED_SCORE)
        for each in (total, free, accumulated):
            each[...] = jnp.zeros_like(each)

        def compute(step: jax.Array, step_keys: jax.Array, step_values: jax.Array) -> None:
            scores = multiply_transposed(q[0], step_keys) * sizes.scale
            scores = jnp.where(walk.is_visible(step), scores, MASKED_SCORE)
            before = largest[...]
            largest[...] = jnp.maximum(before, scores.max(axis=1, keepdims=True))
            weights, decay = jnp.exp(scores - largest[...]), jnp.exp(before - largest[...])
            total[...] = total[...] * decay + weights.sum(axis=1, keepdims=True)
            if with_free_mass:
                free[...] = free[...] * decay + (weights * walk.is_free(step)).sum(axis=1, keepdims=True)
            accumulated[...] = accumulated[...] * decay + multiply(weights.astype(step_values.dtype), step_values)

        walk.run(compute)
        has_keys = largest[...] > MASKED_SCORE / 2
        inverse = jnp.where(has_keys, 1 / total[...], 0.0)
        output[0] = (accumulated[...] * inverse).astype(output.dtype)
        log_sums = jnp.where(has_keys, largest[...] + jnp.log(total[...]), 0.0)
        for target, column in zip(row_outputs, (log_sums, free[...] * inverse), strict=False):
            target[0] = column_to_row(column)

    column = pltpu.VMEM((rows, 1), jnp.float32)
    by_row = jax.ShapeDtypeStruct((count, 1, rows), jnp.float32)
    run = launch(
        kernel,
        grid=block_walk.grid(tables),
        semantics=("parallel", "arbitrary"),
        in_specs=[*block_walk.in_specs(tables), block_walk.rows_spec(rows, size, count)],
        out_specs=[
            block_walk.rows_spec(rows, value_size, count),
            *[block_walk.rows_spec(1, rows, count)] * sums,
        ],
        out_shapes=[jax.ShapeDtypeStruct((count, rows, value_size), queries.dtype), *[by_row] * sums],
        scratch=[
            *block_walk.scratch(sizes, keys, values), column, column, column,
            pltpu.VMEM((rows, value_size), jnp.float32),
        ],
        name="selected_attention",
    )  # fmt: skip
    output, log_sums, *free_mass = run(first_positions, *block_walk.arguments(tables, keys, values), queries)
    return output, log_sums, free_mass[0] if free_mass else None
