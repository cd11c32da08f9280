"""The stages of the kernels of Native Sparse Attention on one device. Pure.

Symbols of a device: N tiles of 128 rows, which are T queries with R heads of a group each; u blocks of l' tokens in the
union of a tile; S tokens and C compressed keys of a sequence; M tiles of 512 rows and K chunks of 512 keys of the
compressed branch; W pairs of a tile and a block of keys in windows; Dk and Dv channels of a key and a value, D of both.

| kernel | steps | other cycles for each of | bytes through HBM |
|---|---|---|---|
| selected, forward | N ceil(u l' / 1024), of 128 rows and 1024 keys | N | steps * 1024 D b |
| selected, gradients | N r ceil(u l' / 512 r), of 128 rows and 512 keys | N r | N r T R (D b + 2 Dk q) |
| compressed: output, importance | M (K + 1) / 2, of 512 rows and 512 keys | M, M K | - |
| compressed, gradients | N (ceil(C / 512) + 1) / 2, of 128 rows and 512 keys | N r | N r T R (D b + 2 Dk q) |
| window, forward and dq | W, of 512 rows and 128 keys | W | - |
| window, dk and dv | W, of 512 rows and 128 keys | W / tiles of a step | - |

The kernel of gradients keeps keys, values and their float32 gradients in VMEM: the S or C keys are divided into r
ranges of as many as fit. Tiles are read again for each range, with dq in elements of q bytes: b, and 4 where r > 1. The
blocks of a tile are taken to be spread evenly over ranges. Gradients have 5 products: 3 with Dk, and 2 with Dv.

Cycles = steps * `Cycles.step` + others * `Cycles.other`, and those of output and importance M * `Cycles.tile` beside; a
step of other sizes takes cycles in the ratio of its rows and keys. Bytes are copied at `HBM_EFFICIENCY` of the
bandwidth.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.sharding import CompilerQuirks
from shardplan.cost.sparse.stage import Stage, StageName
from shardplan.cost.sparse.work import BlockSizes, SelectedWork, SparseWork
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.attention_gradients import key_ranges
from shardplan.decoder.parts.attention.sparse.kernels.compressed_tiles import CompressedTiles
from shardplan.decoder.parts.attention.sparse.kernels.launch import LANES
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles
from shardplan.decoder.parts.attention.sparse.kernels.refusal import kernel_refusal
from shardplan.decoder.parts.attention.sparse.kernels.window.tiles import BLOCK, WindowTiles
from shardplan.positions.sequence_order import SequenceOrder


class Cycles(NamedTuple):
    """Cycles of one core in a kernel, by the compiler's schedule for v5p (instruction bundles, without waiting)."""

    step: float
    """Cycles of a step, whose size the module's docstring gives."""
    other: float
    """Additional cycles per tile, key range of a tile, chunk of a tile, or grid step, whichever the kernel counts."""
    tile: float = 0.0
    """Additional cycles per tile, if `other` counts chunks of tiles."""


SELECTED, SELECTED_GRADIENTS = Cycles(688, 407), Cycles(712, 360)
COMPRESSED, IMPORTANCE = Cycles(1218, 130, 300), Cycles(760, 110, 515)
COMPRESSED_GRADIENTS = Cycles(674, 204)
WINDOW, WINDOW_DQ, WINDOW_DKV = Cycles(364, 55), Cycles(419, 103), Cycles(473, 290)
TILE_ROWS, SELECTED_KEYS, GRADIENT_KEYS = 128, 1024, 512
"""Size of one step: TILE_ROWS rows, with SELECTED_KEYS keys in the selected branch and GRADIENT_KEYS in gradients."""
DENSE_ROWS, COMPRESSED_KEYS = 512, 512
"""Size of one forward step: DENSE_ROWS rows in the window and compressed branch, COMPRESSED_KEYS keys in the latter."""
GRADIENT_PRODUCTS = 3, 2
"""Number of gradient matmuls with the channels of keys (scores, dq, dk) and with those of values (weights, dv)."""
INT32_BYTES = 4
TABLE_PASSES = 130
"""Number of passes over the tables of tiles while these are made, sorts excluded, by the compiler's cycles for v5p at
8K tokens (docs/benchmarks/sparse_attention.md)."""
HBM_EFFICIENCY = 0.8
"""Fraction of the peak HBM bandwidth that copies by kernels reach; an assumption."""
NEW_BLOCKS = 0.07
"""Part of its blocks that a query does not share with the query before it, an assumption: in another model neighbours
share 87 to 94 % (https://github.com/vllm-project/vllm/issues/55394), and 7 % give a tile of 8 queries that select 16
blocks a union of 24. Unrelated queries give 104 to 107."""


def kernel_obstacle(config: NativeSparseConfig, quirks: CompilerQuirks) -> str | None:
    """Return the reason why kernels cannot compute a layer; None if they can."""
    return "they are for TPUs" if quirks.plain_attention else kernel_refusal("selection_block", config.selection_block)


def mean_union(config: BlockSizes, queries: int, length: int) -> float:
    """Estimate how many different blocks a tile of `queries` neighbouring queries selects, from an assumed overlap.

    `NEW_BLOCKS` is the assumed fraction of a query's blocks that the query before it does not select.

    >>> paper = NativeSparseConfig(2560, 4, 16, 192, 128, 32, 16, 64, 16, 512)
    >>> [round(mean_union(paper, 8, length), 1) for length in (2048, 65536)]
    [15.3, 23.6]
    """
    blocks = config.selection_blocks(length)
    limit = min(blocks, config.selected * (1 + NEW_BLOCKS * (queries - 1)))
    # the mean over own blocks of the smaller of the limit and the number of blocks up to the own one
    return limit - limit * (limit - 1) / (2 * blocks)


def kernel_stages(work: SparseWork, is_gradient: bool, selects: bool) -> Iterator[Stage]:
    """Yield the stages of all kernels of a call, or of its gradient.

    Args:
        selects: whether a call chooses blocks, by their importance.
    """
    stages = compressed_stages(work, is_gradient)
    yield from (stage for stage in stages if selects or stage.name is not StageName.IMPORTANCE)
    yield from selected_kernel_stages(work, is_gradient)
    yield from window_stages(work, is_gradient)


def selected_kernel_stages(work: SelectedWork, is_gradient: bool) -> Iterator[Stage]:
    """Yield the stages of the selected branch, or of its gradient: the tables of tiles, and the kernel."""
    union = mean_union(work.config, selected_tiles(work).queries, work.parts.length)
    yield Stage(StageName.TABLES, 0.0, TABLE_PASSES * _table_bytes(work))
    yield from selected_stages(work, union, is_gradient)


def selected_tiles(work: SelectedWork) -> QueryTiles:
    """Return the tiles of the selected branch, and of the gradients of the compressed branch."""
    return QueryTiles.of(work.config.selection_block, round(work.positions), work.config.heads_per_group)


def selected_stages(work: SelectedWork, union: float, is_gradient: bool) -> Iterator[Stage]:
    """Yield the kernel of the selected branch, or of its gradients.

    Args:
        union: mean blocks of a tile.
    """
    config, tiles = work.config, selected_tiles(work)
    number, keys = work.heads * tiles.per_sequence, union * config.selection_block
    scores, rows = number * keys * tiles.rows, tiles.rows / TILE_ROWS
    if is_gradient:
        ranges = selected_ranges(work)
        steps = number * ranges * math.ceil(keys / (GRADIENT_KEYS * ranges)) * rows
        yield _gradient_stage(StageName.SELECTED, work, SELECTED_GRADIENTS, scores, steps, ranges)
        return
    steps = number * math.ceil(keys / SELECTED_KEYS)
    copied = steps * SELECTED_KEYS * work.channels * work.itemsize / HBM_EFFICIENCY
    flops, cycles = 2 * scores * work.channels, _cycles(SELECTED, steps * rows, number)
    yield Stage(StageName.SELECTED, flops, copied, cycles)


def selected_ranges(work: SelectedWork) -> int:
    """Return the number of ranges into which the kernel for gradients of the selected branch divides the keys."""
    block = work.config.selection_block
    return key_ranges(work.core_memory, work.parts.length, block, work.channels, work.itemsize)


def compressed_stages(work: SparseWork, is_gradient: bool) -> Iterator[Stage]:
    """Yield the kernels of the compressed branch: output and importance, or gradients."""
    config = work.config
    sizes = CompressedTiles.of(config, round(work.positions), config.selection_blocks(work.parts.length))
    if is_gradient:
        tiles, keys = selected_tiles(work), sizes.chunks * sizes.chunk
        steps = work.heads * tiles.per_sequence * _visible_chunks(work, math.ceil(keys / GRADIENT_KEYS))
        scores = steps * tiles.rows * GRADIENT_KEYS
        ranges = key_ranges(work.core_memory, keys, LANES, work.channels, work.itemsize)
        steps_of_rows = steps * tiles.rows / TILE_ROWS
        yield _gradient_stage(StageName.COMPRESSED, work, COMPRESSED_GRADIENTS, scores, steps_of_rows, ranges)
        return
    number = work.heads * sizes.tiles.per_sequence
    scores = number * _visible_chunks(work, sizes.chunks) * sizes.tiles.rows * sizes.chunk
    steps = scores / (DENSE_ROWS * COMPRESSED_KEYS)
    kernels = (
        (StageName.COMPRESSED, COMPRESSED, work.channels),
        (StageName.IMPORTANCE, IMPORTANCE, config.key_size),
    )
    for name, cycles, factor in kernels:
        in_all = _cycles(cycles, steps, number * sizes.chunks) + cycles.tile * number
        yield Stage(name, 2 * scores * factor, 0.0, in_all)


def _visible_chunks(work: SparseWork, chunks: int) -> float:
    """Return the mean number of chunks of compressed keys that a tile sees, on the device with the highest mean."""
    # in contiguous order the last device sees the most chunks
    devices = work.parts.devices if work.parts.order is SequenceOrder.CONTIGUOUS else 1
    return chunks * (1 - 1 / (2 * devices)) + 0.5


def _gradient_stage(
    name: StageName, work: SelectedWork, cycles: Cycles, scores: float, steps: float, ranges: int
) -> Stage:
    """Return the stage of a kernel that computes gradients.

    Args:
        scores: number of scores that the kernel computes.
        steps: number of steps, each of `TILE_ROWS` rows.
        ranges: number of ranges of keys; for each, the kernel reads every tile, and reads and writes dq.
    """
    config, tiles = work.config, selected_tiles(work)
    number = work.heads * tiles.per_sequence * ranges
    of_keys, of_values = GRADIENT_PRODUCTS
    row_bytes = work.channels * work.itemsize + 2 * config.key_size * _carry_itemsize(work, ranges)
    return Stage(
        name,
        2 * scores * (of_keys * config.key_size + of_values * config.value_size),
        number * tiles.rows * row_bytes / HBM_EFFICIENCY,
        _cycles(cycles, steps, number),
    )


def _carry_itemsize(work: SelectedWork, ranges: int) -> int:
    """Return the bytes per element of the accumulated dq: float32 if several ranges are summed."""
    return work.itemsize if ranges == 1 else FLOAT32_BYTES


def window_stages(work: SparseWork, is_gradient: bool) -> Iterator[Stage]:
    """Yield the kernels of the window branch: the forward pass, or dq and then dk and dv."""
    config, channels = work.config, work.channels
    sizes = WindowTiles.of(config, work.parts.part_length)
    heads = work.heads * work.parts.parts_per_device
    pairs = heads * sizes.tiles.per_sequence * sizes.steps * sizes.blocks_per_step
    rows = sizes.tiles.rows / DENSE_ROWS

    def stage(cycles: Cycles, pairs: float, others: float, factor: int) -> Stage:
        scores = pairs * sizes.tiles.rows * BLOCK
        return Stage(StageName.WINDOW, 2 * scores * factor, 0.0, _cycles(cycles, pairs * rows, others))

    if not is_gradient:
        yield stage(WINDOW, pairs, pairs, channels)
        return
    yield stage(WINDOW_DQ, pairs, pairs, channels + config.key_size)
    of_keys = heads * sizes.key_blocks * sizes.blocks * sizes.tiles_per_block
    yield stage(WINDOW_DKV, of_keys, of_keys / sizes.tiles_per_step, 2 * channels)


def kernel_bytes(work: SparseWork, is_gradient: bool) -> float:
    """Return the bytes that the kernels of all branches need, beyond float32 keys and values, outputs and importance.

    Every kernel has its log-sum-exp, and a copy of keys and values in the dtype of queries. The kernel of the selected
    branch has more: see `selected_kernel_bytes`.
    """
    keys = work.heads * (work.positions + work.compressed_blocks)
    others = 2 * _log_sum_bytes(work, is_gradient) + keys * work.channels * work.itemsize
    return selected_kernel_bytes(work, is_gradient) + others


def selected_kernel_bytes(work: SelectedWork, is_gradient: bool) -> float:
    """Return the bytes that the kernel of the selected branch needs, beyond float32 keys and values, and outputs.

    These are the tables of tiles, as long as the largest possible union; the log-sum-exp, and for gradients delta; a
    copy of keys and values in the dtype of queries; and dq in float32, if several ranges of keys are summed.
    """
    rows, carry = work.rows * work.config.heads_per_group, 0.0
    if is_gradient and selected_ranges(work) > 1:
        carry = FLOAT32_BYTES * rows * work.config.key_size
    keys = work.heads * work.parts.length * work.channels * work.itemsize
    return _table_bytes(work) + _log_sum_bytes(work, is_gradient) + carry + keys


def _log_sum_bytes(work: SelectedWork, is_gradient: bool) -> float:
    """Return the bytes of the log-sum-exp of a branch, and for gradients of delta, the second sum per row."""
    return (2 if is_gradient else 1) * FLOAT32_BYTES * work.rows * work.config.heads_per_group


def _table_bytes(work: SelectedWork) -> float:
    """Return the bytes of the tables of tiles: an index and member bits per block of the largest possible union."""
    tiles = selected_tiles(work)
    union = min(work.config.selection_blocks(work.parts.length), tiles.queries * work.config.selected)
    return 2 * INT32_BYTES * work.heads * tiles.per_sequence * union


def _cycles(cycles: Cycles, steps: float, others: float) -> float:
    return cycles.step * steps + cycles.other * others
