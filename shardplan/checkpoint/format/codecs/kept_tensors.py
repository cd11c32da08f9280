"""The codes and the scales of tensors that stay on the devices as they are stored."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor, check_positive
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import Piece, Shape


@dataclass(frozen=True, slots=True)
class StoredScales(ComputedTensor):
    """A tensor of scales, which are checked while they are read."""

    name: str = ""
    """Its name, for messages."""

    @property
    def dims(self) -> Shape:
        """Dimensions of the scales."""
        return self.shape

    def number_slabs(self, stored: np.ndarray, piece: Piece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the scales of a piece in float32.

        Raises:
            CheckpointError: one is not a positive number.
        """
        scales = stored.astype(np.float32)
        check_positive(scales.reshape(-1), self.name, self, piece.offset)
        yield (), scales


def codes_of(tensor: CodedTensor) -> Tensor:
    """Return the codes of a tensor as a tensor of their own."""
    return Tensor(tensor.file, tensor.offset, tensor.shape, tensor.dtype, tensor.path, tensor.is_listed)


def scales_of(tensor: CodedTensor) -> StoredScales:
    """Return the scales of a tensor as a tensor of their own."""
    assert tensor.scale is not None
    stored = tensor.scale.tensor
    return StoredScales(
        stored.file, stored.offset, stored.shape, stored.dtype, stored.path, stored.is_listed, tensor.scale.name
    )
