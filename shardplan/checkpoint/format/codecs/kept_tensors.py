"""The codes and the scales of a coded tensor as tensors of their own, to be loaded as arrays of their own."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import Piece, Shape


@dataclass(frozen=True, slots=True)
class StoredScales(ComputedTensor):
    """The tensor of scales of a coded tensor, which are checked while they are read."""

    owner: CodedTensor | None = None

    @property
    def dims(self) -> Shape:
        """Dimensions of the scales."""
        return self.shape

    def number_slabs(self, stored: np.ndarray, piece: Piece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the scales of a piece in float32.

        Raises:
            CheckpointError: one is not a positive number, or so large that numbers are infinite.
        """
        assert self.owner is not None and self.owner.scale is not None
        scales = self.owner.scale.in_float32(stored, piece.offset)
        self.owner.check_range(scales)
        yield (), scales


def codes_of(tensor: CodedTensor) -> Tensor:
    """Return the codes of a tensor as a tensor of their own."""
    return Tensor(tensor.file, tensor.offset, tensor.dims, tensor.dtype, tensor.path, tensor.is_listed)


def scales_of(tensor: CodedTensor) -> StoredScales:
    """Return the scales of a tensor as a tensor of their own."""
    assert tensor.scale is not None
    stored = tensor.scale.tensor
    return StoredScales(
        stored.file, stored.offset, stored.shape, stored.dtype, stored.path, stored.is_listed, owner=tensor
    )
