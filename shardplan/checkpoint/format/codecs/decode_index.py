"""Finds the coded tensors of a checkpoint: codes with the scales beside them, under the name of the weight.

The configuration says how weights are stored, and the files which; where they contradict each other, the checkpoint is
refused.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import Quantization, read_quantization
from shardplan.model.huggingface.text_part import TEXT_KEYS
from shardplan.storage import Folder, read_bytes

SCALES = ("_scale_inv", "_scale")
"""What follows the name of a weight in the name of its scales, which both are factors of its codes."""
ACTIVATION_SCALES = (".input_scale", ".activation_scale")
"""Endings of scales by which servers quantize activations; no weight depends on them."""
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e8m0fnu))
"""Types of scales."""


@dataclass(frozen=True)
class _Decoder:
    """Decodes the tensors of one checkpoint."""

    quantization: Quantization
    where: str
    """Name of the checkpoint, for messages."""

    def decode(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the tensors with coded ones in place of codes, and without scales."""
        decoded = {name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATION_SCALES)}
        for name in self.codes(tensors):
            scale_name = self._scale_name(name, tensors)
            decoded[name] = self._coded_tensor(name, tensors[name], scale_name, decoded.pop(scale_name))
        return decoded

    def codes(self, tensors: Mapping[str, Tensor]) -> list[str]:
        """Return the names of the tensors that are codes, by their type."""
        dtype = np.dtype(getattr(ml_dtypes, self.quantization.dtype))
        return [name for name, tensor in tensors.items() if tensor.dtype == dtype]

    def _scale_name(self, name: str, tensors: Mapping[str, Tensor]) -> str:
        found = [name + suffix for suffix in SCALES if name + suffix in tensors]
        stored = f"{self.where}: {name} is stored as {tensors[name].dtype}"
        if self.quantization.is_plain(name):
            raise CheckpointError(
                f"{stored}, and modules_to_not_convert of its config.json says that it is not quantized"
            )
        if not found:
            raise CheckpointError(
                f"{stored} without scales ({name}{SCALES[0]} or {name}{SCALES[1]}); download it again"
            )
        if len(found) > 1:
            raise CheckpointError(f"{stored}, with scales both in {found[0]} and in {found[1]}; remove one of them")
        return found[0]

    def _coded_tensor(self, name: str, codes: Tensor, scale_name: str, scale: Tensor) -> CodedTensor:
        if scale.dtype not in FLOATS:
            raise CheckpointError(f"{self.where}: {scale_name} is stored as {scale.dtype}; scales are floating-point")
        group = self._group(name, codes.shape, scale_name, scale.shape)
        return CodedTensor(
            codes.file, codes.offset, codes.shape, codes.dtype, codes.path, codes.is_listed, scale=scale, group=group
        )

    def _group(self, name: str, shape: Shape, scale_name: str, scales: Shape) -> Shape:
        """Return the box of codes that a scale is for: as config.json says, or a row, a matrix, or all of a tensor."""
        block = self.quantization.block
        possible: list[Shape] = []
        if block is not None and len(shape) >= 2:
            possible.append((*[1] * (len(shape) - 2), *block))
        elif block is None:
            possible.append(tuple(max(n, 1) for n in shape))
            if len(shape) >= 2:
                possible += [(*[1] * (len(shape) - 1), shape[-1]), (*[1] * (len(shape) - 2), *shape[-2:])]
        for group in possible:
            count = tuple(-(-n // size) for n, size in zip(shape, group, strict=True))
            if scales == count or (block is None and _without_ones(scales) == _without_ones(count)):
                return group
        expected = " or ".join(
            str(list(-(-n // size) for n, size in zip(shape, group, strict=True))) for group in possible
        )
        by = f"weight_block_size {list(block)}" if block is not None else "a scale for each tensor, matrix or row"
        raise CheckpointError(
            f"{self.where}: {scale_name} has the shape {list(scales)} for {name} {list(shape)}; with {by} it has "
            f"{expected or 'two dimensions or more'}"
        )


def _without_ones(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def quantization_of(folder: Folder) -> Quantization | None:
    """Read how the config.json of a checkpoint says that its weights are stored; None for plain numbers.

    Raises:
        ConfigError: they are stored in a way that is not supported.
    """
    text = read_bytes(folder, "config.json")
    config = json.loads(text) if text is not None else {}
    where = f"{folder.ref}/config.json"
    inner: Mapping[str, Any] = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), {})
    return read_quantization(config, where) or read_quantization(inner, where)


def decode_index(
    index: TensorIndex, quantization: Quantization | None, where: str
) -> tuple[TensorIndex, tuple[str, ...]]:
    """Return an index with coded tensors under the names of weights, and without their scales; and what is not read.

    Args:
        quantization: how config.json says that weights are stored; None for plain numbers.
        where: name of the checkpoint, for messages.

    Raises:
        CheckpointError: scales are missing, or have another shape, or config.json and the files contradict each other.
    """
    if quantization is None:
        return index, ()
    decoder = _Decoder(quantization, where)
    if not decoder.codes(index.tensors):
        raise CheckpointError(
            f"{where}: its config.json says that weights are stored in {quantization.method} ({quantization.dtype}), "
            "and no tensor is; remove quantization_config from config.json if they were dequantized"
        )
    decoded = replace(index, tensors=decoder.decode(index.tensors), single=decoder.decode(index.single))
    return decoded, tuple(name for name in index.tensors if name.endswith(ACTIVATION_SCALES))
