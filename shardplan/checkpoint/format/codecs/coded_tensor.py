"""Tensors that are stored as codes, of which groups share a scale, and their numbers.

A number is that of its code, times the scale of its group, in float32. Groups are boxes of equal size, the last ones
along a dimension smaller; scales are stored row-major, one for each group. Only the scales of the codes that are read
are read, so that a shard needs its own bytes of both.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import Piece, Shape, row_major_strides
from shardplan.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SLAB_ELEMENTS = 2**20
"""Numbers that are made at a time: 4 MiB of float32."""
MIN_ROWS = 8
"""Mean number of rows in a group from which those of each group are made by themselves."""


@dataclass(frozen=True, slots=True)
class CodedTensor(Tensor):
    """The codes of a tensor, with their scales."""

    scale: Tensor | None = None
    """Its data are the scales of all groups; its shape may be shorter than theirs."""
    group: Shape = ()
    """Codes that share a scale, along each dimension."""

    @property
    def value_dtype(self) -> np.dtype:
        """Type of its numbers where no other is asked for: that of most released checkpoints."""
        return BFLOAT16

    @property
    def groups(self) -> Shape:
        """Number of groups along each dimension."""
        return tuple(-(-n // size) for n, size in zip(self.shape, self.group, strict=True))

    def read_scales(self, name: str, low: int, high: int) -> "Scales":
        """Read the scales of the codes `[low, high)`, in row-major order.

        Args:
            name: that of the tensor, for messages.

        Raises:
            CheckpointError: one is not a positive number.
        """
        assert self.scale is not None
        groups = self.groups
        if not self.shape:
            first, last, in_row = 0, 1, 1
        else:
            row = row_major_strides(self.shape)[0]
            first, last = low // row // self.group[0], (high - 1) // row // self.group[0] + 1
            in_row = row_major_strides(groups)[0]
        size = self.scale.dtype.itemsize
        values = np.empty((last - first) * in_row, self.scale.dtype)
        self.scale.file.read_into(self.scale.offset + first * in_row * size, values.view(np.uint8).data)
        numbers = values.astype(np.float32)
        valid = np.isfinite(numbers) & (numbers > 0)
        if not valid.all():
            index = first * in_row + int(np.argmin(valid))
            value = numbers[index - first * in_row]
            raise CheckpointError(
                f"{self.scale.file.name}: scale {index} of {name} is {value:g}; it must be positive: download the file "
                "again, or quantize the model again"
            )
        return Scales(numbers.reshape(last - first, *groups[1:]) if self.shape else numbers.reshape(()), first)


@dataclass(frozen=True)
class Scales:
    """The scales of some rows of groups."""

    values: np.ndarray
    """float32[rows of groups, groups along the other dimensions]."""
    first: int
    """Number of the first row of groups."""


def decoded_slabs(
    tensor: CodedTensor, codes: np.ndarray, piece: Piece, scales: Scales
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the numbers of a piece in slabs along its first dimension, each with where it begins and ends.

    Args:
        codes: the codes of the piece.
    """
    if not piece.shape:
        yield slice(None), _numbers(codes) * scales.values.reshape(-1)[0]
        return
    groups = _groups(tensor, piece, scales)
    for part in _slabs(piece, groups):
        numbers = _numbers(codes[part])
        numbers *= _factors(scales, [_reduce(each[part] if each.shape[0] > 1 else each) for each in groups])
        yield part, numbers


def _slabs(piece: Piece, groups: list[np.ndarray]) -> Iterator[slice]:
    """Yield parts of the first dimension of a piece: of few elements, and of one group where groups are long.

    Args:
        groups: see `_groups`.
    """
    rows = piece.shape[0]
    most = max(1, SLAB_ELEMENTS // max(1, piece.size // rows))
    changes = _first_of_groups(groups, 0)
    if rows < MIN_ROWS * len(changes):
        changes = np.zeros(1, np.int64)
    for first, last in itertools.pairwise([*changes.tolist(), rows]):
        for start in range(first, last, most):
            yield slice(start, min(start + most, last))


def _first_of_groups(groups: list[np.ndarray], dimension: int) -> np.ndarray:
    """Return the indices along a dimension at which another group begins than before, and 0.

    >>> _first_of_groups([np.array([[0, 0, 1, 1]]), np.array([[3]])], 1)
    array([0, 2])
    """
    found = [np.zeros(1, np.int64)]
    for each in groups:
        others = tuple(d for d in range(each.ndim) if d != dimension)
        found.append(np.flatnonzero(np.diff(each, axis=dimension).any(axis=others)) + 1)
    return np.unique(np.concatenate(found))


def _factors(scales: Scales, groups: list[np.ndarray]) -> np.ndarray:
    """Return the scale of every code in an array that broadcasts; along the last dimension, one is read for a group."""
    count = max(each.shape[-1] for each in groups)
    firsts = _first_of_groups(groups, groups[0].ndim - 1)
    factors = scales.values[tuple(each[..., firsts] if each.shape[-1] > 1 else each for each in groups)]
    return factors if len(firsts) == 1 else np.repeat(factors, np.diff([*firsts, count]), axis=-1)


def _groups(tensor: CodedTensor, piece: Piece, scales: Scales) -> list[np.ndarray]:
    """Return the group of every element of a piece along each dimension of its tensor, in arrays that broadcast."""
    groups = []
    for coordinate, size in zip(_coordinates(tensor.shape, piece), tensor.group, strict=True):
        groups.append(_reduce(coordinate // size))
    groups[0] = groups[0] - scales.first
    return groups


def _reduce(group: np.ndarray) -> np.ndarray:
    """Return an array with one element along every dimension along which all are equal."""
    for d in range(group.ndim):
        if group.shape[d] > 1 and not np.diff(group, axis=d).any():
            group = group.take([0], axis=d)
    return group


def _numbers(codes: np.ndarray) -> np.ndarray:
    """Return the numbers of codes of one byte, in float32."""
    return _table(codes.dtype).take(codes.view(np.uint8))


@lru_cache
def _table(dtype: np.dtype) -> np.ndarray:
    """The number of each of the 256 codes of a type."""
    return np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)


def _coordinates(shape: Shape, piece: Piece) -> list[np.ndarray]:
    """Return the index of every element of a piece along each dimension of its tensor; the arrays broadcast.

    >>> rows, columns = _coordinates((4, 6), Piece((0, 0), (2, 3), "t", 8, (6, 1)))
    >>> rows.tolist(), columns.tolist()
    ([[1], [2]], [[2, 3, 4]])
    """
    first = np.unravel_index(piece.offset, shape)
    weights = row_major_strides(shape)
    rank = len(piece.shape)
    moves = [np.zeros((1,) * rank, np.int64) + int(start) for start in first]
    for d, (count, stride) in enumerate(zip(piece.shape, piece.strides, strict=True)):
        if count == 1 or stride == 0:
            continue
        # the outermost dimension of the tensor that the stride is a multiple of
        c = next(c for c, weight in enumerate(weights) if stride % weight == 0 and shape[c] > 1)
        steps = np.arange(count, dtype=np.int64) * (stride // weights[c])
        moves[c] = moves[c] + steps.reshape([-1 if i == d else 1 for i in range(rank)])
    if all(int(move.max()) < n for move, n in zip(moves, shape, strict=True)):
        return moves
    # a dimension of the piece goes over the end of one of the tensor
    elements = np.full((1,) * rank, piece.offset, np.int64)
    for d, (count, stride) in enumerate(zip(piece.shape, piece.strides, strict=True)):
        elements = elements + (np.arange(count) * stride).reshape([-1 if i == d else 1 for i in range(rank)])
    return list(np.unravel_index(elements, shape))
