"""Strided views of checkpoint tensors: the tensor element behind every element of an array. Pure arithmetic.

A `View` describes an array of the model as boxes of elements. Each box is a strided window on one checkpoint tensor, as
`numpy.lib.stride_tricks.as_strided` makes them. Views compose under the operations of a converter (stack, reshape,
transpose, ...), so the slice of an array that a device needs can be traced back to exact element ranges of tensors.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import add, itemgetter
from typing import NamedTuple

Shape = tuple[int, ...]


class Piece(NamedTuple):  # quicker to make than a frozen dataclass; schedules make a hundred thousand
    """A box of a view: the elements `[start, start + shape)`, read from one tensor with constant strides."""

    start: Shape
    """First index of the box in the view, per dimension."""
    shape: Shape
    """Extent of the box, per dimension."""
    tensor: str
    offset: int
    """Element of the tensor that is at index `start` of the view."""
    strides: Shape
    """Elements of the tensor between neighbours along each dimension; 0 repeats an element."""
    scale: float = 1.0
    """Factor that the elements are multiplied by."""

    def intersect(self, start: Shape, stop: Shape) -> "Piece | None":
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
        return Piece(tuple(lows), tuple(extents), self.tensor, offset, self.strides, self.scale)

    @property
    def stop(self) -> Shape:
        """One past the last index of the box, per dimension."""
        return tuple(map(add, self.start, self.shape))

    @property
    def span(self) -> tuple[int, int]:
        """First element of the tensor that the box contains, and one past the last."""
        return self.offset, self.offset + 1 + sum((n - 1) * k for n, k in zip(self.shape, self.strides, strict=True))

    @property
    def size(self) -> int:
        """Number of elements of the box."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class View:
    """An array of `shape` made of disjoint pieces; an element outside all pieces comes from no checkpoint tensor."""

    shape: Shape
    pieces: tuple[Piece, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether every element comes from the checkpoint."""
        return sum(piece.size for piece in self.pieces) == math.prod(self.shape)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that the pieces are read from, in the order of their first pieces."""
        return tuple(dict.fromkeys(piece.tensor for piece in self.pieces))

    @property
    def stored_order(self) -> tuple[int, ...]:
        """The dimensions in the order in which elements are stored: across tensors first, then longest stride first."""
        if not self.pieces:
            return tuple(range(len(self.shape)))
        piece = self.pieces[0]
        strides = [k if n > 1 else math.inf for n, k in zip(piece.shape, piece.strides, strict=True)]
        return tuple(sorted(range(len(self.shape)), key=lambda d: -strides[d]))

    def pieces_in(self, start: Shape, stop: Shape) -> Iterator[Piece]:
        """Yield the parts of the pieces inside the box `[start, stop)`."""
        candidates, first, last = self.pieces, 0, len(self.pieces)
        for d, (ordered, firsts, longest) in self._sorted.items():
            low, high = bisect_right(firsts, start[d] - longest), bisect_left(firsts, stop[d])
            if high - low < last - first:
                candidates, first, last = ordered, low, high
        return (part for piece in candidates[first:last] if (part := piece.intersect(start, stop)))

    @cached_property
    def _sorted(self) -> dict[int, tuple[tuple[Piece, ...], list[int], int]]:
        """Dimension along which pieces begin at different indices -> these in order, the indices, greatest extent."""
        found = {}
        for d in range(len(self.shape)):
            starts = [piece.start[d] for piece in self.pieces]
            if any(each != starts[0] for each in starts):
                order = sorted(range(len(starts)), key=starts.__getitem__)
                ordered = tuple(self.pieces[i] for i in order)
                found[d] = ordered, [starts[i] for i in order], max(piece.shape[d] for piece in ordered)
        return found

    def scale(self, factor: float) -> "View":
        """Multiply every element by `factor`."""
        return View(self.shape, tuple(piece._replace(scale=piece.scale * factor) for piece in self.pieces))

    def transpose(self, permutation: Sequence[int]) -> "View":
        """Reorder the dimensions as `numpy.transpose` does."""
        if tuple(permutation) == tuple(range(len(self.shape))):
            return self
        permute = itemgetter(*permutation)
        pieces = (
            Piece(permute(p.start), permute(p.shape), p.tensor, p.offset, permute(p.strides), p.scale)
            for p in self.pieces
        )
        return View(permute(self.shape), tuple(pieces))

    def broadcast(self, shape: Shape, dimensions: Sequence[int]) -> "View":
        """Broadcast as `jax.lax.broadcast_in_dim`: dimension i becomes dimension `dimensions[i]` of the result.

        A new dimension, or one that is stretched from size 1, has stride 0.
        """

        def broadcast_piece(piece: Piece) -> Piece:
            start, extent, strides = [0] * len(shape), list(shape), [0] * len(shape)
            for i, d in enumerate(dimensions):
                if self.shape[i] == shape[d]:
                    start[d], extent[d], strides[d] = piece.start[i], piece.shape[i], piece.strides[i]
            return piece._replace(start=tuple(start), shape=tuple(extent), strides=tuple(strides))

        return View(shape, tuple(map(broadcast_piece, self.pieces)))

    def slice(self, start: Shape, stop: Shape) -> "View":
        """Return the box `[start, stop)` as a view of its own."""
        pieces = (
            piece._replace(start=tuple(a - s for a, s in zip(piece.start, start, strict=True)))
            for piece in self.pieces_in(start, stop)
        )
        return View(tuple(b - a for a, b in zip(start, stop, strict=True)), tuple(pieces))

    def reshape(self, shape: Shape) -> "View":
        """Reshape as `numpy.reshape` does; a piece that is no box in the new shape is split into several."""
        if shape == self.shape:
            return self
        if 0 in shape:
            return View(shape)
        groups = _reshape_groups(self.shape, shape)
        pieces = itertools.chain.from_iterable(
            _reshape_piece(piece, self.shape, shape, groups) for piece in self.pieces
        )
        return View(shape, tuple(pieces))


def tensor_view(name: str, shape: Shape) -> View:
    """View all of a checkpoint tensor, row-major."""
    return View(shape, (Piece((0,) * len(shape), shape, name, 0, row_major_strides(shape)),))


def concatenate(views: Sequence[View], dimension: int) -> View:
    """Concatenate views as `numpy.concatenate` does."""
    pieces: list[Piece] = []
    position = 0
    for view in views:
        pieces += (p._replace(start=_set_item(p.start, dimension, p.start[dimension] + position)) for p in view.pieces)
        position += view.shape[dimension]
    return View(_set_item(views[0].shape, dimension, position), tuple(pieces))


def stack(views: Sequence[View], dimension: int) -> View:
    """Stack views as `numpy.stack` does."""

    def insert(values: Shape, value: int) -> Shape:
        return (*values[:dimension], value, *values[dimension:])

    pieces = [
        Piece(insert(p.start, i), insert(p.shape, 1), p.tensor, p.offset, insert(p.strides, 0), p.scale)
        for i, view in enumerate(views)
        for p in view.pieces
    ]
    return View(insert(views[0].shape, len(views)), tuple(pieces))


@lru_cache(maxsize=4096)  # of the few shapes of a hundred thousand tensors
def row_major_strides(shape: Shape) -> Shape:
    """Elements between neighbours along each dimension of a row-major array."""
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _set_item(values: Shape, index: int, value: int) -> Shape:
    return (*values[:index], value, *values[index + 1 :])


Group = tuple[range, range]
"""Dimensions of the old shape and of the new one that hold the same elements."""


def _reshape_groups(old: Shape, new: Shape) -> list[Group]:
    """Find the smallest runs of dimensions with equal products: each run can be reshaped by itself."""
    groups: list[Group] = []
    i = j = 0
    while i < len(old) or j < len(new):
        first_i, first_j = i, j
        product_old = old[i] if i < len(old) else 1
        product_new = new[j] if j < len(new) else 1
        i, j = min(i + 1, len(old)), min(j + 1, len(new))
        while product_old != product_new:
            if product_old < product_new:
                product_old, i = product_old * old[i], i + 1
            else:
                product_new, j = product_new * new[j], j + 1
        groups.append((range(first_i, i), range(first_j, j)))
    return groups


def _reshape_piece(piece: Piece, old: Shape, new: Shape, groups: list[Group]) -> list[Piece]:
    """Express `piece` in the coordinates of the new shape: the product of the boxes of all groups."""
    per_group = []
    for before, after in groups:
        axes = slice(before.start, before.stop)
        extents = tuple(new[d] for d in after)
        per_group.append(_regroup(piece.start[axes], piece.shape[axes], piece.strides[axes], old[axes], extents))
    result = []
    for combination in itertools.product(*per_group):
        start = tuple(itertools.chain.from_iterable(box[0] for box in combination))
        shape = tuple(itertools.chain.from_iterable(box[1] for box in combination))
        strides = tuple(itertools.chain.from_iterable(box[2] for box in combination))
        skipped = sum(box[3] for box in combination)
        result.append(piece._replace(start=start, shape=shape, strides=strides, offset=piece.offset + skipped))
    return result


StridedBox = tuple[Shape, Shape, Shape, int]
"""Start, shape and strides of a box in the new dimensions, and the elements that precede it."""


def _regroup(start: Shape, shape: Shape, strides: Shape, old: Shape, new: Shape) -> list[StridedBox]:
    """Express a box in coordinates `old` as boxes of constant strides in coordinates `new`, as few as possible."""
    if len(old) == 1 and len(new) == 1:
        return [(start, shape, strides, 0)]
    stride = _uniform_stride(shape, strides, old)
    if stride is not None:
        weights = row_major_strides(old)
        first = sum(s * w for s, w in zip(start, weights, strict=True))
        return [
            (box_start, box_shape, tuple(stride * w for w in row_major_strides(new)), stride * skipped)
            for box_start, box_shape, skipped in split_range(first, math.prod(shape), new)
        ]
    # not evenly spaced: split the outermost dimension of more than one entry into its entries
    outer = next(i for i, n in enumerate(shape) if n > 1)
    boxes: list[StridedBox] = []
    for index in range(shape[outer]):
        inner = _regroup(_set_item(start, outer, start[outer] + index), _set_item(shape, outer, 1), strides, old, new)
        boxes += ((a, b, c, skipped + index * strides[outer]) for a, b, c, skipped in inner)
    return boxes


def _uniform_stride(shape: Shape, strides: Shape, old: Shape) -> int | None:
    """Return the spacing of a box's elements in row-major order of `old`; None unless one evenly spaced range."""
    several = [i for i, n in enumerate(shape) if n > 1]
    if not several:
        return 1
    # a box that is partial in a dimension inside the outermost one has holes in row-major order
    if any(shape[i] != old[i] for i in range(several[0] + 1, len(old))):
        return None
    stride = strides[several[-1]]
    weights = row_major_strides(old)
    return stride if all(strides[i] == stride * weights[i] for i in several) else None


def split_range(first: int, count: int, shape: Shape) -> list[tuple[Shape, Shape, int]]:
    """Split the row-major range `[first, first + count)` of an array of `shape` into boxes.

    Returns:
        Start and shape of each box, and the number of elements of the range before it.
    """
    if not shape:
        return [((), (), 0)]
    row = math.prod(shape[1:])
    boxes: list[tuple[Shape, Shape, int]] = []
    position, end = first, first + count
    while position < end:
        index, within = divmod(position, row)
        if within == 0 and end - position >= row:
            rows = (end - position) // row
            boxes.append(((index,) + (0,) * (len(shape) - 1), (rows, *shape[1:]), position - first))
            position += rows * row
        else:
            part = min(end - position, row - within)
            boxes += (
                ((index, *start), (1, *extent), position - first + skipped)
                for start, extent, skipped in split_range(within, part, shape[1:])
            )
            position += part
    return boxes
