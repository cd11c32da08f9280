"""The arrays that a load makes: one request per array of the model. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from shardplan.checkpoint.format.codecs.computed_tensor import ComputedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.mapping.views import View
from shardplan.plan.mapping import MeshAxes


@dataclass(frozen=True)
class CodeBlocks:
    """Decoding of codes in blocks: value = (code - zero point) * scale of the block."""

    dtype: np.dtype
    """Type of a code."""
    zero_point: float
    scales: str
    """Path of the array of scales; each of its dimensions divides the array's dimension."""
    value_bytes: int
    """Bytes of a decoded value."""


@dataclass(frozen=True)
class ArrayRequest:
    """An array to load: the tensor elements that it is made of, its sharding, and its type."""

    view: View
    spec: tuple[MeshAxes, ...]
    """Mesh axes that shard each dimension of the array."""
    dtype: np.dtype
    codes: CodeBlocks | None = None
    """The decoding of the elements if they are codes; else None."""

    @property
    def placed_bytes(self) -> int:
        """Bytes per element on its device while it is written into its shard."""
        return self.dtype.itemsize + (0 if self.codes is None else self.codes.value_bytes)

    def in_transit(self, dtypes: Mapping[str, np.dtype]) -> "ArrayRequest":
        """Return the request in the dtype in which the array is read and exchanged, before it is put into its shards.

        Its dimensions are in stored order, so that its rows are rows of the stored tensor even if the model transposes
        the array. Its type is the narrower of the stored and the requested type, so that fewer bytes are moved.

        Args:
            dtypes: see `stored_dtypes`.
        """
        order = self.view.stored_order
        spec = tuple(self.spec[dimension] for dimension in order)
        return ArrayRequest(self.view.transpose(order), spec, self._narrower_dtype(dtypes), self.codes)

    def _narrower_dtype(self, dtypes: Mapping[str, np.dtype]) -> np.dtype:
        """Return the stored dtype if it is narrower than the requested dtype and no scale is applied."""
        if self.codes is not None:
            return self.codes.dtype
        kinds = {dtypes.get(name) for name in self.view.tensors}
        if len(kinds) != 1 or self.view.is_scaled:
            return self.dtype
        (stored,) = kinds
        return self.dtype if stored is None or stored.itemsize >= self.dtype.itemsize else stored


def stored_dtypes(tensors: Mapping[str, Tensor]) -> dict[str, np.dtype]:
    """Return name -> type, for the tensors of a checkpoint that store plain values rather than codes.

    >>> stored_dtypes({"norm": Tensor(None, 64, (8,), np.dtype(np.float16))})
    {'norm': dtype('float16')}
    """
    return {name: tensor.dtype for name, tensor in tensors.items() if not isinstance(tensor, ComputedTensor)}
