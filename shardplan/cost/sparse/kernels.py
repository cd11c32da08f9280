"""The stages of the kernels of Native Sparse Attention on one device. Pure.

Symbols of a device: N tiles of selected branches, with T queries and R heads of a group, u blocks of l' tokens in the
union of a tile; M tiles and K chunks of the compressed branch, of which a tile sees (K + 1) / 2; W pairs of a tile and
a block of keys in windows; G heads of keys, J selection blocks, D channels of a key and a value.

| kernel | steps | other cycles for each of | bytes through HBM |
|---|---|---|---|
| selected, forward and dq | N ceil(u l' / 512), of 128 rows and 512 keys | N | N u l' D b |
| selected, dk and dv | N u / 4, of 4 tiles of 128 rows, and 64 keys | G J | N u T R (D b + 8) |
| compressed: output, importance, dq, dk and dv | M (K + 1) / 2, of 512 rows and 512 keys | M K | - |
| window, forward and dq | W, of 512 rows and 128 keys | W | - |
| window, dk and dv | W, of 512 rows and 128 keys | W / tiles of a step | - |

Cycles = steps * `Cycles.step` + others * `Cycles.other`; a step of other sizes takes cycles in the ratio of its rows
and keys. Bytes are copied at `HBM_EFFICIENCY` of the bandwidth.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.sharding import CompilerQuirks
from shardplan.cost.sparse.stage import Stage
from shardplan.cost.sparse.work import SparseWork
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.compressed_tiles import CompressedTiles
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.kernels.refusal import kernel_refusal
from shardplan.decoder.parts.attention.sparse.kernels.window.tiles import BLOCK, WindowTiles
from shardplan.positions.sequence_order import SequenceOrder


class Cycles(NamedTuple):
    """Cycles of one core in a kernel, by the compiler's schedule for v5p (instruction bundles, without waiting)."""

    step: float
    """A step of the size that the docstring of the module gives."""
    other: float
    """What a tile, a block or a step that is left out takes beside."""


SELECTED, SELECTED_DQ, SELECTED_DKV = Cycles(724, 500), Cycles(599, 306), Cycles(547, 3700)
"""A block of dk and dv waits 2 us for the first copies."""
COMPRESSED, IMPORTANCE = Cycles(1902, 250), Cycles(1258, 120)
COMPRESSED_DQ, COMPRESSED_DKV = Cycles(1568, 160), Cycles(2250, 200)
WINDOW, WINDOW_DQ, WINDOW_DKV = Cycles(364, 55), Cycles(419, 103), Cycles(473, 290)
SELECTED_ROWS, SELECTED_KEYS = 128, 512
"""Rows and keys of a step of the selected branch; a step of dk and dv has 4 tiles and 64 keys."""
TILES_PER_STEP, KEYS_PER_TILE_STEP = 4, 64
DENSE_ROWS, COMPRESSED_KEYS = 512, 512
"""Rows of a step of the compressed and the window branch, and keys of the former."""
INT32_BYTES = 4
TABLE_PASSES, LIST_PASSES = 130, 400
"""Passes over the tables of tiles, and over the tiles of each block for dk and dv, that make them: by the compiler's
cycles for v5p at 8K tokens, which leave out sorts (docs/benchmarks/sparse_attention.md)."""
HBM_EFFICIENCY = 0.8
"""Part of the peak HBM bandwidth of copies by kernels: an assumption."""
NEW_BLOCKS = 0.07
"""Part of its blocks that a query does not share with the query before it, an assumption: in another model neighbours
share 87 to 94 % (https://github.com/vllm-project/vllm/issues/55394), and 7 % give a tile of 8 queries that select 16
blocks a union of 24. Unrelated queries give 104 to 107."""


def kernel_obstacle(config: NativeSparseConfig, quirks: CompilerQuirks) -> str | None:
    """Return why kernels cannot compute a layer; None if they can."""
    return "they are for TPUs" if quirks.plain_attention else kernel_refusal("selection_block", config.selection_block)


def mean_union(config: NativeSparseConfig, queries: int, length: int) -> float:
    """Return the mean number of blocks in the union of a tile of `queries` neighbours, an assumption (`NEW_BLOCKS`).

    >>> paper = NativeSparseConfig(2560, 4, 16, 192, 128, 32, 16, 64, 16, 512)
    >>> [round(mean_union(paper, 8, length), 1) for length in (2048, 65536)]
    [15.3, 23.6]
    """
    blocks = config.selection_blocks(length)
    limit = min(blocks, config.selected * (1 + NEW_BLOCKS * (queries - 1)))
    # the mean over own blocks of the smaller of the limit and the number of blocks up to the own one
    return limit - limit * (limit - 1) / (2 * blocks)


def kernel_stages(work: SparseWork, is_gradient: bool) -> Iterator[Stage]:
    """Yield the stages of all kernels of a call, or of its gradient."""
    union = mean_union(work.config, selected_tiles(work).queries, work.parts.length)
    passes = TABLE_PASSES + (LIST_PASSES if is_gradient else 0)
    yield Stage(0.0, passes * _table_bytes(work))
    yield from compressed_stages(work, is_gradient)
    yield from selected_stages(work, union, is_gradient)
    yield from window_stages(work, is_gradient)


def selected_tiles(work: SparseWork) -> QueryTiles:
    """Return the tiles of the selected branch."""
    return QueryTiles.of(work.config.selection_block, round(work.positions), work.config.heads_per_group)


def selected_stages(work: SparseWork, union: float, is_gradient: bool) -> Iterator[Stage]:
    """Yield the kernels of the selected branch: the forward pass, or dq and then dk and dv.

    Args:
        union: mean blocks of a tile.
    """
    config, tiles, channels = work.config, selected_tiles(work), work.channels
    number = work.heads * tiles.per_sequence
    scores = number * union * config.selection_block * tiles.rows
    copied = number * union * config.selection_block * channels * work.itemsize / HBM_EFFICIENCY
    steps = number * math.ceil(union * config.selection_block / SELECTED_KEYS) * tiles.rows / SELECTED_ROWS
    if not is_gradient:
        yield Stage(2 * scores * channels, copied, _cycles(SELECTED, steps, number))
        return
    yield Stage(2 * scores * (channels + config.key_size), copied, _cycles(SELECTED_DQ, steps, number))
    copied = number * union * tiles.rows * (channels * work.itemsize + 2 * FLOAT32_BYTES) / HBM_EFFICIENCY
    steps = scores / (TILES_PER_STEP * SELECTED_ROWS * KEYS_PER_TILE_STEP)
    blocks = work.heads * config.selection_blocks(work.parts.length)
    yield Stage(4 * scores * channels, copied, _cycles(SELECTED_DKV, steps, blocks))


def compressed_stages(work: SparseWork, is_gradient: bool) -> Iterator[Stage]:
    """Yield the kernels of the compressed branch: output and importance, or dq and then dk and dv."""
    config, channels = work.config, work.channels
    sizes = CompressedTiles.of(config, round(work.positions), config.selection_blocks(work.parts.length))
    tiles = work.heads * sizes.tiles.per_sequence
    # in contiguous order the last device sees the most chunks
    devices = work.parts.devices if work.parts.order is SequenceOrder.CONTIGUOUS else 1
    visible = tiles * (sizes.chunks * (1 - 1 / (2 * devices)) + 0.5)
    scores = visible * sizes.tiles.rows * sizes.chunk
    steps = scores / (DENSE_ROWS * COMPRESSED_KEYS)

    def stage(cycles: Cycles, factor: int) -> Stage:
        return Stage(2 * scores * factor, 0.0, _cycles(cycles, steps, tiles * sizes.chunks))

    if is_gradient:
        yield stage(COMPRESSED_DQ, channels + config.key_size)
        yield stage(COMPRESSED_DKV, 2 * channels)
    else:
        yield stage(COMPRESSED, channels)
        yield stage(IMPORTANCE, config.key_size)


def window_stages(work: SparseWork, is_gradient: bool) -> Iterator[Stage]:
    """Yield the kernels of the window branch: the forward pass, or dq and then dk and dv."""
    config, channels = work.config, work.channels
    sizes = WindowTiles.of(config, work.parts.part_length)
    heads = work.heads * work.parts.parts_per_device
    pairs = heads * sizes.tiles.per_sequence * sizes.steps * sizes.blocks_per_step
    rows = sizes.tiles.rows / DENSE_ROWS

    def stage(cycles: Cycles, pairs: float, others: float, factor: int) -> Stage:
        scores = pairs * sizes.tiles.rows * BLOCK
        return Stage(2 * scores * factor, 0.0, _cycles(cycles, pairs * rows, others))

    if not is_gradient:
        yield stage(WINDOW, pairs, pairs, channels)
        return
    yield stage(WINDOW_DQ, pairs, pairs, channels + config.key_size)
    of_keys = heads * sizes.key_blocks * sizes.blocks * sizes.tiles_per_block
    yield stage(WINDOW_DKV, of_keys, of_keys / sizes.tiles_per_step, 2 * channels)


def kernel_bytes(work: SparseWork, is_gradient: bool) -> float:
    """Bytes that kernels need beside keys, outputs and importance; gradients of keys are among the keys' own.

    These are the tables of tiles, as long as the largest possible union, and for gradients the tiles of each block;
    log-sum-exp of three branches, and for gradients sums beside it; and keys and values in the type of queries.
    """
    tables = _table_bytes(work)
    log_sums = 3 * FLOAT32_BYTES * work.rows * work.config.heads_per_group
    if is_gradient:
        tables, log_sums = 2 * tables, 2 * log_sums
    keys = work.heads * (work.parts.length + work.positions + work.compressed_blocks)
    return tables + log_sums + keys * work.channels * work.itemsize


def _table_bytes(work: SparseWork) -> float:
    """Bytes of the tables of tiles: a number and member bits for each block of the largest possible union."""
    tiles = selected_tiles(work)
    union = min(work.config.selection_blocks(work.parts.length), tiles.queries * work.config.selected)
    return 2 * INT32_BYTES * work.heads * tiles.per_sequence * union


def _cycles(cycles: Cycles, steps: float, others: float) -> float:
    return cycles.step * steps + cycles.other * others
