"""Strided views of checkpoint tensors: the tensor element behind every element of an array. Pure arithmetic.

A `View` describes an array of the model as boxes of elements. Each box is a strided window on one checkpoint tensor, as
`numpy.lib.stride_tricks.as_strided` makes them. Views compose under the operations of a converter (stack, reshape,
transpose, ...), so the slice of an array that a device needs can be traced back to exact element ranges of tensors.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import itemgetter

import numpy as np

from shardplan.checkpoint.mapping.pieces import PieceGroup, Shape, StridedPiece, group_pieces, join_alike


@dataclass(frozen=True, eq=False)
class View:
    """An array of `shape` made of disjoint pieces; an element outside all pieces has no tensor element."""

    shape: Shape
    parts: tuple[PieceGroup, ...] = ()

    @classmethod
    def of_pieces(cls, shape: Shape, pieces: Iterable[StridedPiece]) -> "View":
        """Make a view of separate pieces; pieces of equal shape and strides are grouped."""
        return cls(shape, tuple(group_pieces(pieces)))

    @property
    def pieces(self) -> Iterator[StridedPiece]:
        """Every piece of the view, as a `StridedPiece`."""
        return itertools.chain.from_iterable(part.separate() for part in self.parts)

    @property
    def piece_count(self) -> int:
        """Number of pieces."""
        return sum(len(part.tensors) for part in self.parts)

    @property
    def is_complete(self) -> bool:
        """Whether every element comes from the checkpoint."""
        return sum(part.size for part in self.parts) == math.prod(self.shape)

    @property
    def is_scaled(self) -> bool:
        """Whether a factor other than 1 multiplies some elements."""
        return any(part.scale != 1 for part in self.parts)

    @cached_property
    def tensors(self) -> tuple[str, ...]:
        """The tensors that the pieces are read from, in the order of their first pieces."""
        return tuple(dict.fromkeys(itertools.chain.from_iterable(part.tensors for part in self.parts)))

    @property
    def stored_order(self) -> tuple[int, ...]:
        """Dimensions in the order of storage: first dimensions across tensors, then dimensions by decreasing stride."""
        if not self.parts:
            return tuple(range(len(self.shape)))
        first = self.parts[0]
        strides = [k if n > 1 else math.inf for n, k in zip(first.shape, first.strides, strict=True)]
        return tuple(sorted(range(len(self.shape)), key=lambda d: -strides[d]))

    def pieces_in(self, start: Shape, stop: Shape) -> Iterator[StridedPiece]:
        """Yield the parts of the pieces inside the box `[start, stop)`."""
        return itertools.chain.from_iterable(part.separate() for part in self.parts_in(start, stop))

    def parts_in(self, start: Shape, stop: Shape) -> Iterator[PieceGroup]:
        """Yield the parts of the pieces inside the box `[start, stop)`, grouped where shape and strides are equal."""
        for part, orders in zip(self.parts, self._orders, strict=True):
            nearby = None
            for d, (order, firsts) in orders.items():
                low = np.searchsorted(firsts, start[d] - part.shape[d], "right")
                high = np.searchsorted(firsts, stop[d], "left")
                if nearby is None or high - low < len(nearby):
                    nearby = order[low:high]
            yield from (part if nearby is None else part.take(nearby)).intersect(start, stop)

    @cached_property
    def _orders(self) -> list[dict[int, tuple[np.ndarray, np.ndarray]]]:
        """For each of `parts`, the order of its pieces along each dimension in which they start at different indices.

        An order is the indices of the pieces, sorted by where they start along the dimension, and these starts.
        """
        found = []
        for part in self.parts:
            several = np.flatnonzero((part.starts != part.starts[0]).any(axis=0)).tolist()
            orders = {d: np.argsort(part.starts[:, d], kind="stable") for d in several}
            found.append({d: (order, part.starts[order, d]) for d, order in orders.items()})
        return found

    def rename(self, name_of: Callable[[str], str]) -> "View":
        """Return this view on tensors with other names."""
        return View(self.shape, tuple(p._replace(tensors=tuple(map(name_of, p.tensors))) for p in self.parts))

    def scale(self, factor: float) -> "View":
        """Multiply every element by `factor`."""
        return View(self.shape, tuple(part._replace(scale=part.scale * factor) for part in self.parts))

    def transpose(self, permutation: Sequence[int]) -> "View":
        """Reorder the dimensions as `numpy.transpose` does."""
        if tuple(permutation) == tuple(range(len(self.shape))):
            return self
        permute, order = itemgetter(*permutation), list(permutation)
        parts = [
            PieceGroup(permute(p.shape), permute(p.strides), p.scale, p.tensors, p.starts[:, order], p.offsets)
            for p in self.parts
        ]
        return View(permute(self.shape), tuple(parts))

    def broadcast(self, shape: Shape, dimensions: Sequence[int]) -> "View":
        """Broadcast as `jax.lax.broadcast_in_dim`: dimension i becomes dimension `dimensions[i]` of the result.

        A new dimension, or one that is stretched from size 1, has stride 0.
        """
        kept = {d: i for i, d in enumerate(dimensions) if self.shape[i] == shape[d]}

        def broadcast_part(part: PieceGroup) -> PieceGroup:
            starts, extent, strides = np.zeros((len(part.tensors), len(shape)), np.int64), list(shape), [0] * len(shape)
            for d, i in kept.items():
                starts[:, d], extent[d], strides[d] = part.starts[:, i], part.shape[i], part.strides[i]
            return part._replace(shape=tuple(extent), strides=tuple(strides), starts=starts)

        return View(shape, tuple(map(broadcast_part, self.parts)))

    def slice(self, start: Shape, stop: Shape) -> "View":
        """Return the box `[start, stop)` as a view of its own."""
        back = tuple(-first for first in start)
        parts = (part.move(back) for part, _ in join_alike([*self.parts_in(start, stop)]))
        return View(tuple(b - a for a, b in zip(start, stop, strict=True)), tuple(parts))

    def reshape(self, shape: Shape) -> "View":
        """Reshape as `numpy.reshape` does; a piece that is not a box in the new shape is split into several."""
        if shape == self.shape:
            return self
        if 0 in shape:
            return View(shape)
        groups = _reshape_groups(self.shape, shape)
        pieces = (_reshape_piece(piece, self.shape, shape, groups) for piece in self.pieces)
        return View.of_pieces(shape, itertools.chain.from_iterable(pieces))


def tensor_view(name: str, shape: Shape) -> View:
    """View all of a checkpoint tensor, row-major.

    >>> [(each.tensor, each.shape, each.strides) for each in tensor_view("w", (4, 2)).pieces]
    [('w', (4, 2), (2, 1))]
    """
    return View(shape, (PieceGroup(shape, row_major_strides(shape), 1.0, (name,), *_origin(len(shape))),))


@lru_cache
def _origin(rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the start and the offset of a piece that begins at index 0 of the view and of its tensor."""
    return np.zeros((1, rank), np.int64), np.zeros(1, np.int64)


def concatenate(views: Sequence[View], dimension: int) -> View:
    """Concatenate views as `numpy.concatenate` does.

    >>> both = concatenate([tensor_view("gate", (4, 2)), tensor_view("up", (4, 2))], 0)
    >>> both.shape, [(each.tensor, each.start) for each in both.pieces]
    ((8, 2), [('gate', (0, 0)), ('up', (4, 0))])
    """
    parts: list[PieceGroup] = []
    position = 0
    for view in views:
        distance = _set_item((0,) * len(view.shape), dimension, position)
        parts += (part.move(distance) for part in view.parts)
        position += view.shape[dimension]
    return View(_set_item(views[0].shape, dimension, position), tuple(part for part, _ in join_alike(parts)))


def stack(views: Sequence[View], dimension: int) -> View:
    """Stack views as `numpy.stack` does.

    >>> layers = stack([tensor_view("layers.0.norm", (8,)), tensor_view("layers.1.norm", (8,))], 0)
    >>> layers.shape, [each.tensor for each in layers.pieces_in((1, 0), (2, 8))]
    ((2, 8), ['layers.1.norm'])
    """

    def insert(values: Shape, value: int) -> Shape:
        return (*values[:dimension], value, *values[dimension:])

    of_part = np.repeat(np.arange(len(views)), [len(view.parts) for view in views])
    parts = []
    for part, numbers in join_alike([*itertools.chain.from_iterable(view.parts for view in views)]):
        starts = np.insert(part.starts, dimension, of_part[numbers], axis=1)
        parts.append(part._replace(shape=insert(part.shape, 1), strides=insert(part.strides, 0), starts=starts))
    return View(insert(views[0].shape, len(views)), tuple(parts))


@lru_cache(maxsize=4096)  # of the few shapes of a hundred thousand tensors
def row_major_strides(shape: Shape) -> Shape:
    """Return the number of elements between neighbours along each dimension of a row-major array.

    >>> row_major_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _set_item(values: Shape, index: int, value: int) -> Shape:
    return (*values[:index], value, *values[index + 1 :])


DimensionGroup = tuple[range, range]
"""A group of dimensions of the old shape, and the dimensions of the new shape that hold the same elements."""


def _reshape_groups(old: Shape, new: Shape) -> list[DimensionGroup]:
    """Find the smallest runs of dimensions with equal products; each run can be reshaped separately."""
    groups: list[DimensionGroup] = []
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


def _reshape_piece(piece: StridedPiece, old: Shape, new: Shape, groups: list[DimensionGroup]) -> list[StridedPiece]:
    """Express `piece` in the coordinates of the new shape, as the product of the boxes of all groups."""
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
"""Start, shape and strides of a box in the new dimensions, and the number of elements of the old box before it."""


def _regroup(start: Shape, shape: Shape, strides: Shape, old: Shape, new: Shape) -> list[StridedBox]:
    """Express a box in coordinates `old` as the fewest boxes of constant strides in coordinates `new`."""
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
    """Return the constant spacing of a box's elements in row-major order of `old`; None if it is not constant."""
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

    >>> split_range(1, 4, (2, 3))
    [((0, 1), (1, 2), 0), ((1, 0), (1, 2), 2)]

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
