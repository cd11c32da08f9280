"""The byte ranges of files that processes read for a transfer. Pure arithmetic."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import add

from msgspec import Struct

from shardplan.checkpoint.format.header import Tensor, bytes_of
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape, View
from shardplan.checkpoint.transfer.transfer import Box, DeviceMesh, ReadStrategy, Transfer

GAP_BYTES = 64 * 1024
"""Longest gap, in bytes, between ranges that are read as one: its bytes cost less than another request."""
ByteRange = tuple[str, int, int]
"""A byte range: (file, first byte, one past the last byte)."""


class TensorSource(Struct, frozen=True, gc=False):  # made a hundred thousand times, as `Tensor` is
    """Location of a checkpoint tensor, and the size of its elements."""

    file: str
    offset: int
    """Byte of the file where the tensor's data starts."""
    bits: int
    """Bits per element."""

    def bit(self, element: int) -> int:
        """Return the bit of the file where an element begins."""
        return 8 * self.offset + element * self.bits


def source_of(tensor: Tensor) -> TensorSource:
    """Return the location of a tensor.

    >>> import numpy as np
    >>> tensor = Tensor(None, 64, (8, 8), np.dtype(np.float16), "model.safetensors")
    >>> source_of(tensor)
    TensorSource(file='model.safetensors', offset=64, bits=16)
    """
    return TensorSource(tensor.file_name, tensor.offset, tensor.bits)


def locate(view: View, tensors: Mapping[str, Tensor]) -> dict[str, TensorSource]:
    """Return the locations of the tensors of a view, by name.

    >>> import numpy as np
    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> tensor = Tensor(None, 64, (8, 8), np.dtype(np.float16), "model.safetensors")
    >>> locate(tensor_view("up_proj", (8, 8)), {"up_proj": tensor})
    {'up_proj': TensorSource(file='model.safetensors', offset=64, bits=16)}
    """
    return {name: source_of(tensors[name]) for name in view.tensors}


@dataclass(frozen=True)
class ReadVolume:
    """Number of bytes and of byte ranges that a process reads."""

    bytes: int = 0
    count: int = 0
    """Number of ranges."""

    def __add__(self, other: "ReadVolume") -> "ReadVolume":
        return ReadVolume(self.bytes + other.bytes, self.count + other.count)


@dataclass(frozen=True)
class Runs:
    """Runs of consecutive tensor elements that contain a box; all are equally long and may include short gaps."""

    elements: int
    """Elements of each run, from its first to its last."""
    dimensions: tuple[tuple[int, int], ...]
    """(Elements between neighbouring runs, number of runs) along each dimension of the runs."""

    @property
    def count(self) -> int:
        """Number of runs."""
        return math.prod(count for _, count in self.dimensions)


def find_runs(piece: StridedPiece, bits: int) -> Runs:
    """Find the runs of a piece of a tensor with elements of `bits` bits.

    >>> find_runs(StridedPiece((0, 0), (4, 1024), "w", 0, (10**6, 1)), bits=16)
    Runs(elements=1024, dimensions=((1000000, 4),))
    """
    return runs_of_box(piece.shape, piece.strides, bits)


@lru_cache(maxsize=4096)
def runs_of_box(shape: Shape, strides: Shape, bits: int) -> Runs:
    """Find the runs of a box of `shape`, with `strides` between neighbouring elements of `bits` bits.

    >>> runs_of_box((4, 1024), (10**6, 1), bits=16)
    Runs(elements=1024, dimensions=((1000000, 4),))
    """
    dimensions = sorted((k, n) for n, k in zip(shape, strides, strict=True) if n > 1 and k)
    run = 1
    while dimensions and (dimensions[0][0] - run) * bits <= 8 * GAP_BYTES:
        stride, count = dimensions.pop(0)
        run += stride * (count - 1)
    return Runs(run, tuple(dimensions))


def find_byte_ranges(
    transfer: Transfer, view: View, sources: Mapping[str, TensorSource], mesh: DeviceMesh, process: int
) -> list[ByteRange]:
    """Find the byte ranges that a process reads for a transfer; ranges that touch are merged.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> mesh, strategy = DeviceMesh((("data", 4),), (0, 0, 1, 1)), ReadStrategy((("data",), ()))
    >>> transfer = Transfer("up_proj", 2, strategy, (2, 8), (0, 0), (2, 8))
    >>> view, sources = tensor_view("up_proj", (8, 8)), {"up_proj": TensorSource("model.safetensors", 64, bits=16)}
    >>> find_byte_ranges(transfer, view, sources, mesh, process=1)
    [('model.safetensors', 128, 192)]
    """
    return _merge_ranges(_pieces_of_process(transfer, view, mesh, process), sources)


def sum_ranges(ranges: Sequence[ByteRange]) -> ReadVolume:
    """Return the total bytes and the number of ranges.

    >>> sum_ranges([("file", 0, 4096), ("file", 8192, 12288)])
    ReadVolume(bytes=8192, count=2)
    """
    return ReadVolume(sum(high - low for _, low, high in ranges), len(ranges))


def merge_boxes(boxes: Iterable[Box]) -> list[Box]:
    """Merge boxes that touch along one dimension and agree in all others.

    >>> merge_boxes([((0, 0), (2, 4)), ((2, 0), (2, 4)), ((0, 4), (4, 4))])
    [((0, 0), (2, 4)), ((0, 4), (4, 4))]
    """
    merged = sorted(set(boxes))
    for d in range(len(merged[0][0]) if merged else 0):
        merged.sort(key=lambda box: (box[0][:d], box[0][d + 1 :], box[1][:d], box[1][d + 1 :], box[0][d]))
        longer = merged[:1]
        for start, stop in merged[1:]:
            last_start, last_stop = longer[-1]
            is_adjacent = start[d] == last_stop[d]
            is_aligned = _without(start, d) == _without(last_start, d) and _without(stop, d) == _without(last_stop, d)
            if is_aligned and is_adjacent:
                longer[-1] = (last_start, stop)
            else:
                longer.append((start, stop))
        merged = longer
    return merged


def boxes_of_process(transfer: Transfer, mesh: DeviceMesh, process: int) -> list[Box]:
    """Return the boxes of the array that a process reads for a transfer; touching boxes of its devices are merged.

    >>> mesh, strategy = DeviceMesh((("data", 4),), (0, 0, 1, 1)), ReadStrategy((("data",), ()))
    >>> transfer = Transfer("up_proj", 2, strategy, (2, 8), (0, 0), (2, 8))
    >>> boxes_of_process(transfer, mesh, process=1)
    [((4, 0), (8, 8))]
    """
    boxes = _boxes_from_origin(transfer.strategy, transfer.local_shape, transfer.shape, mesh, process)
    return [(_add(start, transfer.start), _add(stop, transfer.start)) for start, stop in boxes]


def _pieces_of_process(transfer: Transfer, view: View, mesh: DeviceMesh, process: int) -> list[StridedPiece]:
    boxes = boxes_of_process(transfer, mesh, process)
    return [piece for start, stop in boxes for piece in view.pieces_in(start, stop)]


@lru_cache(maxsize=4096)
def _boxes_from_origin(
    strategy: ReadStrategy, local_shape: Shape, shape: Shape, mesh: DeviceMesh, process: int
) -> list[Box]:
    """Return the boxes that a process reads for a transfer at offset 0; a transfer at another offset shifts them."""
    transfer = Transfer("", 1, strategy, local_shape, (0,) * len(shape), shape)
    devices = mesh.devices_by_process[process]
    return merge_boxes(box for device in devices for box, _ in transfer.boxes(mesh, device))


def _merge_ranges(pieces: Iterable[StridedPiece], sources: Mapping[str, TensorSource]) -> list[ByteRange]:
    """Return the byte ranges of all pieces; ranges that touch are merged."""
    ranges: list[ByteRange] = []
    for piece in pieces:
        ranges += _piece_ranges(piece, sources[piece.tensor])
    ranges.sort()
    merged = ranges[:1]
    for file, low, high in ranges[1:]:
        last_file, last_low, last_high = merged[-1]
        if file == last_file and low <= last_high:
            merged[-1] = (file, last_low, max(high, last_high))
        else:
            merged.append((file, low, high))
    return merged


def _piece_ranges(piece: StridedPiece, source: TensorSource) -> list[ByteRange]:
    """Return the range of every run of a piece."""
    runs = find_runs(piece, source.bits)
    first = source.bit(piece.offset)
    size = runs.elements * source.bits
    if not runs.dimensions:  # most pieces; fast, since there are a hundred thousand
        return [(source.file, first // 8, bytes_of(first + size))]
    steps = [range(0, stride * count, stride) for stride, count in runs.dimensions]
    lows = [first + sum(index) * source.bits for index in itertools.product(*steps)]
    return [(source.file, low // 8, bytes_of(low + size)) for low in lows]


def _add(index: Shape, offset: Shape) -> Shape:
    return tuple(map(add, index, offset))


def _without(values: Shape, index: int) -> Shape:
    return (*values[:index], *values[index + 1 :])
