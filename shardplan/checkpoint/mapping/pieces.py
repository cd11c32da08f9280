"""Pieces of a view: strided windows on checkpoint tensors. Pieces of equal shape and strides are one object.

The experts of a giant are tens of thousands of pieces that differ in their tensors and in where they begin, and in
nothing else. They are one object, with NumPy arrays of where each begins. So an operation on a view takes as long for
all of them as for a few.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from operator import add
from typing import NamedTuple

import numpy as np

Shape = tuple[int, ...]


class StridedPiece(NamedTuple):  # quicker to make than a frozen dataclass; a load makes a hundred thousand
    """A box of a view: the elements `[start, start + shape)`, read from one tensor with constant strides."""

    start: Shape
    """First index of the box in the view, per dimension."""
    shape: Shape
    """Extent of the box, per dimension."""
    tensor: str
    offset: int
    """Index of the tensor element at `start` of the view."""
    strides: Shape
    """Tensor elements between neighbours along each dimension; 0 repeats an element."""
    scale: float = 1.0
    """Factor by which the elements are multiplied."""

    def intersect(self, start: Shape, stop: Shape) -> "StridedPiece | None":
        """Return the part of this piece inside the box `[start, stop)`, or None if it is empty."""
        offset = self.offset
        lows, extents = [], []
        for first, extent, stride, low, high in zip(self.start, self.shape, self.strides, start, stop, strict=True):
            if low > first:
                offset += (low - first) * stride
            else:
                low = first
            extent = min(first + extent, high) - low
            if extent <= 0:
                return None
            lows.append(low)
            extents.append(extent)
        return StridedPiece(tuple(lows), tuple(extents), self.tensor, offset, self.strides, self.scale)

    @property
    def stop(self) -> Shape:
        """One past the last index of the box, per dimension."""
        return tuple(map(add, self.start, self.shape))

    @property
    def span(self) -> tuple[int, int]:
        """First tensor element in the box, and one past the last."""
        return self.offset, self.offset + 1 + sum((n - 1) * k for n, k in zip(self.shape, self.strides, strict=True))

    @property
    def size(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)


class PieceGroup(NamedTuple):
    """Pieces of a view with equal shape and strides; they differ in their tensors and in where they start."""

    shape: Shape
    """Extent of each piece, per dimension."""
    strides: Shape
    """Tensor elements between neighbours along each dimension; 0 repeats an element."""
    scale: float
    """Factor by which the elements are multiplied."""
    tensors: tuple[str, ...]
    """Name of the tensor of each piece."""
    starts: np.ndarray
    """First index of each piece in the view, int64[piece, dimension]."""
    offsets: np.ndarray
    """Index of the tensor element at each piece's start, int64[piece]."""

    @property
    def size(self) -> int:
        """Number of elements of all pieces."""
        return len(self.tensors) * math.prod(self.shape)

    def separate(self) -> Iterator[StridedPiece]:
        """Yield each piece of the group as a `StridedPiece`."""
        for tensor, start, offset in zip(self.tensors, self.starts.tolist(), self.offsets.tolist(), strict=True):
            yield StridedPiece(tuple(start), self.shape, tensor, offset, self.strides, self.scale)

    def take(self, indices: np.ndarray) -> "PieceGroup":
        """Return the pieces with the given indices."""
        tensors = tuple([self.tensors[i] for i in indices.tolist()])
        return self._replace(tensors=tensors, starts=self.starts[indices], offsets=self.offsets[indices])

    def move(self, distance: Shape) -> "PieceGroup":
        """Return the pieces shifted by `distance` in the view."""
        return self._replace(starts=self.starts + np.array(distance, np.int64))

    def intersect(self, start: Shape, stop: Shape) -> "Iterator[PieceGroup]":
        """Yield the parts of the pieces inside the box `[start, stop)`, grouped by shape."""
        lows = np.maximum(self.starts, np.array(start, np.int64))
        highs = np.minimum(self.starts + np.array(self.shape, np.int64), np.array(stop, np.int64))
        offsets = self.offsets + (lows - self.starts) @ np.array(self.strides, np.int64)
        parts, extents = self._replace(starts=lows, offsets=offsets), highs - lows
        left = np.flatnonzero((extents > 0).all(axis=1))
        while len(left):
            shape = extents[left[0]]
            is_alike = (extents[left] == shape).all(axis=1)
            yield parts.take(left[is_alike])._replace(shape=tuple(shape.tolist()))
            left = left[~is_alike]


def group_pieces(pieces: Iterable[StridedPiece]) -> Iterator[PieceGroup]:
    """Group pieces by shape, strides and scale, and yield each group as one object.

    >>> rows = [StridedPiece((i, 0), (1, 4), f"layers.{i}", 0, (4, 1)) for i in range(3)]
    >>> [(group.tensors, group.starts.tolist()) for group in group_pieces(rows)]
    [(('layers.0', 'layers.1', 'layers.2'), [[0, 0], [1, 0], [2, 0]])]
    """
    groups: defaultdict[tuple[Shape, Shape, float], list[StridedPiece]] = defaultdict(list)
    for piece in pieces:
        groups[piece.shape, piece.strides, piece.scale].append(piece)
    for (shape, strides, scale), alike in groups.items():
        starts = np.array([piece.start for piece in alike], np.int64)
        offsets = np.array([piece.offset for piece in alike], np.int64)
        yield PieceGroup(shape, strides, scale, tuple([piece.tensor for piece in alike]), starts, offsets)


def join_alike(parts: Sequence[PieceGroup]) -> Iterator[tuple[PieceGroup, np.ndarray]]:
    """Join parts with equal shape and strides; yield each joined part, and for each piece the part that it came from.

    >>> rows = [StridedPiece((i, 0), (1, 4), f"layers.{i}", 0, (4, 1)) for i in range(3)]
    >>> parts = [*group_pieces(rows[:2]), *group_pieces(rows[2:])]
    >>> [(joined.tensors, of_piece.tolist()) for joined, of_piece in join_alike(parts)]
    [(('layers.0', 'layers.1', 'layers.2'), [0, 0, 1])]
    """
    groups: defaultdict[tuple[Shape, Shape, float], list[int]] = defaultdict(list)
    for number, part in enumerate(parts):
        groups[part.shape, part.strides, part.scale].append(number)
    for (shape, strides, scale), numbers in groups.items():
        alike = [parts[number] for number in numbers]
        tensors = tuple(itertools.chain.from_iterable([part.tensors for part in alike]))
        starts = np.concatenate([part.starts for part in alike])
        offsets = np.concatenate([part.offsets for part in alike])
        of_piece = np.repeat(numbers, [len(part.tensors) for part in alike])
        yield PieceGroup(shape, strides, scale, tensors, starts, offsets), of_piece
