"""Views with equal pieces, such as the layers and experts of a stacked array, described by NumPy arrays.

A giant's array has tens of thousands of pieces. Where they are alike, the ranges of all pieces in a box follow from
those of one, displaced by where each piece begins.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.checkpoint.format.header import bytes_of
from shardplan.checkpoint.mapping.views import Shape, View
from shardplan.checkpoint.transfer.reads.byte_ranges import (
    ReadVolume,
    TensorSource,
    boxes_of_process,
    runs_of_box,
)
from shardplan.checkpoint.transfer.transfer import DeviceMesh, Transfer

FILE_BITS = 2**47
"""Number of bits larger than any file; (file number * `FILE_BITS` + bit) locates a range."""


MAX_EXACT_RUNS = 4096
"""Maximum number of runs of a piece for which estimates are exact.

If one piece of a transfer has more, the ranges of all its pieces are only counted, neither listed nor merged.
`find_byte_ranges` always lists them.
"""


@dataclass(frozen=True)
class ViewGrid:
    """A view of equal pieces; its leading dimensions index the pieces."""

    shape: Shape
    """Shape of the view."""
    strides: Shape
    """Bits between neighbours along each dimension inside a piece."""
    bits: int
    """Bits per element."""
    positions: np.ndarray
    """First bit of each piece plus `FILE_BITS` times the number of its file, int64[leading dimensions]."""

    @property
    def rank(self) -> int:
        """Number of leading dimensions, which index the pieces."""
        return self.positions.ndim

    @property
    def nbytes(self) -> float:
        """Stored bytes of all elements."""
        return math.prod(self.shape) * self.bits / 8


def find_grid(view: View, sources: Mapping[str, TensorSource]) -> ViewGrid | None:
    """Return the grid that the pieces of a view form; None if their shapes or strides differ.

    >>> from shardplan.checkpoint.mapping.views import stack, tensor_view
    >>> view = stack([tensor_view("layers.0", (8, 8)), tensor_view("layers.1", (8, 8))], 0)
    >>> sources = {f"layers.{i}": TensorSource("model.safetensors", 128 * i, bits=16) for i in range(2)}
    >>> grid = find_grid(view, sources)
    >>> grid.rank, grid.positions.tolist(), grid.nbytes
    (1, [0, 1024], 256.0)
    """
    if len({(part.shape, part.strides) for part in view.parts}) != 1:
        return None
    shape, strides, *_ = view.parts[0]
    rank = max((d + 1 for d, n in enumerate(shape) if n != view.shape[d]), default=0)
    leading = view.shape[:rank]
    if any(n > 1 for n in shape[:rank]) or view.piece_count != math.prod(leading):
        return None
    tensors = itertools.chain.from_iterable(part.tensors for part in view.parts)
    of_pieces = [sources[name] for name in tensors]
    bits = of_pieces[0].bits
    if any(source.bits != bits for source in of_pieces):
        return None
    numbers = {file: number for number, file in enumerate(dict.fromkeys(source.file for source in of_pieces))}
    files = np.array([numbers[source.file] for source in of_pieces])
    offsets = np.array([source.offset for source in of_pieces])
    elements = np.concatenate([part.offsets for part in view.parts])
    starts = np.concatenate([part.starts for part in view.parts])
    order = np.lexsort(starts[:, :rank].T[::-1]) if rank else np.zeros(1, np.int64)
    positions = (files * FILE_BITS + offsets * 8 + elements * bits)[order].reshape(leading)
    return ViewGrid(view.shape, tuple(stride * bits for stride in strides), bits, positions)


def estimate_grid_volume(transfer: Transfer, grid: ViewGrid, mesh: DeviceMesh, process: int) -> ReadVolume:
    """Estimate the bytes and number of ranges that a process reads for a transfer, from a grid.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> from shardplan.checkpoint.transfer.transfer import ReadStrategy
    >>> mesh, strategy = DeviceMesh((("data", 4),), (0, 0, 1, 1)), ReadStrategy((("data",), ()))
    >>> transfer = Transfer("up_proj", 2, strategy, (2, 8), (0, 0), (2, 8))
    >>> view, sources = tensor_view("up_proj", (8, 8)), {"up_proj": TensorSource("model.safetensors", 64, bits=16)}
    >>> estimate_grid_volume(transfer, find_grid(view, sources), mesh, process=1)
    ReadVolume(bytes=64, count=1)
    """
    ranges = _EstimatedRanges()
    element_strides = tuple(stride // grid.bits for stride in grid.strides[grid.rank :])
    for start, stop in boxes_of_process(transfer, mesh, process):
        shape = tuple(high - low for low, high in zip(start, stop, strict=True))
        first = grid.positions[tuple(map(slice, start[: grid.rank], stop[: grid.rank]))].reshape(-1)
        first = first + sum(start[d] * grid.strides[d] for d in range(grid.rank, len(shape)))
        ranges.add(first, shape[grid.rank :], element_strides, grid.bits)
    return ranges.volume()


def estimate_read_volume(
    transfer: Transfer, view: View, sources: Mapping[str, TensorSource], mesh: DeviceMesh, process: int
) -> ReadVolume:
    """Estimate the bytes and number of ranges that a process reads for a transfer.

    They are exact if no piece has more than `MAX_EXACT_RUNS` runs, otherwise an upper bound without merging. The
    function is cheap enough to compare read strategies.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> from shardplan.checkpoint.transfer.transfer import ReadStrategy
    >>> mesh, strategy = DeviceMesh((("data", 4),), (0, 0, 1, 1)), ReadStrategy((("data",), ()))
    >>> transfer = Transfer("up_proj", 2, strategy, (2, 8), (0, 0), (2, 8))
    >>> view, sources = tensor_view("up_proj", (8, 8)), {"up_proj": TensorSource("model.safetensors", 64, bits=16)}
    >>> estimate_read_volume(transfer, view, sources, mesh, process=1)
    ReadVolume(bytes=64, count=1)
    """
    ranges, numbers = _EstimatedRanges(), dict[str, int]()
    for start, stop in boxes_of_process(transfer, mesh, process):
        for part in view.parts_in(start, stop):
            of_pieces = [sources[name] for name in part.tensors]
            files = np.array([numbers.setdefault(source.file, len(numbers)) for source in of_pieces])
            offsets = np.array([source.offset for source in of_pieces])
            all_bits = np.array([source.bits for source in of_pieces])
            first = files * FILE_BITS + offsets * 8 + part.offsets * all_bits
            for bits in set(all_bits.tolist()):
                ranges.add(first[all_bits == bits], part.shape, part.strides, bits)
    return ranges.volume()


class _EstimatedRanges:
    """The union of the byte ranges that hold boxes of tensors, or an estimate of it."""

    def __init__(self) -> None:
        self._lows: list[np.ndarray] = []
        self._highs: list[np.ndarray] = []
        self._upper_bound = ReadVolume()
        self._is_exact = True

    def add(self, first: np.ndarray, shape: Shape, strides: Shape, bits: int) -> None:
        """Add the ranges of several boxes of the same shape.

        Args:
            first: int64[box]: bit where the box begins, plus `FILE_BITS` times the number of its file.
            strides: elements between neighbours along each dimension.
            bits: bits of an element.
        """
        runs = runs_of_box(shape, strides, bits)
        size, count = runs.elements * bits, len(first) * runs.count
        self._upper_bound += ReadVolume(count * bytes_of(size), count)
        self._is_exact &= runs.count <= MAX_EXACT_RUNS
        if not self._is_exact:
            return
        for stride, n in runs.dimensions:
            first = np.add.outer(first, np.arange(n) * stride * bits).reshape(-1)
        self._lows.append(first // 8)
        self._highs.append(-(-(first + size) // 8))

    def volume(self) -> ReadVolume:
        """Return the bytes and number of all ranges, touching ranges merged; see `MAX_EXACT_RUNS`."""
        if not self._is_exact or not self._lows:
            return self._upper_bound
        total, ranges = union_of_ranges(np.concatenate(self._lows), np.concatenate(self._highs))
        return ReadVolume(int(total), int(ranges))


def union_of_ranges(low: np.ndarray, high: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of bytes in the union of ranges, and the number of contiguous ranges, along the last dimension.

    There is a gap before the i-th lowest first byte if the i ranges that begin earlier have all ended before it.

    >>> union_of_ranges(np.array([0, 100, 300]), np.array([100, 200, 400]))
    (np.int64(300), np.int64(2))

    Args:
        low: first byte of each range; -1 for an empty range.
        high: one past the last byte of each range; -1 for an empty range.
    """
    low, high = np.sort(low, axis=-1), np.sort(high, axis=-1)
    gaps = np.maximum(low[..., 1:] - high[..., :-1], 0)
    total = high[..., -1] - low[..., 0] - gaps.sum(axis=-1)
    return total, (gaps > 0).sum(axis=-1) + (low[..., 0] >= 0)
