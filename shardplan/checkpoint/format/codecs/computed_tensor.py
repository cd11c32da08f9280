"""Tensors whose values are computed from stored bytes while these are read."""

import math
from abc import abstractmethod
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.header import Tensor, bytes_of
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape, View


class ComputedTensor(Tensor, frozen=True, gc=False):
    """A tensor whose values are computed from stored elements; `dtype` is for the elements, `shape` for the values."""

    @property
    @abstractmethod
    def dims(self) -> Shape:
        """Dimensions of the stored elements, in the order in which they are stored."""

    @property
    def value_dtype(self) -> np.dtype:
        """Type of the values for models that keep the checkpoint's types; they are computed in float32."""
        return np.dtype(ml_dtypes.bfloat16)

    @property
    def nbytes(self) -> int:
        """Bytes of the stored elements."""
        return bytes_of(math.prod(self.dims) * self.bits)

    def view(self, name: str) -> View | None:
        """Return the values as a view of the elements of a tensor `name`; None if both are in the same order."""
        return None

    @abstractmethod
    def number_slabs(self, stored: np.ndarray, piece: StridedPiece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the values of a piece in float32, a few elements (a slab) at a time, to bound memory.

        Args:
            stored: the stored elements of the piece.

        Yields:
            The slices of the slab in the piece, and its values, which the caller may overwrite.
        """
