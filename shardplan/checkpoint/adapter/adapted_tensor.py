"""Matrices of a checkpoint to which an adapter is added while they are read."""

from collections.abc import Iterator

import numpy as np

from shardplan.checkpoint.adapter.factors import Factors
from shardplan.checkpoint.format.codecs.coded_tensor import element_coordinates, part_of, slabs
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape, View, row_major_strides

Digits = tuple[Shape, Shape]
"""(Row steps, column steps): how far one step along each dimension of the codes moves in the matrix."""


class AdaptedTensor(ComputedTensor, frozen=True, gc=False, kw_only=True):
    """A matrix of a checkpoint, stored as plain values or as codes, plus its change by an adapter."""

    base: Tensor
    """The matrix without the adapter."""
    factors: Factors
    digits: Digits | None = None
    """Row and column steps of each dimension of the codes; None if the values are in the order of the codes."""

    @property
    def dims(self) -> Shape:
        """Dimensions of the stored elements, in the order in which they are stored."""
        return self.base.dims if isinstance(self.base, ComputedTensor) else self.base.shape

    @property
    def all_bytes(self) -> int:
        """Bytes of the base tensor and its parts; the adapter's matrices, which are read only once, do not count."""
        return self.base.all_bytes

    @property
    def value_dtype(self) -> np.dtype:
        """Type of the base matrix's values, for models that keep the checkpoint's types."""
        return self.base.value_dtype

    def view(self, name: str) -> View | None:
        """Return the values as a view of the elements of a tensor `name`; None if both are in the same order."""
        return self.base.view(name) if isinstance(self.base, ComputedTensor) else None

    def number_slabs(self, stored: np.ndarray, piece: StridedPiece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the values of a piece in float32, a few elements (a slab) at a time; see `ComputedTensor.number_slabs`.

        Raises:
            CheckpointError: a matrix of the adapter, or a scale of a coded base, cannot be read or is damaged.
        """
        matrices = self.factors.matrices()
        rows, columns = self._coordinates(piece)
        for part, numbers in self._base_slabs(stored, piece):
            # each sum is rounded once, to float32
            numbers += matrices.change(part_of(rows, part), part_of(columns, part))
            yield part, numbers

    def _base_slabs(self, stored: np.ndarray, piece: StridedPiece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the values of a piece without the adapter, in float32, one slab at a time."""
        if isinstance(self.base, ComputedTensor):
            yield from self.base.number_slabs(stored, piece)
            return
        for part in slabs(piece, []):
            yield part, stored[part].astype(np.float32)

    def _coordinates(self, piece: StridedPiece) -> tuple[np.ndarray, np.ndarray]:
        """Return the row and the column of every element of a piece, in arrays that broadcast."""
        if self.digits is None:
            rows, columns = element_coordinates(self.shape, piece)
            return rows, columns
        codes = element_coordinates(self.dims, piece)
        rows, columns = (
            sum((each * step for each, step in zip(codes, steps, strict=True)), np.zeros((1,) * len(piece.shape), int))
            for steps in self.digits
        )
        return rows, columns


def adapt_tensor(base: Tensor, factors: Factors, digits: Digits | None) -> AdaptedTensor:
    """Return a matrix plus its change by an adapter.

    Args:
        digits: see `AdaptedTensor.digits`.
    """
    return AdaptedTensor(
        base.file, base.offset, base.shape, base.dtype, base.path, base.is_listed, base=base, factors=factors,
        digits=digits,
    )  # fmt: skip


def find_digits(layout: View, dims: Shape) -> Digits:
    """Return how many rows and columns of the matrix one step along each dimension of the stored codes moves.

    Layouts only divide, permute and join dimensions, so the row of a code is the sum of its indices times the row
    steps, and the column is the sum of its indices times the column steps. The steps along a dimension are read off the
    code whose index is 1 in this dimension and 0 in all others.

    >>> from shardplan.checkpoint.mapping.views import tensor_view
    >>> find_digits(tensor_view("w", (2, 3, 4)).transpose((0, 2, 1)).reshape((8, 3)), (2, 3, 4))
    ((4, 0, 1), (0, 1, 0))

    Args:
        layout: the numbers {rows, columns} as a view of the codes.
        dims: dimensions of the codes, in the order in which they are stored.
    """
    found = [
        (0, 0) if size == 1 else _index_of(layout, element)
        for element, size in zip(row_major_strides(dims), dims, strict=True)
    ]
    return tuple(row for row, _ in found), tuple(column for _, column in found)


def _index_of(layout: View, element: int) -> tuple[int, int]:
    """Return the (row, column) of the value whose stored code is element `element`."""
    for piece in layout.pieces:
        low, high = piece.span
        if not low <= element < high:
            continue
        rest, index = element - piece.offset, list(piece.start)
        for d in sorted(range(len(index)), key=lambda d: -piece.strides[d]):
            if piece.shape[d] > 1:
                steps, rest = divmod(rest, piece.strides[d])
                index[d] += steps
        if rest == 0 and all(a <= i < b for a, i, b in zip(piece.start, index, piece.stop, strict=True)):
            return index[0], index[1]
    raise ValueError(f"no number has the code {element}")
