"""Tensors that are stored as codes with one scale per group, and the decoding of codes to values.

A number is that of its code, less the zero point of its group, times the scale of its group, in float32. Groups are
boxes of codes in the order in which they are stored, the last ones along a dimension smaller. Only the scales of the
codes that are read are read, so that a shard needs its own bytes of both.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import HALF_BYTES, Tensor, bytes_of
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape, View, row_major_strides
from shardplan.errors import CheckpointError

SLAB_ELEMENTS = 2**18
"""Number of elements that are decoded at a time: 1 MiB of float32."""
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
"""The largest finite number of bfloat16, which float32 can hold as well."""
HALF_BYTE_CODES, BYTE_CODES = 16, 256
MIN_ROWS = 8
"""Decode each group's rows separately if groups have at least this many rows on average."""


@dataclass(frozen=True, slots=True)
class CommonScale:
    """A number by which all scales of a tensor are multiplied or divided."""

    name: str
    """Name of the tensor that holds the number, for messages."""
    tensor: Tensor
    divides: bool = False

    def apply(self, scales: np.ndarray) -> np.ndarray:
        """Return the scales multiplied or divided by the number.

        Raises:
            CheckpointError: the common scale is not a positive number.
        """
        value = read_elements(self.tensor, 0, 1).astype(np.float32)
        _check_positive(value, self.name, self.tensor, int)
        return scales / value if self.divides else scales * value


@dataclass(frozen=True, slots=True)
class GroupValues:
    """The scales, or the zero points, of the groups of a tensor."""

    name: str
    """Name of the tensor that holds the values, for messages."""
    tensor: Tensor
    strides: Shape
    """Elements between the values of neighbouring groups, along each dimension of the codes."""
    is_scale: bool = True
    common: CommonScale | None = None

    def read(self, first: int, groups: Shape) -> np.ndarray:
        """Read the values of consecutive groups, starting at row `first` of the groups: float32 of shape `groups`.

        Raises:
            CheckpointError: a scale is not a positive number.
        """
        low = first * self.strides[0] if groups else 0
        count = 1 + sum((n - 1) * k for n, k in zip(groups, self.strides, strict=True))
        values = self.in_float32(read_elements(self.tensor, low, count), lambda index: low + index)
        return np.lib.stride_tricks.as_strided(values, groups, tuple(k * values.itemsize for k in self.strides))

    def in_float32(self, stored: np.ndarray, number_of: Callable[[int], int]) -> np.ndarray:
        """Convert stored values to float32, and apply the scale that is common to all.

        Args:
            number_of: index among these values, in row-major order -> number in the tensor, for messages.

        Raises:
            CheckpointError: a scale is not a positive number.
        """
        values = stored.astype(np.float32)
        if self.is_scale:
            _check_positive(values.reshape(-1), self.name, self.tensor, number_of)
        return values if self.common is None else self.common.apply(values)


def _check_positive(scales: np.ndarray, name: str, tensor: Tensor, number_of: Callable[[int], int]) -> None:
    """Check that scales are positive numbers.

    Args:
        scales: float32[scales].
        name: name of the tensor of scales, for messages.
        number_of: index among these scales -> number in the tensor.

    Raises:
        CheckpointError: a scale is not a positive number.
    """
    valid = np.isfinite(scales) & (scales > 0)
    if not valid.all():
        index = int(np.argmin(valid))
        raise CheckpointError(
            f"{tensor.file.name}: {name} has {scales[index]:g} as scale {number_of(index)}; it must be positive: "
            "download the file again, or quantize the model again"
        )


@dataclass(frozen=True, slots=True)
class RowGroups:
    """The group of every row of a tensor whose rows are not ordered by group (GPTQ's act-order)."""

    name: str
    """Name of the tensor that holds the groups, for messages."""
    tensor: Tensor
    """Group of each row, int32[rows]."""
    rows: int
    """Number of rows per step along the first dimension of the codes; the codes' last dimension indexes them."""

    def read(self, first: int, last: int, groups: int) -> np.ndarray:
        """Read the groups of the rows of steps first .. last - 1: int[step, row of the step].

        Args:
            groups: number of groups of the tensor.

        Raises:
            CheckpointError: a row names a group that does not exist.
        """
        found = read_elements(self.tensor, first * self.rows, (last - first) * self.rows)
        wrong = (found < 0) | (found >= groups)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise CheckpointError(
                f"{self.tensor.file.name}: {self.name} has {found[row]} as the group of row {first * self.rows + row}, "
                f"and there are {groups}; download the file again"
            )
        return found.reshape(-1, self.rows)


class CodedTensor(ComputedTensor, frozen=True, gc=False):
    """A tensor stored as codes, scales and zero points; it has the shape of its decoded values."""

    code_dims: Shape = ()
    """Dimensions of the codes, in the order in which they are stored."""
    group: Shape = ()
    """Number of codes that share a scale, along each of `code_dims`."""
    scale: GroupValues | None = None
    zero: GroupValues | None = None
    """Stored zero points; None if there are none."""
    zero_offset: float = 0.0
    """Offset added to stored zero points; without stored ones, the zero point of all codes."""
    layout: View | None = None
    """The decoded values as a view of the codes; None if they are in the order of the codes."""
    row_groups: RowGroups | None = None

    @property
    def dims(self) -> Shape:
        """Dimensions of the codes, in the order in which they are stored."""
        return self.code_dims

    @property
    def has_blocks(self) -> bool:
        """Whether each value is (code - one common zero point) * scale of the code's block."""
        return bool(self.dims) and self.scale is not None and self.zero is None and self.row_groups is None

    @property
    def groups(self) -> Shape:
        """Number of groups along each dimension."""
        return tuple(-(-n // size) for n, size in zip(self.dims, self.group, strict=True))

    @property
    def all_bytes(self) -> int:
        """Bytes of codes, scales, zero points and groups."""
        total = self.nbytes
        for values in (self.scale, self.zero):
            if values is not None:
                total += values.tensor.nbytes
                total += 0 if values.common is None else values.common.tensor.nbytes
        return total + (0 if self.row_groups is None else self.row_groups.tensor.nbytes)

    def view(self, name: str) -> View | None:
        """Return the decoded values as a view of the codes of a tensor `name`; None if both are in the same order."""
        return None if self.layout is None else self.layout.rename(lambda _: name)

    def number_slabs(self, stored: np.ndarray, piece: StridedPiece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the decoded values of a piece, one slab at a time; see `ComputedTensor.number_slabs`.

        Raises:
            CheckpointError: a scale is not a positive number.
        """
        return _decoded_slabs(self, stored, piece, self._read_groups(*piece.span))

    def _read_groups(self, low: int, high: int) -> "GroupRows":
        """Read the scales and zero points of the codes in the box `[low, high)`."""
        if not self.dims:
            return GroupRows(self._read_scales(0, ()), None, 0)
        row = row_major_strides(self.dims)[0]
        steps = low // row, (high - 1) // row + 1
        first, last = steps[0] // self.group[0], (steps[1] - 1) // self.group[0] + 1
        order = None
        if self.row_groups is not None:
            order = self.row_groups.read(*steps, self.groups[0])
            in_order = np.arange(steps[0] * order.shape[1], steps[1] * order.shape[1]) // (
                self.group[0] * order.shape[1]
            )
            if np.array_equal(order.reshape(-1), in_order):
                order = None
            else:
                first, last = int(order.min()), int(order.max()) + 1
        groups = (last - first, *self.groups[1:])
        zeros = None if self.zero is None else self.zero.read(first, groups) + np.float32(self.zero_offset)
        return GroupRows(self._read_scales(first, groups), zeros, first, order, steps[0])

    def _read_scales(self, first: int, groups: Shape) -> np.ndarray:
        assert self.scale is not None
        scales = self.scale.read(first, groups)
        self.check_range(scales)
        return scales

    def check_range(self, scales: np.ndarray) -> None:
        """Check that every code with one of these scales gives a finite value.

        Raises:
            CheckpointError: a code would give an infinite value.
        """
        largest = float(scales.max())
        if largest > LARGEST / _largest_code(self.dtype):
            assert self.scale is not None
            raise CheckpointError(
                f"{self.file.name}: {self.scale.name} has the scale {largest:g}, with which numbers are infinite; "
                "download the file again, or quantize the model again"
            )


@dataclass(frozen=True)
class GroupRows:
    """The scales and zero points of the groups that a read needs, row by row of groups."""

    scales: np.ndarray
    """Scales, float32[rows of groups, groups along the other dimensions]."""
    zeros: np.ndarray | None
    """Zero points, shaped as `scales`; None if none are stored."""
    first: int
    """Index of the first row of groups that was read."""
    order: np.ndarray | None = None
    """Row of groups that each row belongs to, [step, row of the step], for the steps from `first_step` on."""
    first_step: int = 0


_BYTES = np.arange(BYTE_CODES, dtype=np.uint8)
_HALVES = np.stack([_BYTES & 15, _BYTES >> 4], axis=-1).view(np.uint16).reshape(-1)
"""The two halves of each byte, low half first."""


def read_elements(tensor: Tensor, low: int, count: int) -> np.ndarray:
    """Read elements of a tensor in the order in which they are stored, from element `low` on.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.checkpoint.format.index import read_index
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"embed": np.arange(6.0).reshape(2, 3)}, f"{folder}/model.safetensors")
    ...     read_elements(read_index(open_folder(folder))["embed"], 2, 3).tolist()
    [2.0, 3.0, 4.0]
    """
    begin = low * tensor.bits // 8
    data = np.empty(bytes_of((low + count) * tensor.bits) - begin, np.uint8)
    tensor.file.read_into(tensor.offset + begin, data.data)
    return unpack(data, tensor, low, count)


def unpack(data: np.ndarray, tensor: Tensor, low: int, count: int) -> np.ndarray:
    """Return the elements `[low, low + count)` of a tensor, each in its own byte or bytes, from the stored bytes.

    >>> from shardplan.checkpoint.format.header import UINT4
    >>> unpack(np.array([0x21, 0x43], np.uint8), Tensor(None, 0, (4,), UINT4), 1, 2).astype(int).tolist()
    [2, 3]
    """
    if tensor.bits >= 8:
        return data.view(tensor.dtype)
    halves = _HALVES.take(data).view(np.uint8)
    return halves[low % 2 :][:count].view(tensor.dtype)


def _decoded_slabs(
    tensor: CodedTensor, codes: np.ndarray, piece: StridedPiece, rows: GroupRows
) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
    """Decode a piece of codes one slab at a time; yield the slices of each slab in the piece, and its values."""
    if not piece.shape:
        zero = tensor.zero_offset if rows.zeros is None else rows.zeros.reshape(-1)[0]
        yield (), (_numbers(codes) - np.float32(zero)) * rows.scales.reshape(-1)[0]
        return
    groups = _groups(tensor, piece, rows)
    for part in slabs(piece, groups):
        numbers = _numbers(codes[part])
        of_part = [_reduce(part_of(each, part)) for each in groups]
        firsts = _first_of_groups(of_part, len(piece.shape) - 1)
        if rows.zeros is not None:
            _apply(np.subtract, numbers, rows.zeros, of_part, firsts)
        elif tensor.zero_offset:
            numbers -= np.float32(tensor.zero_offset)
        _apply(np.multiply, numbers, rows.scales, of_part, firsts)
        yield part, numbers


def slabs(piece: StridedPiece, groups: list[np.ndarray]) -> Iterator[tuple[slice, ...]]:
    """Yield slices that divide a piece into slabs of few elements, and also at the borders of long groups.

    >>> list(slabs(StridedPiece((0, 0), (4, SLAB_ELEMENTS // 2), "w", 0, (SLAB_ELEMENTS // 2, 1)), []))
    [(slice(0, 2, None),), (slice(2, 4, None),)]

    Args:
        groups: see `_groups`; empty for values without groups.
    """
    shape, size, d = piece.shape, piece.size, 0
    while d < len(shape) - 1 and size > SLAB_ELEMENTS * shape[d]:  # one index of the dimension is more than a slab
        size //= shape[d]
        d += 1
    rows = shape[d]
    most = max(1, SLAB_ELEMENTS * rows // max(1, size))
    changes = _first_of_groups(groups, d)
    if rows < MIN_ROWS * len(changes):
        changes = np.zeros(1, np.int64)
    for outer in itertools.product(*map(range, shape[:d])):
        leading = tuple(slice(index, index + 1) for index in outer)
        for first, last in itertools.pairwise([*changes.tolist(), rows]):
            for start in range(first, last, most):
                yield (*leading, slice(start, min(start + most, last)))


def part_of(groups: np.ndarray, part: tuple[slice, ...]) -> np.ndarray:
    """Slice an array that broadcasts to a piece, so that it broadcasts to the part of the piece.

    >>> part_of(np.array([[1, 2, 3]]), (slice(5, 9), slice(1, 3)))
    array([[2, 3]])
    """
    return groups[tuple(each if n > 1 else slice(None) for each, n in zip(part, groups.shape, strict=False))]


def _first_of_groups(groups: list[np.ndarray], dimension: int) -> np.ndarray:
    """Return the indices along a dimension at which a group begins, 0 included.

    >>> _first_of_groups([np.array([[0, 0, 1, 1]]), np.array([[3]])], 1)
    array([0, 2])
    """
    found = [np.zeros(1, np.int64)]
    for each in groups:
        others = tuple(d for d in range(each.ndim) if d != dimension)
        found.append(np.flatnonzero(np.diff(each, axis=dimension).any(axis=others)) + 1)
    return np.unique(np.concatenate(found))


def _apply(
    function: np.ufunc, numbers: np.ndarray, values: np.ndarray, groups: list[np.ndarray], firsts: np.ndarray
) -> None:
    """Apply a function, in place, to decoded values and the values of their groups.

    Args:
        groups: see `_groups`.
        firsts: indices along the last dimension at which groups begin.
    """
    last = numbers.shape[-1]
    of_each = values[tuple(each[..., firsts] if each.shape[-1] > 1 else each for each in groups)]
    sizes = np.diff([*firsts, last])
    if len(sizes) > 1 and (sizes == sizes[0]).all():
        numbers = numbers.reshape(*numbers.shape[:-1], len(sizes), sizes[0])
        of_each = of_each[..., None]
    elif len(sizes) > 1:
        of_each = np.repeat(of_each, sizes, axis=-1)
    function(numbers, of_each, out=numbers)


def _groups(tensor: CodedTensor, piece: StridedPiece, rows: GroupRows) -> list[np.ndarray]:
    """Return the group of every element of a piece along each dimension of the codes, in arrays that broadcast.

    Along the first dimension, groups are counted from the first one in `rows`.
    """
    coordinates = element_coordinates(tensor.dims, piece)
    groups = [_reduce(coordinate // size) for coordinate, size in zip(coordinates, tensor.group, strict=True)]
    if rows.order is not None:
        groups[0] = _reduce(rows.order[coordinates[0] - rows.first_step, coordinates[-1]])
    groups[0] = groups[0] - rows.first
    return groups


def _reduce(group: np.ndarray) -> np.ndarray:
    """Shrink to length 1 every dimension along which all elements are equal."""
    for d in range(group.ndim):
        if group.shape[d] > 1 and not np.diff(group, axis=d).any():
            group = group.take([0], axis=d)
    return group


def _numbers(codes: np.ndarray) -> np.ndarray:
    """Convert codes of one byte to the values they stand for, in float32."""
    # no index is beyond the table, and without a look for such indices it takes half the time
    return _table(codes.dtype).take(codes.view(np.uint8), mode="clip")


@lru_cache
def _largest_code(dtype: np.dtype) -> float:
    """Return the largest absolute value that a code of a type stands for, before its zero point is subtracted."""
    numbers = np.abs(_table(dtype))
    return float(numbers[np.isfinite(numbers)].max())


@lru_cache
def _table(dtype: np.dtype) -> np.ndarray:
    """Return the value that each code of a type stands for, float32[code]."""
    count = HALF_BYTE_CODES if dtype in HALF_BYTES else BYTE_CODES
    return np.arange(count, dtype=np.uint8).view(dtype).astype(np.float32)


def element_coordinates(shape: Shape, piece: StridedPiece) -> list[np.ndarray]:
    """Return the index of every element of a piece along each dimension of its tensor; the arrays broadcast.

    >>> rows, columns = element_coordinates((4, 6), StridedPiece((0, 0), (2, 3), "t", 8, (6, 1)))
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
