"""Groups the processes of a fleet by what they read in a transfer, so that only one of each kind is examined.

Where each device reads one range of bytes, arrays of numpy give the ranges of all processes at once. Elsewhere the
bytes and byte ranges that a process reads depend on the distances between the ranges of its devices, not on where in
the checkpoint they are: processes are grouped by these distances, and of each kind one is looked at.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from shardplan.checkpoint.mapping.views import Shape
from shardplan.checkpoint.transfer.reads.byte_ranges import GAP_BYTES, ReadVolume
from shardplan.checkpoint.transfer.reads.view_grid import FILE_BITS, ViewGrid, union_of_ranges
from shardplan.checkpoint.transfer.transfer import DeviceMesh, Transfer


@dataclass(frozen=True)
class ProcessKinds:
    """Kinds of processes in a transfer; processes of one kind read equally many bytes in equally many ranges."""

    examples: tuple[int, ...]
    """Index of an example process of each kind."""
    of_process: np.ndarray
    """Kind of each process, int[process]."""

    def thinned(self, count: int) -> "ProcessKinds":
        """Return `count` of the kinds, evenly spaced; each also stands for the kinds between it and the next one.

        >>> ProcessKinds((0, 3, 5, 6), np.array([0, 0, 0, 1, 1, 2, 3])).thinned(2)
        ProcessKinds(examples=(0, 5), of_process=array([0, 0, 0, 0, 0, 1, 1]))
        """
        chosen = np.arange(count) * len(self.examples) // count
        return ProcessKinds(
            tuple(self.examples[kind] for kind in chosen),
            np.searchsorted(chosen, self.of_process, side="right") - 1,
        )


class Volumes(NamedTuple):
    """Bytes and ranges that each process reads, in the order of `DeviceMesh.devices_by_process`."""

    bytes: np.ndarray
    """Bytes that each process reads, int[process]."""
    ranges: np.ndarray
    """Number of ranges that each process reads, int[process]."""


def find_volumes(
    transfer: Transfer,
    grid: ViewGrid | None,
    shape: Shape,
    mesh: DeviceMesh,
    volume_of: Callable[[int], ReadVolume],
    max_examples: int | None = None,
) -> Volumes:
    """Find the bytes and ranges that all processes read in a transfer.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> from shardplan.checkpoint.transfer.reads.byte_ranges import TensorSource
    >>> from shardplan.checkpoint.transfer.transfer import ReadStrategy
    >>> from shardplan.checkpoint.transfer.reads.view_grid import find_grid
    >>> mesh, strategy = DeviceMesh((("data", 4),), (0, 0, 1, 1)), ReadStrategy((("data",), ()))
    >>> transfer = Transfer("up_proj", 2, strategy, (2, 8), (0, 0), (2, 8))
    >>> grid = find_grid(tensor_view("up_proj", (8, 8)), {"up_proj": TensorSource("model.safetensors", 64, bits=16)})
    >>> find_volumes(transfer, grid, (8, 8), mesh, volume_of=lambda process: ReadVolume())
    Volumes(bytes=array([64, 64]), ranges=array([1, 1]))

    Args:
        grid: grid of the array's view; if None, only processes that read the same bytes are of one kind.
        shape: shape of the array.
        volume_of: process -> its volume; called for one process of each kind.
        max_examples: most kinds to examine; if there are more, evenly spaced ones stand for the others.
    """
    processes = [*mesh.devices_by_process]
    reads = _find_reads(transfer, grid, shape, mesh)
    known = np.zeros(len(processes), bool)
    volumes = np.zeros((2, len(processes)), np.int64)
    if reads.ranges is not None:
        known = reads.ranges.has_ranges & ~_has_short_gap(reads.ranges)
        volumes[:, known] = _union_volumes(reads.ranges, known)
    if not known.all():
        others = np.flatnonzero(~known)
        kinds = _find_kinds(_device_keys(transfer, reads)[others])
        if max_examples is not None and len(kinds.examples) > max_examples:
            kinds = kinds.thinned(max_examples)
        found = [volume_of(processes[others[example]]) for example in kinds.examples]
        volumes[:, others] = np.array([(each.bytes, each.count) for each in found]).T[:, kinds.of_process]
    return Volumes(*volumes)


def _find_kinds(keys: np.ndarray) -> ProcessKinds:
    """Group processes with equal keys.

    Args:
        keys: int[process, device, number].
    """
    rows = keys.reshape(len(keys), -1)
    if (rows == rows[0]).all():
        return ProcessKinds((0,), np.zeros(len(rows), np.int64))
    as_bytes = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.itemsize * rows.shape[1]))).ravel()
    _, examples, of_process = np.unique(as_bytes, return_index=True, return_inverse=True)
    return ProcessKinds(tuple(examples.tolist()), of_process.ravel())


@dataclass(frozen=True)
class _Reads:
    """The reads of all devices in a transfer, by process."""

    row_index: np.ndarray
    """Index of each device along the mesh axes of rows, int[process, device]."""
    local: Mapping[int, np.ndarray]
    """Dimension sharded during the read -> each device's index along its mesh axes, int[process, device]."""
    grid_rank: int = 0
    """Number of leading dimensions that index the pieces."""
    ranges: "_DeviceRanges | None" = None
    """The byte range of each device; None if the pieces of the array differ in shape or strides."""


def _find_reads(transfer: Transfer, grid: ViewGrid | None, shape: Shape, mesh: DeviceMesh) -> _Reads:
    strategy = transfer.strategy
    row_index = mesh.indices(strategy.row_axes)
    local = {d: mesh.indices(axes) for d, axes in enumerate(strategy.local) if mesh.count(axes) > 1}
    if grid is None or 0 in transfer.shape:
        return _Reads(row_index, local)
    ranges = _find_device_ranges(transfer, grid, shape, mesh, row_index, local)
    return _Reads(row_index, local, grid.rank, ranges)


def _device_keys(transfer: Transfer, reads: _Reads) -> np.ndarray:
    """Return the integers that determine each device's reads, int[process, device, integer].

    Processes with equal integers read the same number of bytes and ranges.
    """
    row_index, local, ranges = reads.row_index, reads.local, reads.ranges
    if ranges is None:
        return np.stack([row_index, *local.values()], -1)
    # the boxes of a process may be displaced along dimensions that no piece ends in
    relative = [n if d < reads.grid_rank else n - n.min(axis=1, keepdims=True) for d, n in local.items()]
    in_byte = ranges.first_bit % 8  # where a range begins within a byte decides how many bytes it touches
    by_box = np.stack([row_index, in_byte, *[np.full_like(row_index, -1)] * 4, *relative], -1)  # no range has -1 bits
    same_file = _first_equal(ranges.file)
    distance = ranges.first_bit - np.take_along_axis(ranges.first_bit, same_file, axis=1)
    # of ranges with short gaps, which may be read as one, the indices decide too
    details = [1 + ranges.index, _first_equal(ranges.block), *relative]
    by_range = np.stack([same_file, distance, in_byte, ranges.bits, *details], -1)
    return np.where(ranges.has_ranges[:, None, None], by_range, by_box)


def _union_volumes(ranges: "_DeviceRanges", processes: np.ndarray) -> Volumes:
    """Return bytes and number of ranges of each process if every device reads one range; touching ranges count once.

    Args:
        processes: bool[process].
    """
    file, first_bit, bits = (each[processes] for each in (ranges.file, ranges.first_bit, ranges.bits))
    is_read = file >= 0
    # files one after the other; what is not read is before all of them
    base = file * (FILE_BITS // 8)
    low = np.where(is_read, base + first_bit // 8, -1)
    high = np.where(is_read, base - (-(first_bit + bits) // 8), -1)
    return Volumes(*union_of_ranges(low, high))


@dataclass(frozen=True)
class _DeviceRanges:
    """The byte range that each device reads, in arrays [process, device]."""

    is_complete: np.ndarray
    """Whether the device reads this range and nothing else."""
    file: np.ndarray
    """Index of the file that the device reads; -1 if it reads nothing."""
    first_bit: np.ndarray
    bits: np.ndarray
    block: np.ndarray
    """Index of the block of rows that holds the range; a block is a contiguous byte range."""
    index: np.ndarray
    """First row of the range in that block."""

    @property
    def has_ranges(self) -> np.ndarray:
        """Whether each device of a process reads exactly its range, bool[process]."""
        return np.all(self.is_complete, axis=1)


def _find_device_ranges(
    transfer: Transfer, grid: ViewGrid, shape: Shape, mesh: DeviceMesh, row_index: np.ndarray, local: Mapping[int, Any]
) -> _DeviceRanges:
    """Find the range of each device from its indices along the mesh axes of rows and of sharded dimensions."""
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
    file, piece_bit = np.divmod(grid.positions.reshape(-1)[cell], FILE_BITS)
    return _DeviceRanges(
        is_complete=is_empty | ((index + count <= block_rows) & (contiguous <= row_rank)),
        file=np.where(is_empty, -1, file),
        first_bit=np.where(is_empty, 0, piece_bit + first_bit),
        bits=count * row_bits,
        block=np.where(is_empty, -1, cell * max(1, transfer.rows) + block),
        index=index,
    )


def _first_contiguous_dimension(transfer: Transfer, grid: ViewGrid, shape: Shape) -> int:
    """Return the first dimension from which on a transfer's box is contiguous in the file, within a piece.

    If this dimension indexes rows, a device may read several neighbouring rows as one range.
    """
    d, bits = len(shape), grid.bits
    while d > grid.rank and (shape[d - 1] == 1 or grid.strides[d - 1] == bits):
        d -= 1
        bits *= shape[d]
        if transfer.shape[d] != shape[d]:  # the next index of the dimension before does not follow
            break
    return d


def _first_equal(values: np.ndarray) -> np.ndarray:
    """Return, for each device, the first device of its process with an equal value: int[process, device]."""
    return np.argmax(values[:, :, None] == values[:, None, :], axis=2)


def _has_short_gap(ranges: _DeviceRanges) -> np.ndarray:
    """Return whether two devices of a process read ranges of one file with a short gap between them, bool[process]."""
    order = np.lexsort((ranges.first_bit, ranges.file), axis=1)
    file, first, bits = (np.take_along_axis(a, order, axis=1) for a in (ranges.file, ranges.first_bit, ranges.bits))
    gap = first[:, 1:] - (first + bits)[:, :-1]
    return np.any((file[:, 1:] == file[:, :-1]) & (gap > 0) & (gap <= 8 * GAP_BYTES), axis=1)
