"""Views of equal pieces, such as the layers and experts of a stacked array, in arrays of numpy.

A giant's array has tens of thousands of pieces. Where they are alike, the ranges of all pieces in a box follow from
those of one, displaced by where each piece begins.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.checkpoint.format.header import bytes_of
from shardplan.checkpoint.mapping.views import Shape, View
from shardplan.checkpoint.transfer.byte_ranges import (
    MAX_EXACT_RUNS,
    ReadVolume,
    TensorSource,
    boxes_of_process,
    runs_of_box,
)
from shardplan.checkpoint.transfer.transfer import DeviceMesh, Transfer

FILE_BYTES = 2**44
"""More bytes than a file has: files are put one after the other, so that a number says where a range is."""


@dataclass(frozen=True)
class ViewGrid:
    """A view of equal pieces, one for each index of its leading dimensions."""

    shape: Shape
    """That of the view."""
    rank: int
    """Number of its leading dimensions."""
    strides: Shape
    """Bits between neighbours along each dimension inside a piece."""
    bits: int
    """Bits of an element."""
    files: np.ndarray
    """int[index of the leading dimensions, in row-major order]: number of the file of the piece."""
    positions: np.ndarray
    """int[index of the leading dimensions, in row-major order]: bit of the file where the piece begins."""

    @property
    def nbytes(self) -> float:
        """Stored bytes of all elements."""
        return math.prod(self.shape) * self.bits / 8


def find_grid(view: View, sources: Mapping[str, TensorSource]) -> ViewGrid | None:
    """Return the grid of the pieces of a view; None if they are not alike."""
    if not view.pieces:
        return None
    starts, shapes, tensors, offsets, strides, _ = zip(*view.pieces, strict=True)
    stored = [sources[tensor] for tensor in tensors]
    shape, bits = shapes[0], stored[0].bits
    rank = max((d + 1 for d, n in enumerate(shape) if n != view.shape[d]), default=0)
    leading = view.shape[:rank]
    if any(n > 1 for n in shape[:rank]) or len(view.pieces) != math.prod(leading):
        return None
    if len(set(shapes)) > 1 or len(set(strides)) > 1 or len({source.bits for source in stored}) > 1:
        return None
    numbers: dict[str, int] = {}
    files = [numbers.setdefault(source.file, len(numbers)) for source in stored]
    firsts = np.array([source.offset for source in stored]) * 8 + np.array(offsets) * bits
    order = np.lexsort(np.array(starts)[:, :rank].T[::-1]) if rank else np.zeros(1, np.int64)
    bit_strides = tuple(stride * bits for stride in strides[0])
    return ViewGrid(view.shape, rank, bit_strides, bits, np.array(files)[order], firsts[order])


def estimate_grid_volume(transfer: Transfer, grid: ViewGrid, mesh: DeviceMesh, process: int) -> ReadVolume:
    """Return the bytes and number of ranges that a process reads for a transfer, as `estimate_read_volume` does."""
    lows, highs = [], []
    upper_bound, is_exact = ReadVolume(), True
    for start, stop in boxes_of_process(transfer, mesh, process):
        shape = tuple(high - low for low, high in zip(start, stop, strict=True))
        cells = np.zeros(1, np.int64)
        for d in range(grid.rank):
            cells = np.add.outer(cells * grid.shape[d], np.arange(start[d], stop[d])).reshape(-1)
        runs = runs_of_box(shape[grid.rank :], tuple(k // grid.bits for k in grid.strides[grid.rank :]), grid.bits)
        size = runs.elements * grid.bits
        upper_bound += ReadVolume(len(cells) * runs.count * bytes_of(size), len(cells) * runs.count)
        is_exact &= runs.count <= MAX_EXACT_RUNS
        if not is_exact:
            continue
        first = grid.positions[cells] + sum(start[d] * grid.strides[d] for d in range(grid.rank, len(shape)))
        files = grid.files[cells] * FILE_BYTES
        for stride, count in runs.dimensions:
            first = np.add.outer(first, np.arange(count) * stride * grid.bits).reshape(-1)
            files = np.repeat(files, count)
        lows.append(files + first // 8)
        highs.append(files - (-(first + size) // 8))
    if not is_exact or not lows:
        return upper_bound
    total, ranges = union_of_ranges(np.concatenate(lows), np.concatenate(highs))
    return ReadVolume(int(total), int(ranges))


def union_of_ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of ranges along the last dimension, and their number, of which those that touch are one.

    Args:
        low: first byte of each range; -1 of one that is empty.
        high: one past the last byte.
    """
    order = np.argsort(low, axis=-1)
    low, high = np.take_along_axis(low, order, axis=-1), np.take_along_axis(high, order, axis=-1)
    reach = np.maximum.accumulate(high, axis=-1)
    before = np.concatenate([np.full_like(reach[..., :1], -1), reach[..., :-1]], axis=-1)
    size = np.maximum(high - np.maximum(low, before), 0)
    return size.sum(axis=-1), ((low > before) & (low >= 0)).sum(axis=-1)
