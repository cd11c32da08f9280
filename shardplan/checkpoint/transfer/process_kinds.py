"""Processes that read alike in a transfer: of each kind one is looked at, and not every process of a fleet.

The bytes and byte ranges that a process reads depend on the distances between the ranges of its devices, not on where
in the checkpoint they are. So processes are grouped by these distances, which arrays of numpy give for all at once.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.checkpoint.mapping.views import Shape, View
from shardplan.checkpoint.transfer.byte_ranges import GAP_BYTES, TensorSource
from shardplan.checkpoint.transfer.transfer import DeviceMesh, Transfer


@dataclass(frozen=True)
class ProcessKinds:
    """The kinds of processes of a transfer; those of one kind read equally many bytes in equally many ranges."""

    examples: tuple[int, ...]
    """A process of each kind."""
    counts: np.ndarray
    """int[kind]: number of processes."""
    of_process: np.ndarray
    """int[process]: its kind; in the order of `DeviceMesh.devices_by_process`."""


@dataclass(frozen=True)
class ViewGrid:
    """A view of equal pieces, one for each index of its leading dimensions, such as the layers of a stacked array."""

    rank: int
    """Number of these dimensions."""
    strides: Shape
    """Bits between neighbours along each dimension inside a piece."""
    bits: int
    """Bits of an element."""
    files: np.ndarray
    """int[index of the leading dimensions, in row-major order]: number of the file of the piece."""
    positions: np.ndarray
    """int[index of the leading dimensions, in row-major order]: bit of the file where the piece begins."""


def find_grid(view: View, sources: Mapping[str, TensorSource]) -> ViewGrid | None:
    """Return the grid of the pieces of a view; None if they are not alike."""
    if not view.pieces:
        return None
    first, bits = view.pieces[0], sources[view.pieces[0].tensor].bits
    rank = max((d + 1 for d, n in enumerate(first.shape) if n != view.shape[d]), default=0)
    leading = view.shape[:rank]
    if any(n > 1 for n in first.shape[:rank]) or len(view.pieces) != math.prod(leading):
        return None
    numbers: dict[str, int] = {}
    cells, files, positions = [], [], []
    for piece in view.pieces:
        source = sources[piece.tensor]
        if (piece.shape, piece.strides, source.bits) != (first.shape, first.strides, bits):
            return None
        cells.append(piece.start[:rank])
        files.append(numbers.setdefault(source.file, len(numbers)))
        positions.append(source.bit(piece.offset))
    order = np.lexsort(np.array(cells, np.int64).T[::-1]) if rank else np.zeros(1, np.int64)
    strides = tuple(stride * bits for stride in first.strides)
    return ViewGrid(rank, strides, bits, np.array(files)[order], np.array(positions, np.int64)[order])


def find_process_kinds(transfer: Transfer, grid: ViewGrid | None, shape: Shape, mesh: DeviceMesh) -> ProcessKinds:
    """Group the processes that read equally many bytes and ranges in a transfer.

    Args:
        grid: of the view of the array; without one, only processes that read the same bytes are of one kind.
        shape: that of the array.
    """
    processes = [*mesh.devices_by_process]
    keys = _device_keys(transfer, grid, shape, mesh).reshape(len(processes), -1)
    if (keys == keys[0]).all():
        return ProcessKinds((processes[0],), np.array([len(keys)]), np.zeros(len(keys), np.int64))
    as_bytes = np.ascontiguousarray(keys).view(np.dtype((np.void, keys.itemsize * keys.shape[1]))).ravel()
    _, examples, of_process, counts = np.unique(as_bytes, return_index=True, return_inverse=True, return_counts=True)
    return ProcessKinds(tuple(processes[i] for i in examples), counts, of_process.ravel())


def _device_keys(transfer: Transfer, grid: ViewGrid | None, shape: Shape, mesh: DeviceMesh) -> np.ndarray:
    """Return numbers for every device of each process, int[process, device, number].

    Processes with equal numbers read equally many bytes and ranges.
    """
    strategy = transfer.strategy
    row_index = mesh.indices(strategy.row_axes)
    local = {d: mesh.indices(axes) for d, axes in enumerate(strategy.local) if mesh.count(axes) > 1}
    if grid is None or 0 in transfer.shape:
        return np.stack([row_index, *local.values()], -1)
    # the boxes of a process may be displaced along dimensions that no piece ends in
    relative = [n if d < grid.rank else n - n.min(axis=1, keepdims=True) for d, n in local.items()]
    by_box = np.stack([row_index, *[np.full_like(row_index, -1)] * 5, *relative], -1)  # no range has -1 bits
    ranges = _find_device_ranges(transfer, grid, shape, mesh, row_index, local)
    has_ranges = np.all(ranges.is_complete, axis=1)
    if not has_ranges.any():
        return by_box
    same_file = _first_equal(ranges.file)
    distance = ranges.first_bit - np.take_along_axis(ranges.first_bit, same_file, axis=1)
    # where a range begins within a byte decides how many bytes it touches
    known = [same_file, distance, ranges.first_bit % 8, ranges.bits]
    by_range = np.stack([*known, *[np.zeros_like(row_index)] * (2 + len(local))], -1)
    # of ranges with short gaps, which may be read as one, the indices decide too
    is_near = _has_short_gap(ranges)
    if is_near.any():
        details = np.stack([1 + ranges.index, _first_equal(ranges.block), *relative], -1)
        by_range[is_near, :, len(known) :] = details[is_near]
    return np.where(has_ranges[:, None, None], by_range, by_box)


@dataclass(frozen=True)
class _DeviceRanges:
    """The range of bytes that each device reads; arrays [process, device]."""

    is_complete: np.ndarray
    """Whether the device reads this range and nothing else."""
    file: np.ndarray
    """Number of the file; -1 of a device that reads nothing."""
    first_bit: np.ndarray
    bits: np.ndarray
    block: np.ndarray
    """Number of the block of rows, which is a range of bytes, that the range is in."""
    index: np.ndarray
    """First row of the range in that block."""


def _find_device_ranges(
    transfer: Transfer, grid: ViewGrid, shape: Shape, mesh: DeviceMesh, row_index: np.ndarray, local: Mapping[int, Any]
) -> _DeviceRanges:
    """Find the range of each device, from its indices along the mesh axes of rows and of sharded dimensions."""
    row_rank = transfer.strategy.row_rank
    per_device = transfer.rows_per_device(mesh)
    first = np.minimum(transfer.rows, per_device * row_index)
    count = np.minimum(transfer.rows, first + per_device) - first
    row_bits = math.prod(transfer.row_shape) * grid.bits
    contiguous = _first_contiguous_dimension(transfer, grid, shape)
    inner = min(contiguous, row_rank)
    block_rows = math.prod(transfer.shape[inner:row_rank])
    block, index = np.divmod(np.minimum(first, transfer.rows - 1), block_rows)
    outer = np.unravel_index(block, transfer.shape[:inner]) if inner else ()
    cell, first_bit = np.zeros_like(first), index * row_bits
    for d, size in enumerate(shape):
        at = transfer.start[d] + transfer.local_shape[d] * local.get(d, 0) + (outer[d] if d < inner else 0)
        if d < grid.rank:
            cell = cell * size + at
        else:
            first_bit = first_bit + at * grid.strides[d]
    is_empty = count == 0
    return _DeviceRanges(
        is_complete=is_empty | ((index + count <= block_rows) & (contiguous <= row_rank)),
        file=np.where(is_empty, -1, grid.files[cell]),
        first_bit=np.where(is_empty, 0, grid.positions[cell] + first_bit),
        bits=count * row_bits,
        block=np.where(is_empty, -1, cell * max(1, transfer.rows) + block),
        index=index,
    )


def _first_contiguous_dimension(transfer: Transfer, grid: ViewGrid, shape: Shape) -> int:
    """Return the first dimension inside a piece from which on a box of the transfer is a range of bytes.

    If it numbers rows, a device may read several neighbouring ones as one range.
    """
    d, bits = len(shape), grid.bits
    while d > grid.rank and (shape[d - 1] == 1 or grid.strides[d - 1] == bits):
        d -= 1
        bits *= shape[d]
        if transfer.shape[d] != shape[d]:  # the next index of the dimension before does not follow
            break
    return d


def _first_equal(values: np.ndarray) -> np.ndarray:
    """Return the first device of the same process with an equal value: int[process, device] -> int[process, device]."""
    return np.argmax(values[:, :, None] == values[:, None, :], axis=2)


def _has_short_gap(ranges: _DeviceRanges) -> np.ndarray:
    """Return whether two devices of a process read ranges of one file with a short gap between them, bool[process]."""
    order = np.lexsort((ranges.first_bit, ranges.file), axis=1)
    file, first, bits = (np.take_along_axis(a, order, axis=1) for a in (ranges.file, ranges.first_bit, ranges.bits))
    gap = first[:, 1:] - (first + bits)[:, :-1]
    return np.any((file[:, 1:] == file[:, :-1]) & (gap > 0) & (gap <= 8 * GAP_BYTES), axis=1)
