"""Reads tensors into host memory: chooses which bytes are read together, and copies each element to its target."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardplan.checkpoint.format.casting import copy_cast
from shardplan.checkpoint.format.codecs.coded_tensor import unpack
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor, bytes_of
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape, View, row_major_strides
from shardplan.checkpoint.transfer.reads.byte_ranges import find_runs, merge_boxes

_thread = threading.local()
_EMPTY = np.empty(0, np.uint8)


@dataclass(frozen=True)
class ReadTarget:
    """Host memory for a box of an array."""

    start: Shape
    """First index of the box, per dimension."""
    buffer: np.ndarray

    @property
    def stop(self) -> Shape:
        """One past the last index of the box, per dimension."""
        return tuple(s + n for s, n in zip(self.start, self.buffer.shape, strict=True))


@dataclass(frozen=True)
class Read:
    """One read of a range of a tensor, and the pieces of the target boxes that it fills."""

    tensor: Tensor
    pieces: tuple[tuple[ReadTarget, StridedPiece], ...]

    @property
    def span(self) -> tuple[int, int]:
        """First element of the tensor that is read, and one past the last."""
        spans = [piece.span for _, piece in self.pieces]
        return min(low for low, _ in spans), max(high for _, high in spans)

    @property
    def nbytes(self) -> int:
        """Bytes that the read takes from the file."""
        low, high = self.span
        bits = self.tensor.bits
        return bytes_of(high * bits) - low * bits // 8

    @property
    def bounding_box(self) -> StridedPiece:
        """The smallest box that contains all pieces."""
        pieces = [piece for _, piece in self.pieces]
        start = tuple(map(min, zip(*(piece.start for piece in pieces), strict=True)))
        stop = tuple(map(max, zip(*(piece.stop for piece in pieces), strict=True)))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return pieces[0]._replace(start=start, shape=shape, offset=self.span[0])


def plan_reads(
    view: View, tensors: Mapping[str, Tensor], targets: Sequence[ReadTarget], max_bytes: int
) -> Iterator[Read]:
    """Plan disjoint reads of at most `max_bytes` that fill boxes of an array.

    If the part of every target is contiguous on disk, each is read by itself. If the parts interleave (a tensor
    sharded along an inner dimension), they are read once for all targets.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> tensor = Tensor(None, 0, (4, 8), np.dtype(np.float32))
    >>> target = ReadTarget((0, 0), np.empty((4, 8), np.float32))
    >>> reads = plan_reads(tensor_view("w", (4, 8)), {"w": tensor}, [target], max_bytes=64)
    >>> [(read.span, read.nbytes) for read in reads]
    [((0, 16), 64), ((16, 32), 64)]
    """
    grids: defaultdict[object, list[tuple[ReadTarget, StridedPiece]]] = defaultdict(list)
    for target in targets:
        for piece in view.pieces_in(target.start, target.stop):
            # parts of one piece of the view lie in one grid of one tensor
            origin = piece.offset - sum(s * k for s, k in zip(piece.start, piece.strides, strict=True))
            grids[piece.tensor, piece.strides, origin].append((target, piece))
    for parts in grids.values():
        boxes = {(piece.start, piece.stop) for _, piece in parts}
        is_contiguous = all(_is_contiguous(piece) for _, piece in parts)
        for start, stop in sorted(boxes) if is_contiguous else merge_boxes(boxes):
            inside = tuple((target, part) for target, piece in parts if (part := piece.intersect(start, stop)))
            yield from _split_read(Read(tensors[inside[0][1].tensor], inside), max_bytes)


def run_read(read: Read) -> int:
    """Read a range, copy it into the targets, and return the number of bytes read.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.checkpoint.format.index import read_index
    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> from shardplan.storage import open_folder
    >>> target = ReadTarget((1, 0), np.empty((1, 3), np.float16))
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"w": np.arange(6, dtype=np.float32).reshape(2, 3)}, f"{folder}/model.safetensors")
    ...     (read,) = plan_reads(tensor_view("w", (2, 3)), read_index(open_folder(folder)), [target], max_bytes=2**20)
    ...     run_read(read)
    12
    >>> target.buffer.tolist()
    [[3.0, 4.0, 5.0]]

    Raises:
        ConfigError: a value is too large for the type of the target.
    """
    low, high = read.span
    tensor = read.tensor
    itemsize = tensor.dtype.itemsize
    offset = tensor.offset + low * tensor.bits // 8
    if len(read.pieces) == 1:
        target, piece = read.pieces[0]
        box = _target_box(target, piece)
        is_stored = not isinstance(tensor, ComputedTensor) and box.dtype == tensor.dtype and tensor.bits >= 8
        if is_stored and box.flags.c_contiguous and _is_row_major(piece) and piece.scale == 1:
            tensor.file.read_into(offset, box.reshape(-1).view(np.uint8).data)
            return read.nbytes
    scratch = _scratch(read.nbytes)
    tensor.file.read_into(offset, scratch.data)
    # as_strided does not know every type of ml_dtypes
    staging = unpack(scratch, tensor, low, high - low).view(f"u{itemsize}")
    for target, piece in read.pieces:
        strides = tuple(k * itemsize for k in piece.strides)
        words = np.lib.stride_tricks.as_strided(staging[piece.offset - low :], piece.shape, strides)
        source: Any = words.view(tensor.dtype)
        box = _target_box(target, piece)
        if isinstance(tensor, ComputedTensor):
            for part, numbers in tensor.number_slabs(source, piece):
                index: Any = (*part, ...)  # the ellipsis makes a 0-d array give a view, not a scalar
                _copy_scaled(box[index], numbers, piece, tensor.dims)
        else:
            _copy_scaled(box, source, piece, tensor.shape)
    return read.nbytes


def _copy_scaled(box: np.ndarray, values: np.ndarray, piece: StridedPiece, shape: Shape) -> None:
    """Copy the elements of a piece of a tensor of `shape` into `box`, times the piece's factor."""
    if piece.scale != 1:
        values = values.astype(np.float32) * np.float32(piece.scale)
    copy_cast(box, values, piece, shape)


def _scratch(nbytes: int) -> np.ndarray:
    """Return this thread's scratch memory; the next call returns the same memory again."""
    if getattr(_thread, "scratch", _EMPTY).nbytes < nbytes:
        _thread.scratch = np.empty(nbytes, np.uint8)
    scratch: np.ndarray = _thread.scratch[:nbytes]
    return scratch


def _is_contiguous(piece: StridedPiece) -> bool:
    low, high = piece.span
    return high - low == piece.size


def _split_read(read: Read, max_bytes: int) -> Iterator[Read]:
    """Split a read into disjoint reads of at most `max_bytes`, along the outermost dimension of its bounding box."""
    box = read.bounding_box
    extended = [d for d, n in enumerate(box.shape) if n > 1]
    runs = find_runs(box, read.tensor.bits).count
    if not extended or (read.nbytes <= max_bytes and runs == 1):
        yield read
        return
    outer = max(extended, key=lambda d: box.strides[d])
    low, high = box.start[outer], box.stop[outer]
    # the gaps between several runs are too long to be read: each run is a read of its own
    count = max(1, (high - low) * max_bytes // read.nbytes) if runs == 1 else 1
    for start in range(low, high, count):
        parts = tuple(
            (target, part) for target, piece in read.pieces if (part := _clip_piece(piece, outer, start, start + count))
        )
        if parts and count > 1:
            yield replace(read, pieces=parts)
        elif parts:
            yield from _split_read(replace(read, pieces=parts), max_bytes)


def _clip_piece(piece: StridedPiece, dimension: int, start: int, stop: int) -> StridedPiece | None:
    """Return the part of a piece inside `[start, stop)` along one dimension; None if it is empty."""
    low, high = list(piece.start), list(piece.stop)
    low[dimension], high[dimension] = start, stop
    return piece.intersect(tuple(low), tuple(high))


def _target_box(target: ReadTarget, piece: StridedPiece) -> np.ndarray:
    box = (slice(s - o, s - o + n) for s, o, n in zip(piece.start, target.start, piece.shape, strict=True))
    index: tuple[Any, ...] = (..., *box)  # the ellipsis makes a 0-d array give a view, not a scalar
    return target.buffer[index]


def _is_row_major(piece: StridedPiece) -> bool:
    expected = row_major_strides(piece.shape)
    return all(k == e for n, k, e in zip(piece.shape, piece.strides, expected, strict=True) if n > 1)
