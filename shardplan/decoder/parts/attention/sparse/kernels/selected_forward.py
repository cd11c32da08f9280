"""The forward kernel of the selected branch: softmax attention of a tile of queries to the blocks of its table.

A step has several parts, whose matmuls the matrix units compute side by side; each is added to the online softmax.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels import block_walk
from shardplan.decoder.parts.attention.sparse.kernels.block_tables import BlockTables
from shardplan.decoder.parts.attention.sparse.kernels.block_walk import BlockWalk, TileStep, WalkSizes
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LOG2_E,
    MASKED_SCORE,
    launch,
    multiply,
    transpose,
)
from shardplan.decoder.parts.attention.sparse.kernels.online_softmax import OnlineSoftmax, fold_rows

KEYS_PER_STEP = 1024
"""Maximum number of keys per step: two steps of 512 take 4/3 as long, as matmuls overlap other parts' softmax only."""


def attend_tiles(
    sizes: WalkSizes,
    first_positions: jax.Array,
    tables: BlockTables,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    with_free_mass: bool,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Compute softmax attention of each tile of queries to the blocks in its table.

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
        buffers, state, (free, transposed_q) = refs[8 + sums : 12 + sums], refs[12 + sums : -2], refs[-2:]
        walk = BlockWalk(sizes, TileStep.current(), first, blocks, next_blocks, members, k, v, *buffers)
        OnlineSoftmax.clear(state)
        free[...] = jnp.zeros_like(free)
        transposed_q[...] = transpose(q[0])

        def compute(step: jax.Array, slot: jax.Array) -> None:
            def of_part(buffer: Any, part: range) -> jax.Array:
                part_keys: jax.Array = buffer[slot, part.start * sizes.block : part.stop * sizes.block]
                return part_keys

            products = [multiply(of_part(walk.key_buffer, part), transposed_q[...]) for part in sizes.parts]
            softmax = OnlineSoftmax.load(state)
            for part, scores in zip(sizes.parts, products, strict=True):
                is_visible = jnp.concatenate([walk.visible_rows(step, i) for i in part])
                scores = jnp.where(is_visible, scores * (sizes.scale * LOG2_E), MASKED_SCORE)
                softmax, weights, decay = softmax.add(scores, of_part(walk.value_buffer, part))
                if with_free_mass:
                    free[...] *= decay
                    for i, of_block in zip(part, jnp.split(weights, len(part)), strict=True):
                        free[...] += fold_rows(jnp.add, of_block) * walk.is_free(step, i)
            softmax.store(state)

        walk.run(compute)
        softmax = OnlineSoftmax.load(state)
        output[0] = softmax.output().astype(output.dtype)
        for target, row in zip(row_outputs, (softmax.log_sums(), free[...] * softmax.inverse_total()), strict=False):
            target[0] = row

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
            *block_walk.scratch(sizes, keys, values), *OnlineSoftmax.scratch(rows, value_size),
            pltpu.VMEM((1, rows), jnp.float32), pltpu.VMEM((size, rows), queries.dtype),
        ],
        name="selected_attention",
    )  # fmt: skip
    output, log_sums, *free_mass = run(first_positions, *block_walk.arguments(tables, keys, values), queries)
    return output, log_sums, free_mass[0] if free_mass else None
