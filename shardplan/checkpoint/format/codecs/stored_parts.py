"""The tensors of a checkpoint while coded tensors replace codes, scales and other parts."""

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError
from shardplan.storage.buffered import BufferedFile

FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e8m0fnu))
"""Types that scales may have."""


class StoredParts:
    """The tensors of a checkpoint during decoding: decoders take out codes and scales, and put in `CodedTensor`s."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        """Start with all tensors of the checkpoint.

        Args:
            where: name of the checkpoint, for messages.
        """
        self.tensors = dict(tensors)
        """Tensors that no decoder has taken out."""
        self.where = where
        self._buffered: dict[int, BufferedFile] = {}
        """id of a file -> its buffered form, from which scales are read."""

    def names_ending(self, suffix: str) -> list[str]:
        """Return the names of tensors that end in `suffix`, without the suffix."""
        return [name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix)]

    def take(self, name: str, owner: str, dtypes: tuple[np.dtype, ...], shapes: tuple[Shape, ...] = ()) -> Tensor:
        """Take out a small tensor that belongs to codes, such as scales, from a file that combines neighbouring reads.

        Args:
            owner: name of the coded weight, for messages.
            dtypes: allowed types.
            shapes: allowed shapes; empty for any shape.

        Raises:
            CheckpointError: the tensor is missing, or has another type or shape.
        """
        tensor = self._pop(name, owner, dtypes)
        if shapes and tensor.shape not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise CheckpointError(
                f"{self.where}: {name} has the shape {list(tensor.shape)}; with the codes of {owner} it is {expected}"
            )
        buffered = self._buffered.get(id(tensor.file))
        if buffered is None:
            buffered = self._buffered[id(tensor.file)] = BufferedFile(tensor.file)
        return Tensor(buffered, tensor.offset, tensor.shape, tensor.dtype, tensor.path, tensor.is_listed)

    def take_codes(self, name: str, owner: str, dtypes: tuple[np.dtype, ...], rank: int | None = 2) -> Tensor:
        """Take out the codes of a tensor, which must have the given number of dimensions.

        Raises:
            CheckpointError: the tensor of codes is missing or empty, or has another type or number of dimensions.
        """
        codes = self._pop(name, owner, dtypes)
        if (rank is not None and len(codes.shape) != rank) or 0 in codes.shape:
            needed = "dimensions" if rank is None else f"{rank} dimensions"
            raise CheckpointError(
                f"{self.where}: {name} has the shape {list(codes.shape)}; codes have {needed}, none of them 0"
            )
        return codes

    def _pop(self, name: str, owner: str, dtypes: tuple[np.dtype, ...]) -> Tensor:
        tensor = self.tensors.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"{self.where}: {owner} has codes without {name}; download it again")
        if tensor.dtype not in dtypes:
            expected = "floating-point" if dtypes is FLOATS else " or ".join(map(str, dtypes))
            raise CheckpointError(f"{self.where}: {name} is stored as {tensor.dtype}; it must be {expected}")
        return tensor

    def put(self, name: str, codes: Tensor, shape: Shape, dtype: np.dtype, **parts: Any) -> None:
        """Put in a `CodedTensor`.

        Args:
            shape: shape of the decoded values.
            dtype: type of a code.
            parts: fields of `CodedTensor`.

        Raises:
            CheckpointError: the checkpoint has a tensor of this name as well.
        """
        if name in self.tensors:
            raise CheckpointError(
                f"{self.where}: {name} is stored both as it is and as codes; remove the one that is not meant"
            )
        self.tensors[name] = CodedTensor(codes.file, codes.offset, shape, dtype, codes.path, codes.is_listed, **parts)
