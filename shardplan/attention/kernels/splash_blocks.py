"""The blocks of splash attention: which blocks of queries x keys are computed, and with which masks.

Derived with numpy from the positions of every query shard at every hop, so that one program has the blocks of all
devices. A mask made from one device's shard alone would start at its first query, and be wrong on every device but the
first.
"""

from dataclasses import dataclass

import numpy as np

from shardplan.cost.attention import KERNEL_LANES
from shardplan.errors import ConfigError
from shardplan.positions.pattern import PADDING, Pattern
from shardplan.positions.sequence_layout import KERNEL_BLOCK

MAX_PARTIAL_MASKS = 64
"""Limit of distinct masks of partial blocks: each is an array in device memory."""
EMPTY, PARTIAL, FULL = range(3)
"""Kinds of blocks, as `MaskInfo.block_mask` of the kernels encodes them."""


@dataclass(frozen=True, eq=False)
class HopPositions:
    """The query and key positions that meet at the hops of a ring."""

    queries: np.ndarray
    """Query positions of every shard, int[query shard, S]."""
    keys: np.ndarray
    """Key positions of every ring index, int[ring, T]."""
    distances: tuple[int, ...]
    """Distance of each hop, in ring indices back; see `shardplan.attention.strategies.ring.Ring`."""


@dataclass(frozen=True, eq=False)
class BlockGrids:
    """The grids of blocks of all query shards at all hops; equal grids and equal masks are stored once."""

    grid: np.ndarray
    """Index of the grid that each hop uses, int32[query shard, distance]."""
    kinds: np.ndarray
    """Kind of each block, EMPTY, PARTIAL or FULL, int8[grid, q block, k block]."""
    mask_next: np.ndarray
    """Index of a partial block's mask, and for other blocks the last index loaded, int[grid, q block, k block]."""
    keys_next: np.ndarray
    """Block of keys to load, and for an empty block the block loaded last, int[grid, q block, k block]."""
    queries_next: np.ndarray
    """Block of queries to load if the kernel's inner loop runs over queries, int[grid, q block, k block]."""
    partial_masks: np.ndarray
    """Masks of partial blocks, bool[mask, q position, k position]."""


def block_size(length: int) -> int:
    """Return the side of the kernels' blocks: the largest multiple of `KERNEL_LANES` that divides `length`.

    >>> block_size(4096), block_size(384)
    (512, 384)

    Args:
        length: positions of a ring index.

    Raises:
        ConfigError: no multiple of `KERNEL_LANES` divides the length.
    """
    for size in range(KERNEL_BLOCK, 0, -KERNEL_LANES):
        if length % size == 0:
            return size
    raise ConfigError(
        f"attention kernel splash: each ring index has {length} positions, which must be a multiple of {KERNEL_LANES}; "
        "use another length, another number of devices along it, or the kernel blockwise"
    )


def make_block_grids(pattern: Pattern, positions: HopPositions, q_block: int, k_block: int) -> BlockGrids:
    """Classify the blocks of every query shard at every hop.

    >>> positions = np.arange(8).reshape(2, 4)
    >>> grids = make_block_grids(Pattern(causal=True), HopPositions(positions, positions, distances=(0, 1)), 2, 2)
    >>> grids.kinds[grids.grid[1]].tolist() == [[[PARTIAL, EMPTY], [FULL, PARTIAL]], [[FULL, FULL], [FULL, FULL]]]
    True

    Args:
        q_block, k_block: positions of queries, and of keys, in a block.

    Raises:
        ConfigError: more than `MAX_PARTIAL_MASKS` distinct masks of partial blocks.
    """
    queries, keys, distances = positions.queries, positions.keys, positions.distances
    q_blocks = queries.reshape(len(queries), -1, q_block)
    k_blocks = keys.reshape(len(keys), -1, k_block)
    masks: dict[bytes, int] = {}
    grid_of: dict[bytes, int] = {}
    grids: list[tuple[np.ndarray, np.ndarray]] = []
    grid = np.zeros((len(queries), len(distances)), np.int32)
    for shard, hop in np.ndindex(grid.shape):
        source = (shard - distances[hop]) % len(keys) if len(keys) > 1 else 0
        kinds, mask_ids = _classify(pattern, q_blocks[shard], k_blocks[source], masks)
        content = kinds.tobytes() + mask_ids.tobytes()
        if content not in grid_of:
            grid_of[content] = len(grids)
            grids.append((kinds, mask_ids))
        grid[shard, hop] = grid_of[content]
    kinds, mask_ids = (np.stack(each) for each in zip(*grids, strict=True))
    shape = q_block, k_block
    bits = np.array([np.frombuffer(mask, np.uint8) for mask in masks] or [np.zeros(q_block * k_block // 8, np.uint8)])
    rows, columns = np.indices(kinds.shape)[1:]
    return BlockGrids(
        grid,
        kinds,
        _narrow(_fill_from_previous(mask_ids, kinds == PARTIAL, 2)),
        _narrow(_fill_from_previous(columns, kinds != EMPTY, 2)),
        _narrow(_fill_from_previous(rows, kinds != EMPTY, 1)),
        np.unpackbits(bits, axis=1).reshape(-1, *shape).astype(bool),
    )


def _classify(
    pattern: Pattern, q_blocks: np.ndarray, k_blocks: np.ndarray, masks: dict[bytes, int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return the kinds int8[q block, k block] of one hop, and the mask index of its partial blocks.

    Args:
        masks: packed bits of each mask -> its index; new masks are added.
    """
    kinds = _bound_kinds(pattern, q_blocks, k_blocks)
    mask_ids = np.zeros(kinds.shape, np.int32)
    for i, j in np.argwhere(kinds == PARTIAL):
        allowed = pattern.mask(q_blocks[i], k_blocks[j])
        if not allowed.any():
            kinds[i, j] = EMPTY
        else:
            mask_ids[i, j] = masks.setdefault(np.packbits(allowed).tobytes(), len(masks))
    if len(masks) > MAX_PARTIAL_MASKS:
        raise ConfigError(
            f"attention kernel splash: the mask and the layout have more than {MAX_PARTIAL_MASKS} different blocks "
            "that are neither empty nor full; use the kernel blockwise, or another layout"
        )
    return kinds, mask_ids


def _bound_kinds(pattern: Pattern, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Return kinds int8[q block, k block] by bounds of positions: PARTIAL includes blocks that may be EMPTY or FULL."""
    (q_min, q_max, q_full), (k_min, k_max, k_full) = (_bounds(blocks) for blocks in (queries, keys))
    every, some = pattern.allows_block(q_min[:, None], q_max[:, None], k_min, k_max)
    kinds = np.where(some, np.where(every & q_full[:, None] & k_full, FULL, PARTIAL), EMPTY)
    return kinds.astype(np.int8)


def _bounds(blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the first and the last position of every block, and whether it is free of padding."""
    is_padding = blocks == PADDING
    high = np.int64(np.iinfo(np.int64).max // 4)  # numpy 2.5 gives a Python integer the type of `blocks`, int32
    return np.where(is_padding, high, blocks).min(1), np.where(is_padding, -high, blocks).max(1), ~is_padding.any(1)


def _fill_from_previous(values: np.ndarray, is_valid: np.ndarray, axis: int) -> np.ndarray:
    """Replace invalid values along an axis by the last valid one before, or else by the first valid one."""
    index = np.arange(values.shape[axis]).reshape([-1 if i == axis else 1 for i in range(values.ndim)])
    last = np.maximum.accumulate(np.where(is_valid, index, -1), axis)
    first = np.argmax(is_valid, axis=axis, keepdims=True)
    return np.take_along_axis(values, np.where(last < 0, first, last), axis)


def _narrow(values: np.ndarray) -> np.ndarray:
    """Cast to the narrowest integer type that holds the values, because the kernels keep them in scalar memory."""
    return values.astype(next(kind for kind in (np.int8, np.int16, np.int32) if values.max() <= np.iinfo(kind).max))
