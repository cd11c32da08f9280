"""Reads of tensors into host memory: which bytes together, and where each element goes."""

import threading
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import Piece, Shape, View, row_major_strides
from shardplan.checkpoint.transfer.schedule import merged, runs_of

_thread = threading.local()
_NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True)
class Target:
    """Memory for a box of an array."""

    start: Shape
    """First index of the box, per dimension."""
    buffer: np.ndarray

    @property
    def stop(self) -> Shape:
        """One past the last index, per dimension."""
        return tuple(s + n for s, n in zip(self.start, self.buffer.shape, strict=True))


@dataclass(frozen=True)
class Read:
    """Some elements of one tensor, read together, and the targets that take from them."""

    tensor: Tensor
    pieces: tuple[tuple[Target, Piece], ...]

    @property
    def span(self) -> tuple[int, int]:
        """First element of the tensor that is read, and one past the last."""
        spans = [piece.span for _, piece in self.pieces]
        return min(low for low, _ in spans), max(high for _, high in spans)

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        low, high = self.span
        return (high - low) * self.tensor.dtype.itemsize

    @property
    def together(self) -> Piece:
        """The box that its pieces fill."""
        pieces = [piece for _, piece in self.pieces]
        start = tuple(map(min, zip(*(piece.start for piece in pieces), strict=True)))
        stop = tuple(map(max, zip(*(piece.stop for piece in pieces), strict=True)))
        shape = tuple(b - a for a, b in zip(start, stop, strict=True))
        return replace(pieces[0], start=start, shape=shape, offset=self.span[0])


def reads(view: View, tensors: Mapping[str, Tensor], targets: Sequence[Target], most_bytes: int) -> Iterator[Read]:
    """What to read for boxes of an array, in disjoint parts of at most `most_bytes`.

    A target whose part of a tensor is contiguous on disk is read by itself. Where parts interleave (a tensor cut along
    an inner dimension), they are read once for all targets.
    """
    parts: defaultdict[object, list[tuple[Target, Piece]]] = defaultdict(list)
    for target in targets:
        for piece in view.inside(target.start, target.stop):
            # parts of one piece of the view lie in one grid of one tensor
            origin = piece.offset - sum(s * k for s, k in zip(piece.start, piece.strides, strict=True))
            parts[piece.tensor, piece.strides, origin].append((target, piece))
    for found in parts.values():
        boxes = {(piece.start, piece.stop) for _, piece in found}
        whole = all(_is_contiguous(piece) for _, piece in found)
        for start, stop in sorted(boxes) if whole else merged(boxes):
            inside = tuple((target, part) for target, piece in found if (part := piece.intersect(start, stop)))
            yield from _chunked(Read(tensors[inside[0][1].tensor], inside), most_bytes)


def fill(read: Read) -> int:
    """Read, and copy into the targets; returns the bytes read."""
    low, _ = read.span
    tensor = read.tensor
    itemsize = tensor.dtype.itemsize
    offset = tensor.offset + low * itemsize
    if len(read.pieces) == 1:
        target, piece = read.pieces[0]
        box = _box(target, piece)
        if box.dtype == tensor.dtype and box.flags.c_contiguous and _is_row_major(piece) and piece.scale == 1:
            tensor.file.read_into(offset, box.reshape(-1).view(np.uint8).data)
            return read.nbytes
    staging = _scratch(read.nbytes).view(tensor.dtype)
    tensor.file.read_into(offset, staging.view(np.uint8).data)
    for target, piece in read.pieces:
        strides = tuple(k * itemsize for k in piece.strides)
        source: Any = np.lib.stride_tricks.as_strided(staging[piece.offset - low :], piece.shape, strides)
        if piece.scale != 1:
            source = source.astype(np.float32) * np.float32(piece.scale)
        np.copyto(_box(target, piece), source, casting="unsafe")
    return read.nbytes


def _scratch(nbytes: int) -> np.ndarray:
    """Memory of this thread, used again and again: nothing keeps what is in it."""
    if getattr(_thread, "scratch", _NOTHING).nbytes < nbytes:
        _thread.scratch = np.empty(nbytes, np.uint8)
    found: np.ndarray = _thread.scratch[:nbytes]
    return found


def _is_contiguous(piece: Piece) -> bool:
    low, high = piece.span
    return high - low == piece.size


def _chunked(read: Read, most_bytes: int) -> Iterator[Read]:
    """`read` in disjoint parts of at most `most_bytes`, cut along the outermost dimension of its pieces together."""
    box = read.together
    extended = [d for d, n in enumerate(box.shape) if n > 1]
    runs = runs_of(box, read.tensor.dtype.itemsize).count
    if not extended or (read.nbytes <= most_bytes and runs == 1):
        yield read
        return
    outer = max(extended, key=lambda d: box.strides[d])
    low, high = box.start[outer], box.stop[outer]
    # several runs: the gaps between them are too long to be read
    count = max(1, (high - low) * most_bytes // read.nbytes) if runs == 1 else 1
    for start in range(low, high, count):
        parts = tuple(
            (target, part) for target, piece in read.pieces if (part := _rows(piece, outer, start, start + count))
        )
        if parts and count > 1:
            yield replace(read, pieces=parts)
        elif parts:
            yield from _chunked(replace(read, pieces=parts), most_bytes)


def _rows(piece: Piece, dimension: int, start: int, stop: int) -> Piece | None:
    low, high = list(piece.start), list(piece.stop)
    low[dimension], high[dimension] = start, stop
    return piece.intersect(tuple(low), tuple(high))


def _box(target: Target, piece: Piece) -> np.ndarray:
    box = (slice(s - o, s - o + n) for s, o, n in zip(piece.start, target.start, piece.shape, strict=True))
    index: tuple[Any, ...] = (..., *box)  # with the ellipsis a 0-d array too gives a view, not a scalar
    return target.buffer[index]


def _is_row_major(piece: Piece) -> bool:
    expected = row_major_strides(piece.shape)
    return all(k == e for n, k, e in zip(piece.shape, piece.strides, expected, strict=True) if n > 1)
