"""The backward kernels of the selected branch. Weights are computed again from scores and their log-sum-exp.

| kernel | walks | computes |
|---|---|---|
| gradient of queries | the tables of the forward kernel | dq = scale * sum over keys of ds k |
| gradients of keys and values | the tiles that attend to a block | dk = scale * sum of ds q, dv = sum of p do |

with ds = p (do v - delta), where delta is the sum over channels of output * do. A block's list is walked from first to
last by one core, so that sums have the same order in every run.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels import block_walk
from shardplan.decoder.parts.attention.sparse.kernels.block_tables import TILES_PER_CHUNK, BlockTables, TileLists
from shardplan.decoder.parts.attention.sparse.kernels.block_walk import BlockWalk, TileStep, WalkSizes
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    MASKED_SCORE,
    divide,
    indices,
    launch,
    multiply,
    multiply_transposed,
    quotient,
    remainder,
    row_to_column,
)

ROWS_PER_STEP = 512
"""Most rows of queries of a step of the kernel of dk and dv."""
TILES_PER_STEP = 4
"""Most tiles of a step; their instructions are unrolled."""


def query_gradients(
    sizes: WalkSizes,
    first_positions: jax.Array,
    tables: BlockTables,
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
        keys: [b * g, s, d], of complete blocks; values are alike.
        gradients: [tile, row, d], of the output.
        row_sums: float32[tile, 2, row], the log-sum-exp of scores and delta.
    """
    count, rows, size = queries.shape

    def kernel(first, blocks, next_blocks, members, k, v, q, do, sums, dq, *scratch) -> None:  # type: ignore[no-untyped-def]
        *buffers, accumulated, log_sums, delta = scratch
        walk = BlockWalk(sizes, TileStep.current(), first, blocks, next_blocks, members, k, v, *buffers)
        accumulated[...] = jnp.zeros_like(accumulated)
        log_sums[...], delta[...] = row_to_column(sums[0, 0:1]), row_to_column(sums[0, 1:2])

        def compute(step: jax.Array, step_keys: jax.Array, step_values: jax.Array) -> None:
            scores = multiply_transposed(q[0], step_keys) * sizes.scale
            scores = jnp.where(walk.is_visible(step), scores, MASKED_SCORE)
            weights = jnp.exp(scores - log_sums[...])
            score_gradients = weights * (multiply_transposed(do[0], step_values) - delta[...])
            accumulated[...] += multiply(score_gradients.astype(step_keys.dtype), step_keys)

        walk.run(compute)
        dq[0] = (accumulated[...] * sizes.scale).astype(dq.dtype)

    column = pltpu.VMEM((rows, 1), jnp.float32)
    (result,) = launch(
        kernel,
        grid=block_walk.grid(tables),
        semantics=("parallel", "arbitrary"),
        in_specs=[
            *block_walk.in_specs(tables),
            block_walk.rows_spec(rows, size, count),
            block_walk.rows_spec(rows, values.shape[-1], count),
            block_walk.rows_spec(2, rows, count),
        ],
        out_specs=[block_walk.rows_spec(rows, size, count)],
        out_shapes=[jax.ShapeDtypeStruct(queries.shape, queries.dtype)],
        scratch=[
            *block_walk.scratch(sizes, keys, values), pltpu.VMEM((rows, size), jnp.float32), column, column,
        ],
        name="selected_attention_dq",
    )(first_positions, *block_walk.arguments(tables, keys, values), queries, gradients, row_sums)  # fmt: skip
    return result


def key_value_gradients(
    sizes: WalkSizes,
    first_positions: jax.Array,
    lists: TileLists,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return dk and dv, float32[b * g, s, d]; the arguments are those of `query_gradients`, with lists of tiles."""
    tiles, rows, block = sizes.tiles, sizes.tiles.rows, sizes.block
    heads, length, size = keys.shape
    value_size = values.shape[-1]
    unit = max(1, min(TILES_PER_STEP, ROWS_PER_STEP // rows))

    def kernel(first, starts, entries, k, v, q, do, sums, dk, dv, chunk, q_buffer, do_buffer, sums_buffer,  # type: ignore[no-untyped-def]
               loaded, copied) -> None:  # fmt: skip
        head, j = pl.program_id(0), pl.program_id(1)
        begin, end = starts[0, 0, j], starts[0, 0, j + 1]
        dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)
        query_of_row = divide(indices((1, rows), 1), tiles.heads)
        bits, tokens = jnp.left_shift(1, query_of_row), j * block + indices((block, 1), 0)

        copied_arrays = ((q, q_buffer), (do, do_buffer), (sums, sums_buffer))

        def start(entry: jax.Array, last: jax.Array, slot: jax.Array | int) -> None:
            for i in range(unit):
                # after the end the last tile is copied again, and masked
                tile = head * tiles.per_sequence + chunk[0, jnp.minimum(entry + i, last)]
                for number, (array, buffer) in enumerate(copied_arrays):
                    pltpu.make_async_copy(array.at[tile], buffer.at[slot, i], copied.at[slot, number]).start()

        def wait(slot: jax.Array) -> None:
            for number, (_, buffer) in enumerate(copied_arrays):
                # waits for as many bytes as the buffer has, which all copies of the step have together
                pltpu.make_async_copy(buffer.at[slot], buffer.at[slot], copied.at[slot, number]).wait()

        def walk_chunk(number: jax.Array, _: jax.Array) -> jax.Array:
            load = pltpu.make_async_copy(entries.at[head, number], chunk, loaded.at[0])
            load.start()
            load.wait()
            offset = number * TILES_PER_CHUNK
            from_entry = jnp.maximum(begin - offset, 0)
            last = jnp.minimum(end - offset, TILES_PER_CHUNK) - 1
            steps = quotient(last - from_entry + unit, unit)
            start(from_entry, last, 0)

            def take_step(step: jax.Array, _: jax.Array) -> jax.Array:
                slot, entry = remainder(step, 2), from_entry + step * unit

                @pl.when(step + 1 < steps)
                def start_next() -> None:
                    start(entry + unit, last, 1 - slot)

                wait(slot)
                for i in range(unit):
                    add_tile(slot, i, jnp.minimum(entry + i, last), entry + i <= last)
                return jnp.int32(0)

            jax.lax.fori_loop(0, steps, take_step, jnp.int32(0))
            return jnp.int32(0)

        def add_tile(slot: jax.Array, i: int, entry: jax.Array, is_entry: jax.Array) -> None:
            """Add what the rows of a tile contribute; scores are transposed, [key, row]."""
            members = jnp.where(is_entry, chunk[1, entry], 0)
            position = first[chunk[0, entry]] + query_of_row
            limit = jnp.where((members & bits) != 0, position, -1)
            q_rows, do_rows = q_buffer[slot, i], do_buffer[slot, i]
            scores = multiply_transposed(k[0], q_rows) * sizes.scale
            scores = jnp.where(tokens <= limit, scores, MASKED_SCORE)
            weights = jnp.exp(scores - sums_buffer[slot, i, 0:1])
            dv[0] += multiply(weights.astype(do_rows.dtype), do_rows)
            score_gradients = weights * (multiply_transposed(v[0], do_rows) - sums_buffer[slot, i, 1:2])
            dk[0] += multiply(score_gradients.astype(q_rows.dtype), q_rows) * sizes.scale

        @pl.when(begin < end)
        def walk_list() -> None:
            jax.lax.fori_loop(
                quotient(begin, TILES_PER_CHUNK), quotient(end - 1, TILES_PER_CHUNK) + 1, walk_chunk, jnp.int32(0)
            )

    def of_block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, block, width), lambda head, j, _: (head, j, 0))

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    starts_spec = pl.BlockSpec((1, 1, lists.starts.shape[-1]), lambda head, j, _: (head, 0, 0), memory_space=pltpu.SMEM)
    dk, dv = launch(
        kernel,
        grid=(heads, length // block),
        semantics=("parallel", "parallel"),
        in_specs=[starts_spec, in_hbm, of_block(size), of_block(value_size), in_hbm, in_hbm, in_hbm],
        out_specs=[of_block(size), of_block(value_size)],
        out_shapes=[
            jax.ShapeDtypeStruct((heads, length, size), jnp.float32),
            jax.ShapeDtypeStruct((heads, length, value_size), jnp.float32),
        ],
        scratch=[
            pltpu.SMEM((2, TILES_PER_CHUNK), jnp.int32),
            pltpu.VMEM((2, unit, rows, size), queries.dtype),
            pltpu.VMEM((2, unit, rows, value_size), gradients.dtype),
            pltpu.VMEM((2, unit, 2, rows), jnp.float32),
            pltpu.SemaphoreType.DMA((1,)),
            pltpu.SemaphoreType.DMA((2, 3)),
        ],
        name="selected_attention_dkv",
    )(first_positions, lists.starts, lists.entries, keys, values, queries, gradients, row_sums)
    return dk, dv
