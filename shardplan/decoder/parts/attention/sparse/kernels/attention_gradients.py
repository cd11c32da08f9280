"""The backward kernel of the compressed and selected branches, which recomputes weights from scores and log-sum-exp:

    p = exp(scale * k q - log-sum-exp), dv = sum of p do,
    ds = p (v do - delta), dq = scale * sum of ds k, dk = scale * sum of ds q,

where delta is the sum over channels of output * do. Keys, values and their gradients stay in VMEM, where each tile of
queries reads and adds to the blocks of its table; the compressed branch has no tables, because its tiles attend to all
blocks up to the last that they see. Of a long sequence keys and values are too large for that: then one range of it is
computed after the other, and each adds to dq what its blocks contribute. The tiles of a head are computed in order by
one core, or each half of them by one core, so that sums have the same order in every run.

As in the forward kernel, scores are transposed, [key, row], and a step has parts.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.block_tables import BlockTables
from shardplan.decoder.parts.attention.sparse.kernels.block_walk import CORES, WalkSizes
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LOG2_E,
    MASKED_SCORE,
    divide,
    indices,
    launch,
    multiply,
    quotient,
    remainder,
    transpose,
    transpose_multiply,
    vmem_bytes,
)

KEYS_PER_STEP = 512
"""Maximum number of keys per step: steps of 768 take 6 % less time per key, but a range seldom has enough blocks."""
RESIDENT_SHARE = 0.75
"""Fraction of VMEM for keys, values and their gradients; the rest holds tiles of queries and scores."""


def key_ranges(vmem: int, length: int, block: int, channels: int, itemsize: int) -> int:
    """Return the number of key ranges such that one range's keys, values and float32 gradients fit in VMEM.

    >>> key_ranges(64 * 2**20, 65536, 64, 256, 2)
    2

    Args:
        vmem: bytes of VMEM of a core.
        length: keys of a sequence.
        block: keys of a block; a range consists of complete blocks.
        channels: channels of a key and a value.
        itemsize: bytes of an element of keys and values.
    """
    block_bytes = block * channels * (itemsize + 4)
    most_keys = max(1, int(RESIDENT_SHARE * vmem) // block_bytes) * block
    return -(-length // most_keys)


def attention_gradients(
    sizes: WalkSizes,
    first_positions: jax.Array,
    tables: BlockTables | None,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Compute the gradients dq [tile, row, d] of queries, and dk and dv float32[b * g, s, d] of keys and values.

    Args:
        first_positions: int32[tiles of a sequence].
        tables: the blocks of each tile; None for all blocks.
        queries: [tile, row, d].
        keys: [b * g, s, d], of complete blocks; values have the same layout.
        gradients: [tile, row, d], gradients of the output.
        row_sums: float32[tile, 2, row], the log-sum-exp of scores and delta.
    """
    heads, length, size = keys.shape
    # the cores of a chip divide the heads, or the tiles of each head
    parts = heads if heads % CORES == 0 else heads * CORES
    ranges = key_ranges(vmem_bytes(), length, sizes.block, size + values.shape[-1], keys.dtype.itemsize)
    range_blocks = -(-length // (ranges * sizes.block))
    padding = ranges * range_blocks * sizes.block - length
    keys, values = (jnp.pad(x, [(0, 0), (0, padding), (0, 0)]) for x in (keys, values))

    def add_range(dq: jax.Array, number: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        arrays = queries, keys, values, gradients, row_sums, dq
        dq, dk, dv = _add_gradients(sizes, parts, range_blocks, first_positions, number[None], tables, *arrays)
        return dq, (dk, dv)

    # a sum of several ranges is rounded once
    zeros = jnp.zeros(queries.shape, queries.dtype if ranges == 1 else jnp.float32)
    dq, of_ranges = jax.lax.scan(add_range, zeros, jnp.arange(ranges, dtype=jnp.int32))

    def join(x: jax.Array) -> jax.Array:
        """Concatenate key ranges, and add the parts of a head: [range, part, token, d] -> [b * g, s, d]."""
        by_head = x.reshape(ranges, heads, parts // heads, *x.shape[2:]).sum(axis=2).swapaxes(0, 1)
        return by_head.reshape(heads, -1, x.shape[-1])[:, :length]

    dk, dv = (join(x) for x in of_ranges)
    return dq.astype(queries.dtype), dk * sizes.scale, dv


def _add_gradients(
    sizes: WalkSizes,
    parts: int,
    range_blocks: int,
    first_positions: jax.Array,
    range_number: jax.Array,
    tables: BlockTables | None,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    gradients: jax.Array,
    row_sums: jax.Array,
    before: jax.Array,
) -> list[jax.Array]:
    """Add the gradients from one range of keys to dq; return dq, and the range's dk / scale and dv, [part, token, d].

    Args:
        parts: number of parts of the tiles; cores compute parts at the same time.
        range_blocks: blocks of a range.
        range_number: int32[1].
        before: dq from earlier ranges, which the result replaces in memory.
    """
    tiles, block, unit = sizes.tiles, sizes.block, sizes.unit
    per_part, length = len(queries) // parts, range_blocks * block
    rows, size, value_size = tiles.rows, keys.shape[-1], values.shape[-1]

    def kernel(first, number, *refs) -> None:  # type: ignore[no-untyped-def]
        blocks, members = refs[:2] if tables else (None, None)
        k, v, q, do, sums, dq_before, dq, dk, dv = refs[-17:-8]
        range_k, range_v, range_dk, range_dv, tile_dq, transposed_q, transposed_do, copied = refs[-8:]
        part, i = pl.program_id(0), pl.program_id(1)
        tile, first_block = part * per_part + i, number[0] * range_blocks
        head = quotient(tile, tiles.per_sequence)

        @pl.when(i == 0)
        def start_range() -> None:
            tokens = pl.ds(pl.multiple_of(first_block * block, block), length)
            _copy_both((k.at[head, tokens], v.at[head, tokens]), (range_k, range_v), copied)

            def clear_block(number: jax.Array, _: jax.Array) -> jax.Array:
                of_block = pl.ds(pl.multiple_of(number * block, block), block)
                range_dk[of_block], range_dv[of_block] = jnp.zeros((block, size)), jnp.zeros((block, value_size))
                return jnp.int32(0)

            jax.lax.fori_loop(0, range_blocks, clear_block, jnp.int32(0))

        query_of_row = divide(indices((1, rows), 1), tiles.heads)
        # less the lag of keys, so that keys up to position / stride are visible
        first_position = first[remainder(tile, tiles.per_sequence)] - sizes.lag
        block_tokens = block * sizes.stride

        def entries_before(bound: jax.Array) -> jax.Array:
            """Count the entries of the tile's table that precede a block, by binary search."""
            if tables is None:
                last_position = first_position + (tiles.queries - 1)
                return jnp.minimum(bound, quotient(jnp.maximum(last_position + block_tokens, 0), block_tokens))
            size = members.shape[-1]
            count, distance = jnp.int32(0), 1 << (size.bit_length() - 1)
            while distance:
                probe = jnp.minimum(count + distance, size) - 1
                is_before = (members[0, 0, probe] != 0) & (blocks[0, 0, probe] < bound)
                count = jnp.where(is_before & (count + distance <= size), count + distance, count)
                distance //= 2
            return count

        begin, end = entries_before(first_block), entries_before(first_block + range_blocks)
        transposed_q[...], transposed_do[...] = transpose(q[0]), transpose(do[0])
        tile_dq[...] = jnp.zeros_like(tile_dq)
        log_sums, delta = sums[0, 0:1] * LOG2_E, sums[0, 1:2]

        def read_entry(entry: jax.Array) -> tuple[Any, jax.Array]:
            """Return the range's slice of tokens for a table entry, and bool[key, row]: whether a row sees a key."""
            is_entry = entry < end
            if tables is None:
                number, is_member = entry, is_entry
            else:
                index = jnp.minimum(entry, members.shape[-1] - 1)
                number = blocks[0, 0, index]
                is_member = (jnp.where(is_entry, members[0, 0, index], 0) & jnp.left_shift(1, query_of_row)) != 0
            limits = jnp.where(is_member, first_position + query_of_row - number * block_tokens, -1)
            # after the end block 0 of the range stands in, and is masked
            first_key = jnp.where(is_entry, number - first_block, 0) * block
            return pl.ds(pl.multiple_of(first_key, block), block), indices((block, 1), 0) * sizes.stride <= limits

        def take_step(step: jax.Array, _: jax.Array) -> jax.Array:
            tokens, masks = zip(*(read_entry(begin + step * unit + i) for i in range(unit)), strict=True)
            part_keys = [jnp.concatenate([range_k[tokens[i]] for i in part]) for part in sizes.parts]
            part_values = [jnp.concatenate([range_v[tokens[i]] for i in part]) for part in sizes.parts]
            products = [
                (multiply(x, transposed_q[...]), multiply(y, transposed_do[...]))
                for x, y in zip(part_keys, part_values, strict=True)
            ]
            for part, step_keys, (scores, of_weights) in zip(sizes.parts, part_keys, products, strict=True):
                is_visible = jnp.concatenate([masks[i] for i in part])
                exponents = jnp.where(is_visible, scores * (sizes.scale * LOG2_E) - log_sums, MASKED_SCORE)
                weights = jnp.exp2(exponents)
                of_scores = (weights * (of_weights - delta)).astype(q.dtype)
                part_dv, part_dk = multiply(weights.astype(do.dtype), do[0]), multiply(of_scores, q[0])
                for number, i in enumerate(part):
                    of_block = slice(number * block, (number + 1) * block)
                    range_dv[tokens[i]] += part_dv[of_block]
                    range_dk[tokens[i]] += part_dk[of_block]
                tile_dq[...] += transpose_multiply(of_scores, step_keys)
            return jnp.int32(0)

        jax.lax.fori_loop(0, quotient(end - begin + unit - 1, unit), take_step, jnp.int32(0))
        dq[0] = (dq_before[0] + tile_dq[...] * sizes.scale).astype(dq.dtype)

        @pl.when(i == per_part - 1)
        def end_range() -> None:
            _copy_both((range_dk, range_dv), (dk.at[part], dv.at[part]), copied)

    def of_tile(*shape: int, memory_space: Any = pltpu.VMEM) -> pl.BlockSpec:
        return pl.BlockSpec((1, *shape), lambda part, i, _: (part * per_part + i, 0, 0), memory_space=memory_space)

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    of_tables = [of_tile(1, x.shape[-1], memory_space=pltpu.SMEM) for x in tables or ()]
    of_queries, of_gradients = of_tile(rows, size), of_tile(rows, value_size)
    of_range = [((length, size), keys.dtype), ((length, value_size), values.dtype)]
    of_range += [(shape, jnp.float32) for shape, _ in of_range]
    of_rows = [((rows, size), jnp.float32), ((size, rows), queries.dtype), ((value_size, rows), gradients.dtype)]
    run = launch(
        kernel,
        grid=(parts, per_part),
        semantics=("parallel", "arbitrary"),
        in_specs=[
            pl.BlockSpec(memory_space=pltpu.SMEM), *of_tables, in_hbm, in_hbm, of_queries, of_gradients,
            of_tile(2, rows), of_queries,
        ],
        out_specs=[of_queries, in_hbm, in_hbm],
        out_shapes=[
            jax.ShapeDtypeStruct(before.shape, before.dtype),
            jax.ShapeDtypeStruct((parts, length, size), jnp.float32),
            jax.ShapeDtypeStruct((parts, length, value_size), jnp.float32),
        ],
        scratch=[*(pltpu.VMEM(*each) for each in (*of_range, *of_rows)), pltpu.SemaphoreType.DMA((2,))],
        aliases={len(of_tables) + 7: 0},
        vmem_limit=vmem_bytes(),
        name="compressed_attention_gradients" if tables is None else "selected_attention_gradients",
    )  # fmt: skip
    return run(first_positions, range_number, *(tables or ()), keys, values, queries, gradients, row_sums, before)


def _copy_both(sources: tuple[Any, Any], targets: tuple[Any, Any], copied: Any) -> None:
    """Copy two arrays between HBM and VMEM at the same time, and wait for both."""
    copies = [
        pltpu.make_async_copy(source, target, copied.at[number])
        for number, (source, target) in enumerate(zip(sources, targets, strict=True))
    ]
    for each in copies:
        each.start()
    for each in copies:
        each.wait()
