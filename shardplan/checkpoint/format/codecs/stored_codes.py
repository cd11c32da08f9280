"""Presents the codes and the scales of a coded tensor as separate tensors, so that each loads as an array."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor, GroupValues, slabs
from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import Shape
from shardplan.model.dtypes.kept_weights import CODES, owner_of


class StoredScales(ComputedTensor, frozen=True, gc=False):
    """The scales of a `CodedTensor` as a tensor of their own; they are checked while they are read."""

    owner: CodedTensor | None = None

    @property
    def dims(self) -> Shape:
        """Dimensions of the scales."""
        return self.shape

    def number_slabs(self, stored: np.ndarray, piece: StridedPiece) -> Iterator[tuple[tuple[slice, ...], np.ndarray]]:
        """Yield the scales of a piece in float32, one slab at a time; see `ComputedTensor.number_slabs`.

        Raises:
            CheckpointError: a scale is not a positive number, or so large that decoded values are infinite.
        """
        assert self.owner is not None and self.owner.scale is not None
        for part in slabs(piece, []):
            of_part = stored[part]
            scales = self.owner.scale.in_float32(of_part, partial(_number_in_tensor, piece, part, of_part.shape))
            self.owner.check_range(scales)
            yield part, scales


def _number_in_tensor(piece: StridedPiece, part: tuple[slice, ...], shape: Shape, index: int) -> int:
    """Return an element's row-major index in its tensor, from its index in a part of a piece.

    Args:
        part: part of the piece.
        shape: shape of the part.
        index: row-major index of the element in the part.
    """
    number = piece.offset
    firsts = [each.start for each in part] + [0] * (len(shape) - len(part))
    for i, first, stride in zip(np.unravel_index(index, shape), firsts, piece.strides, strict=True):
        number += (int(i) + first) * stride
    return number


class TensorsWithParts(dict[str, Tensor]):
    """The tensors of a checkpoint by name; names of codes and of scales are looked up too, and created on first use.

    They are created late because a process reads only a few of the hundred thousand tensors of a large model.
    """

    def __missing__(self, name: str) -> Tensor:
        owner = self.get(owner_of(name))
        if not isinstance(owner, CodedTensor):
            raise KeyError(name)
        part = self[name] = codes_of(owner) if name.endswith(CODES) else scales_of(owner)
        return part


def codes_of(tensor: CodedTensor) -> Tensor:
    """Return the codes of a coded tensor as a separate tensor.

    >>> scales = GroupValues("w_scale", Tensor(None, 0, (2, 1), np.dtype(np.float32)), (1, 1))
    >>> codes = {"code_dims": (256, 128), "group": (128, 128), "scale": scales}
    >>> weight = CodedTensor(None, 0, (256, 128), np.dtype(np.int8), **codes)
    >>> codes_of(weight).shape, codes_of(weight).dtype
    ((256, 128), dtype('int8'))
    """
    return Tensor(tensor.file, tensor.offset, tensor.dims, tensor.dtype, tensor.path, tensor.is_listed)


def scales_of(tensor: CodedTensor) -> StoredScales:
    """Return the scales of a coded tensor as a separate tensor.

    >>> scales = GroupValues("w_scale", Tensor(None, 0, (2, 1), np.dtype(np.float32)), (1, 1))
    >>> codes = {"code_dims": (256, 128), "group": (128, 128), "scale": scales}
    >>> weight = CodedTensor(None, 0, (256, 128), np.dtype(np.int8), **codes)
    >>> scales_of(weight).shape, scales_of(weight).dtype
    ((2, 1), dtype('float32'))
    """
    stored = scale_values(tensor).tensor
    return StoredScales(
        stored.file, stored.offset, stored.shape, stored.dtype, stored.path, stored.is_listed, owner=tensor
    )


def scale_values(tensor: CodedTensor) -> GroupValues:
    """Return where the scales of a coded tensor are stored; the tensor must have scales.

    >>> scales = GroupValues("w_scale", Tensor(None, 0, (2, 1), np.dtype(np.float32)), (1, 1))
    >>> codes = {"code_dims": (256, 128), "group": (128, 128), "scale": scales}
    >>> weight = CodedTensor(None, 0, (256, 128), np.dtype(np.int8), **codes)
    >>> scale_values(weight).name
    'w_scale'
    """
    assert tensor.scale is not None
    return tensor.scale
