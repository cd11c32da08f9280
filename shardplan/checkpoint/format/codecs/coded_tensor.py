"""Tensors that are stored as codes, of which groups share a scale, and their numbers.

A number is that of its code, less the zero point of its group, times the scale of its group, in float32. Groups are
boxes of codes in the order in which they are stored, the last ones along a dimension smaller. Only the scales of the
codes that are read are read, so that a shard needs its own bytes of both.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.header import Tensor, bytes_of
from shardplan.checkpoint.mapping.views import Piece, Shape, View, row_major_strides
from shardplan.errors import CheckpointError

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
SLAB_ELEMENTS = 2**20
"""Numbers that are made at a time: 4 MiB of float32."""
HALF_BYTES = (np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.float4_e2m1fn))
"""Types of codes of four bits."""
HALF_BYTE_CODES, BYTE_CODES = 16, 256
MIN_ROWS = 8
"""Mean number of rows in a group from which those of each group are made by themselves."""


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The scales, or the zero points, of the groups of a tensor."""

    name: str
    """Name of their tensor, for messages."""
    tensor: Tensor
    strides: Shape
    """Elements between those of neighbouring groups, along each dimension of the codes."""
    is_scale: bool = True

    def read(self, first: int, groups: Shape) -> np.ndarray:
        """Read those of some groups, from row `first` of groups on: float32 of shape `groups`.

        Raises:
            CheckpointError: a scale is not a positive number.
        """
        low = first * self.strides[0] if groups else 0
        count = 1 + sum((n - 1) * k for n, k in zip(groups, self.strides, strict=True))
        values = read_elements(self.tensor, low, count).astype(np.float32)
        if self.is_scale:
            valid = np.isfinite(values) & (values > 0)
            if not valid.all():
                index = int(np.argmin(valid))
                raise CheckpointError(
                    f"{self.tensor.file.name}: {self.name} has {values[index]:g} as scale {low + index}; it must be "
                    "positive: download the file again, or quantize the model again"
                )
        return np.lib.stride_tricks.as_strided(values, groups, tuple(k * values.itemsize for k in self.strides))


@dataclass(frozen=True, slots=True)
class CodedTensor(Tensor):
    """A tensor of codes with their scales and zero points; its shape is that of its numbers."""

    code_bits: int = 8
    """Bits of a code; of two codes of four bits in a byte, the first one is in the low half."""
    dims: Shape = ()
    """Dimensions of the codes, in the order in which they are stored."""
    group: Shape = ()
    """Codes that share a scale, along each of these dimensions."""
    scale: GroupValues | None = None
    zero: GroupValues | None = None
    """Stored zero points."""
    zero_offset: float = 0.0
    """What is added to stored zero points; the zero point of all codes where none is stored."""
    layout: View | None = None
    """The numbers as a view of the codes; None if these are in the order of the numbers."""

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.code_bits

    @property
    def nbytes(self) -> int:
        """Length of the codes."""
        return bytes_of(math.prod(self.dims) * self.code_bits)

    @property
    def value_dtype(self) -> np.dtype:
        """Type of its numbers where no other is asked for: that of most released checkpoints."""
        return BFLOAT16

    @property
    def groups(self) -> Shape:
        """Number of groups along each dimension."""
        return tuple(-(-n // size) for n, size in zip(self.dims, self.group, strict=True))

    def view(self, name: str) -> View | None:
        """Return the numbers as a view of the codes of a tensor called `name`; None if they are in the same order."""
        if self.layout is None:
            return None
        return View(self.layout.shape, tuple(piece._replace(tensor=name) for piece in self.layout.pieces))

    def read_groups(self, low: int, high: int) -> "GroupRows":
        """Read scales and zero points of the codes `[low, high)`.

        Raises:
            CheckpointError: a scale is not a positive number.
        """
        assert self.scale is not None
        row = row_major_strides(self.dims)[0] if self.dims else 1
        rows = self.group[0] if self.dims else 1
        first, last = low // row // rows, (high - 1) // row // rows + 1
        groups = (last - first, *self.groups[1:]) if self.dims else ()
        zeros = None if self.zero is None else self.zero.read(first, groups) + np.float32(self.zero_offset)
        return GroupRows(self.scale.read(first, groups), zeros, first)


@dataclass(frozen=True)
class GroupRows:
    """The scales and zero points of some rows of groups."""

    scales: np.ndarray
    """float32[rows of groups, groups along the other dimensions]."""
    zeros: np.ndarray | None
    """The same of zero points."""
    first: int
    """Number of the first row of groups."""


def read_elements(tensor: Tensor, low: int, count: int) -> np.ndarray:
    """Read elements of a tensor in the order in which they are stored, from element `low` on."""
    begin = low * tensor.bits // 8
    data = np.empty(bytes_of((low + count) * tensor.bits) - begin, np.uint8)
    tensor.file.read_into(tensor.offset + begin, data.data)
    return unpack(data, tensor, low, count)


def unpack(data: np.ndarray, tensor: Tensor, low: int, count: int) -> np.ndarray:
    """Return the elements `[low, low + count)` of a tensor, one in a byte or more, from the bytes that hold them."""
    if tensor.bits >= 8:
        return data.view(tensor.dtype)
    halves = np.empty(2 * data.size, np.uint8)
    np.bitwise_and(data, 15, out=halves[0::2])
    np.right_shift(data, 4, out=halves[1::2])
    return halves[low % 2 :][:count].view(tensor.dtype)


def decoded_slabs(
    tensor: CodedTensor, codes: np.ndarray, piece: Piece, rows: GroupRows
) -> Iterator[tuple[slice, np.ndarray]]:
    """Yield the numbers of a piece in slabs along its first dimension, each with where it begins and ends.

    Args:
        codes: the codes of the piece.
    """
    if not piece.shape:
        zero = tensor.zero_offset if rows.zeros is None else rows.zeros.reshape(-1)[0]
        yield slice(None), (_numbers(codes) - np.float32(zero)) * rows.scales.reshape(-1)[0]
        return
    groups = _groups(tensor, piece, rows.first)
    for part in _slabs(piece, groups):
        numbers = _numbers(codes[part])
        of_part = [_reduce(each[part] if each.shape[0] > 1 else each) for each in groups]
        if rows.zeros is not None:
            numbers -= _of_each(rows.zeros, of_part)
        elif tensor.zero_offset:
            numbers -= np.float32(tensor.zero_offset)
        numbers *= _of_each(rows.scales, of_part)
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


def _of_each(values: np.ndarray, groups: list[np.ndarray]) -> np.ndarray:
    """Return the value of every code's group in an array that broadcasts; along the last dimension, one of a group."""
    count = max(each.shape[-1] for each in groups)
    firsts = _first_of_groups(groups, groups[0].ndim - 1)
    found = values[tuple(each[..., firsts] if each.shape[-1] > 1 else each for each in groups)]
    return found if len(firsts) == 1 else np.repeat(found, np.diff([*firsts, count]), axis=-1)


def _groups(tensor: CodedTensor, piece: Piece, first: int) -> list[np.ndarray]:
    """Return the group of every element of a piece along each dimension of the codes, in arrays that broadcast.

    Args:
        first: number of the row of groups that counts as the first.
    """
    groups = []
    for coordinate, size in zip(_coordinates(tensor.dims, piece), tensor.group, strict=True):
        groups.append(_reduce(coordinate // size))
    groups[0] = groups[0] - first
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
    """The number of each code of a type."""
    count = HALF_BYTE_CODES if dtype in HALF_BYTES else BYTE_CODES
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)


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
