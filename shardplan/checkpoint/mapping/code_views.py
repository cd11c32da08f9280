"""Computes which tensor elements make up an array of codes, and an array of their scales. Pure arithmetic.

A view says which element of a tensor is at each index of a weight. The codes are these elements. All codes of a block
have one scale, so that the scale of its first code is read for the block.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from operator import floordiv, mod, mul
from typing import NamedTuple

import numpy as np

from shardplan.checkpoint.mapping.pieces import PieceGroup, join_alike
from shardplan.checkpoint.mapping.views import Shape, View, row_major_strides

MAX_BOXES = 1024
"""Maximum number of boxes of scales for a piece of codes; each box is a read."""


class Scales(NamedTuple):
    """Where the scales of a coded tensor are: the group of codes that share a scale, and the strides of the scales."""

    shape: Shape
    """Dimensions of the tensor of codes."""
    group: Shape
    """Number of codes that share a scale, along each dimension of the codes."""
    strides: Shape
    """Elements between neighbouring scales, along each dimension of the codes."""


def find_blocks(view: View, scales: Mapping[str, Scales]) -> Shape | None:
    """Return the sizes of the largest blocks of a view such that all codes of a block share a scale.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> find_blocks(tensor_view("w", (256, 512)), {"w": Scales((256, 512), (128, 128), (4, 1))})
    (128, 128)

    Args:
        scales: tensor name -> layout of the tensor's scales.

    Returns:
        None if the indices along a dimension of a piece run past the end of a dimension of its tensor.
    """
    blocks = view.shape
    for part in view.parts:
        for offset, of_tensor in set(_codes_of_pieces(part, scales)):
            of_piece = _blocks_of_piece(offset, part.shape, part.strides, of_tensor)
            if of_piece is None:
                return None
            blocks = tuple(map(math.gcd, blocks, of_piece))
        blocks = tuple(map(math.gcd, blocks, np.gcd.reduce(part.starts, axis=0).tolist()))
    return blocks


def _codes_of_pieces(part: PieceGroup, scales: Mapping[str, Scales]) -> Iterator[tuple[int, Scales]]:
    """Yield the first code of each piece, and the layout of its tensor's scales."""
    return zip(part.offsets.tolist(), map(scales.__getitem__, part.tensors), strict=True)


@lru_cache(maxsize=4096)  # the tensors of all layers have the same
def _blocks_of_piece(offset: int, shape: Shape, strides: Shape, scales: Scales) -> Shape | None:
    """Return the sizes of a piece's blocks; see `find_blocks`."""
    moves = _moves(shape, strides, scales.shape)
    blocks = list(shape)
    for d, start in enumerate(map(int, np.unravel_index(offset, scales.shape))):
        steps = {i: step for i, (dimension, step) in moves.items() if dimension == d}
        if start + sum(step * (shape[i] - 1) for i, step in steps.items()) >= scales.shape[d]:
            return None
        if scales.group[d] >= scales.shape[d] or not steps:  # all have one scale
            continue
        fastest = min(steps, key=lambda i: steps[i])
        step = steps.pop(fastest)
        blocks[fastest] = 1
        for i in steps:
            blocks[i] = 1
        # every block begins at a multiple of `unit`, or fewer codes than a step behind one
        unit = math.gcd(scales.group[d], start - start % step, *steps.values())
        if unit % step == 0:
            blocks[fastest] = math.gcd(unit // step, shape[fastest])
    return tuple(blocks)


def first_of_blocks(view: View, counts: Shape) -> View:
    """Return the first element of each block of a view.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> [(each.shape, each.strides) for each in first_of_blocks(tensor_view("w", (256, 512)), (2, 4)).pieces]
    [((2, 4), (65536, 128))]

    Args:
        counts: number of blocks along each dimension.
    """
    blocks = tuple(n // count for n, count in zip(view.shape, counts, strict=True))
    parts = []
    for part in view.parts:
        starts, divided = np.divmod(part.starts, np.array(blocks, np.int64))
        if divided.any() or any(map(mod, part.shape, blocks)):
            return _first_of_divided_blocks(view, blocks)
        extents, strides = tuple(map(floordiv, part.shape, blocks)), tuple(map(mul, part.strides, blocks))
        parts.append(part._replace(shape=extents, strides=strides, starts=starts))
    return View(counts, tuple(parts))


def _first_of_divided_blocks(view: View, blocks: Shape) -> View:
    """Return the first element of each block if blocks may span several pieces."""
    divided: list[int] = []
    ends: list[int] = []
    for n, size in zip(view.shape, blocks, strict=True):
        divided += (n // size, size)
        ends += (n // size, 1)
    counts = tuple(ends[::2])
    return view.reshape(tuple(divided)).slice((0,) * len(ends), tuple(ends)).reshape(counts)


def view_of_scales(view: View, scales: Mapping[str, Scales], max_pieces: float = math.inf) -> View | None:
    """Return a view with the scale of every code in a view of codes, under the names of the codes' tensors.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> scales = view_of_scales(tensor_view("w", (256, 128)), {"w": Scales((256, 128), (128, 128), (1, 1))})
    >>> [(each.start, each.shape, each.offset, each.strides) for each in scales.pieces]
    [((0, 0), (128, 128), 0, (0, 0)), ((128, 0), (128, 128), 1, (0, 0))]

    Args:
        scales: tensor name -> layout of the tensor's scales.

    Returns:
        None if the scales of one piece of codes would be too many pieces, or all scales more than `max_pieces`.
    """
    parts: list[PieceGroup] = []
    count = 0
    for part in view.parts:
        alike: defaultdict[tuple[int, Scales], list[int]] = defaultdict(list)
        for number, codes in enumerate(_codes_of_pieces(part, scales)):
            alike[codes].append(number)
        for (offset, of_tensor), numbers in alike.items():
            boxes = _boxes_of_scales(offset, part.shape, part.strides, of_tensor)
            count += len(numbers) * len(boxes or ())
            if boxes is None or count > max_pieces:
                return None
            pieces = part.take(np.array(numbers))
            for start, shape, first, strides in boxes:
                offsets = np.full_like(pieces.offsets, first)
                parts.append(pieces.move(start)._replace(shape=shape, strides=strides, scale=1.0, offsets=offsets))
    return View(view.shape, tuple(part for part, _ in join_alike(parts)))


Box = tuple[Shape, Shape, int, Shape]
"""A box of scales: start and shape in the piece, the first scale, and the elements between neighbouring scales."""


@lru_cache(maxsize=4096)  # the tensors of all layers have the same
def _boxes_of_scales(offset: int, shape: Shape, strides: Shape, scales: Scales) -> tuple[Box, ...] | None:
    """Return the scales of a piece's elements as boxes of constant strides; None if there would be too many boxes."""
    moves = _moves(shape, strides, scales.shape)
    first_scale, steps = 0, [0] * len(shape)
    for d, start in enumerate(np.unravel_index(offset, scales.shape)):
        along = {i: step for i, (dimension, step) in moves.items() if dimension == d}
        groups = _groups(int(start), along, shape)
        if groups.max() >= scales.shape[d]:  # goes over the end of the dimension
            outer = max((i for i, count in enumerate(shape) if count > 1), key=lambda i: strides[i])
            return _divided(offset, shape, strides, scales, outer, range(shape[outer]))
        groups //= scales.group[d]
        origin = int(groups.flat[0])
        expected = np.full_like(groups, origin)
        for place, i in enumerate(along):
            index = [0] * groups.ndim
            index[place] = 1
            step = int(groups[tuple(index)]) - origin
            expected = expected + _along(np.arange(shape[i]) * step, place, groups.ndim)
            steps[i] = step * scales.strides[d]
        if not np.array_equal(groups, expected):
            outer = max(along, key=lambda i: along[i])
            cuts = range(shape[outer]) if len(along) > 1 else _first_of_runs(groups)
            return _divided(offset, shape, strides, scales, outer, cuts)
        first_scale += origin * scales.strides[d]
    return (((0,) * len(shape), shape, first_scale, tuple(steps)),)


def _moves(shape: Shape, strides: Shape, tensor: Shape) -> dict[int, tuple[int, int]]:
    """Return dimension of the piece -> (dimension of the tensor, step), for dimensions with more than one element."""
    weights = row_major_strides(tensor)
    moves = {}
    for i, (count, stride) in enumerate(zip(shape, strides, strict=True)):
        if count > 1 and stride:  # a stride of 0 repeats an element
            d = next(d for d, weight in enumerate(weights) if stride % weight == 0 and tensor[d] > 1)
            moves[i] = d, stride // weights[d]
    return moves


def _groups(start: int, along: Mapping[int, int], shape: Shape) -> np.ndarray:
    """Return each element's index along one tensor dimension, in an array with a dimension per entry of `along`."""
    index = np.full([1] * len(along), start)
    for place, (i, step) in enumerate(along.items()):
        index = index + _along(np.arange(shape[i]) * step, place, len(along))
    return index


def _along(values: np.ndarray, dimension: int, rank: int) -> np.ndarray:
    return values.reshape([-1 if d == dimension else 1 for d in range(rank)])


def _first_of_runs(groups: np.ndarray) -> list[int]:
    """Return the indices at which a run of equal groups begins, 0 included."""
    return [0, *(np.flatnonzero(np.diff(groups.reshape(-1))) + 1).tolist()]


def _divided(
    offset: int, shape: Shape, strides: Shape, scales: Scales, outer: int, cuts: Sequence[int]
) -> tuple[Box, ...] | None:
    """Divide a piece along the dimension `outer`, and return the boxes of its parts; None if there are too many.

    Args:
        outer: index of the dimension.
        cuts: first index of each part; a part longer than one index lies in one group.
    """
    boxes: list[Box] = []
    for first, last in itertools.pairwise([*cuts, shape[outer]]):
        part = (*shape[:outer], last - first, *shape[outer + 1 :])
        repeated = (*strides[:outer], 0, *strides[outer + 1 :])
        found = _boxes_of_scales(offset + first * strides[outer], part, repeated, scales)
        if found is None or len(boxes) + len(found) > MAX_BOXES:
            return None
        for start, box_shape, scale, steps in found:
            boxes.append(((*start[:outer], first + start[outer], *start[outer + 1 :]), box_shape, scale, steps))
    return tuple(boxes)
