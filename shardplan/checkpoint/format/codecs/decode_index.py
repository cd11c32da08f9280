"""Finds the coded tensors of a checkpoint: codes with the scales beside them, under the name of the weight.

The configuration says how weights are stored, and the files which; where they contradict each other, the checkpoint is
refused.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor, GroupValues
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.checkpoint.mapping.views import Shape, row_major_strides, tensor_view
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import (
    Awq,
    Fp8,
    Gptq,
    Mxfp4,
    PackedIntegers,
    Quantization,
    read_quantization,
)
from shardplan.model.huggingface.text_part import TEXT_KEYS
from shardplan.storage import Folder, read_bytes

SCALES = ("_scale_inv", "_scale")
"""Endings of a weight's name that name its scales. Both hold factors of the codes, in spite of `inv`."""
ACTIVATION_SCALES = (".input_scale", ".activation_scale")
"""Endings of scales by which servers quantize activations; no weight depends on them."""
FLOATS = (np.dtype(np.float32), np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e8m0fnu))
"""Types of scales."""
NIBBLE, E2M1 = np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.float4_e2m1fn)
WORD = np.dtype(np.int32)
HALVES = 8
"""Codes of four bits in a word of 32 bits."""
MX_GROUP = 32
"""Numbers of MXFP4 that share a scale."""


class _Found:
    """The tensors of a checkpoint; what is taken from them becomes part of a coded tensor."""

    def __init__(self, tensors: Mapping[str, Tensor], where: str) -> None:
        self.left = {name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATION_SCALES)}
        self.where = where

    def take(self, name: str, of: str, dtypes: tuple[np.dtype, ...], shape: Shape | None = None) -> Tensor:
        """Return and remove a tensor that `of` needs.

        Raises:
            CheckpointError: it is missing, or has another type or shape.
        """
        tensor = self.left.pop(name, None)
        if tensor is None:
            raise CheckpointError(f"{self.where}: {of} has codes without {name}; download it again")
        if tensor.dtype not in dtypes:
            raise CheckpointError(f"{self.where}: {name} is stored as {tensor.dtype}; it must be {dtypes[0]}")
        if shape is not None and tensor.shape != shape:
            raise CheckpointError(
                f"{self.where}: {name} has the shape {list(tensor.shape)}; with {of} it is {list(shape)}"
            )
        return tensor

    def ending(self, suffix: str) -> list[str]:
        """Return the names of modules with a tensor of this ending."""
        return [name.removesuffix(suffix) for name in self.left if name.endswith(suffix)]


def _coded(codes: Tensor, shape: Shape, dtype: np.dtype, bits: int, **parts: Any) -> CodedTensor:
    return CodedTensor(codes.file, codes.offset, shape, dtype, codes.path, codes.is_listed, code_bits=bits, **parts)


def _fp8(found: _Found, quantization: Fp8) -> None:
    dtype = np.dtype(getattr(ml_dtypes, quantization.dtype))
    coded = {name: tensor for name, tensor in found.left.items() if tensor.dtype == dtype}
    for name, codes in coded.items():
        scale_names = [name + suffix for suffix in SCALES if name + suffix in found.left]
        stored = f"{found.where}: {name} is stored as {codes.dtype}"
        if not scale_names:
            raise CheckpointError(
                f"{stored} without scales ({name}{SCALES[0]} or {name}{SCALES[1]}); download it again"
            )
        if len(scale_names) > 1:
            raise CheckpointError(f"{stored}, with scales both in {' and in '.join(scale_names)}; remove one of them")
        scale = found.left.pop(scale_names[0])
        if scale.dtype not in FLOATS:
            raise CheckpointError(
                f"{found.where}: {scale_names[0]} is stored as {scale.dtype}; scales are floating-point"
            )
        group = _fp8_group(found, quantization.block, name, codes.shape, scale_names[0], scale.shape)
        groups = _count(codes.shape, group)
        values = GroupValues(scale_names[0], scale, row_major_strides(groups))
        found.left[name] = _coded(codes, codes.shape, dtype, 8, dims=codes.shape, group=group, scale=values)


def _fp8_group(
    found: _Found, block: tuple[int, int] | None, name: str, shape: Shape, scale_name: str, scales: Shape
) -> Shape:
    """Return the box of codes that a scale is for: as config.json says, or a row, a matrix, or all of a tensor."""
    possible: list[Shape] = []
    if block is not None and len(shape) >= 2:
        possible.append((*[1] * (len(shape) - 2), *block))
    elif block is None:
        possible.append(tuple(max(n, 1) for n in shape))
        if len(shape) >= 2:
            possible += [(*[1] * (len(shape) - 1), shape[-1]), (*[1] * (len(shape) - 2), *shape[-2:])]
    for group in possible:
        count = _count(shape, group)
        if scales == count or (block is None and _without_ones(scales) == _without_ones(count)):
            return group
    expected = " or ".join(str(list(_count(shape, group))) for group in possible)
    by = f"weight_block_size {list(block)}" if block is not None else "a scale for each tensor, matrix or row"
    raise CheckpointError(
        f"{found.where}: {scale_name} has the shape {list(scales)} for {name} {list(shape)}; with {by} it has "
        f"{expected or 'two dimensions or more'}"
    )


def _count(shape: Shape, group: Shape) -> Shape:
    """Return the number of groups along each dimension."""
    return tuple(-(-n // size) for n, size in zip(shape, group, strict=True))


def _without_ones(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def _mxfp4(found: _Found, _: Mxfp4) -> None:
    """Codes [experts, out, groups, 16 bytes] of numbers [experts, in, out]."""
    for name in found.ending("_blocks"):
        blocks = found.take(f"{name}_blocks", name, (np.dtype(np.uint8),))
        if len(blocks.shape) < 3 or blocks.shape[-1] != MX_GROUP // 2:
            has = f"{found.where}: {name}_blocks has the shape {list(blocks.shape)}"
            raise CheckpointError(f"{has}; its last dimension is {MX_GROUP // 2}")
        *outer, groups, _bytes = blocks.shape
        scale = found.take(f"{name}_scales", name, (np.dtype(np.uint8),), (*outer, groups))
        dims = (*outer, groups * MX_GROUP)
        view = tensor_view("", dims)
        rank = len(dims)
        view = view.transpose((*range(rank - 2), rank - 1, rank - 2))
        powers = replace(scale, dtype=np.dtype(ml_dtypes.float8_e8m0fnu))
        values = GroupValues(f"{name}_scales", powers, row_major_strides((*outer, groups)))
        group = (*[1] * len(outer), MX_GROUP)
        found.left[name] = _coded(blocks, view.shape, E2M1, 4, dims=dims, group=group, scale=values, layout=view)


def _packed(found: _Found, quantization: PackedIntegers) -> None:
    """Codes [out, in], several in a word, beside their scales [out, groups]."""
    bits = quantization.bits
    for name in found.ending(".weight_packed"):
        packed = found.take(f"{name}.weight_packed", name, (WORD,))
        if len(packed.shape) != 2:
            raise CheckpointError(f"{found.where}: {name}.weight_packed has the shape {list(packed.shape)}; it has two")
        rows, columns = packed.shape[0], packed.shape[1] * (32 // bits)
        group = (1, quantization.group or columns)
        scale = found.take(f"{name}.weight_scale", name, FLOATS, (rows, -(-columns // group[1])))
        found.left.pop(f"{name}.weight_shape", None)
        values = GroupValues(f"{name}.weight_scale", scale, row_major_strides(scale.shape))
        dtype, zero = (NIBBLE, 8.0) if bits == 4 else (np.dtype(np.uint8), 128.0)
        found.left[f"{name}.weight"] = _coded(
            packed, (rows, columns), dtype, bits, dims=(rows, columns), group=group, scale=values, zero_offset=zero
        )


def _awq(found: _Found, quantization: Awq) -> None:
    """Codes [in, out / 8] in words, whose halves of bytes are columns 0 2 4 6 1 3 5 7; numbers [out, in]."""
    for name in found.ending(".qweight"):
        words, scale, zeros = _integer_parts(found, name, quantization.group)
        inner, outer = words.shape[0], words.shape[1] * HALVES
        dims = (inner, words.shape[1], 2, HALVES // 2)
        view = tensor_view("", dims).transpose((0, 1, 3, 2)).reshape((inner, outer)).transpose((1, 0))
        found.left[f"{name}.weight"] = _coded(
            words, view.shape, NIBBLE, 4, dims=dims, group=(quantization.group, 1, 1, 1), layout=view,
            scale=GroupValues(f"{name}.scales", scale, (outer, HALVES, 1, 2)),
            zero=GroupValues(f"{name}.qzeros", zeros, (outer, HALVES, HALVES // 2, 1), is_scale=False),
        )  # fmt: skip


def _gptq(found: _Found, quantization: Gptq) -> None:
    """Codes [in / 8, out] in words, of one column each; numbers [out, in]."""
    for name in found.ending(".qweight"):
        words, scale, zeros = _integer_parts(found, name, quantization.group, packs_rows=True)
        inner, outer = words.shape[0] * HALVES, words.shape[1]
        found.left.pop(f"{name}.g_idx", None)  # without act-order it numbers the groups one after the other
        dims = (words.shape[0], outer, HALVES)
        view = tensor_view("", dims).transpose((0, 2, 1)).reshape((inner, outer)).transpose((1, 0))
        found.left[f"{name}.weight"] = _coded(
            words, view.shape, NIBBLE, 4, dims=dims, group=(quantization.group // HALVES, 1, HALVES), layout=view,
            scale=GroupValues(f"{name}.scales", scale, (outer, 1, 0)),
            zero=GroupValues(f"{name}.qzeros", zeros, (outer, 1, 0), is_scale=False),
            zero_offset=quantization.zero_offset,
        )  # fmt: skip


def _integer_parts(found: _Found, name: str, group: int, packs_rows: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """Return words of codes, scales [groups, out], and zero points of four bits in words [groups, out / 8]."""
    words = found.take(f"{name}.qweight", name, (WORD,))
    if len(words.shape) != 2 or group % HALVES:
        raise CheckpointError(f"{found.where}: {name}.qweight has the shape {list(words.shape)} and groups of {group}")
    inner, outer = words.shape
    inner, outer = (inner * HALVES, outer) if packs_rows else (inner, outer * HALVES)
    groups = -(-inner // group)
    scale = found.take(f"{name}.scales", name, FLOATS, (groups, outer))
    zeros = found.take(f"{name}.qzeros", name, (WORD,), (groups, outer // HALVES))
    nibbles = _coded(zeros, (groups, outer), NIBBLE, 4, dims=(groups, outer))
    return words, scale, nibbles


DECODERS = {Fp8: _fp8, Mxfp4: _mxfp4, PackedIntegers: _packed, Awq: _awq, Gptq: _gptq}
"""How weights are stored -> what puts coded tensors in the place of their parts."""


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
    tensors = _decode(index.tensors, quantization, where)
    if not any(isinstance(tensor, CodedTensor) for tensor in tensors.values()):
        raise CheckpointError(
            f"{where}: its config.json says that weights are stored in {quantization.METHOD}, and no tensor is; remove "
            "quantization_config from config.json if they were dequantized"
        )
    decoded = replace(index, tensors=tensors, single=_decode(index.single, quantization, where))
    return decoded, tuple(name for name in index.tensors if name.endswith(ACTIVATION_SCALES))


def _decode(tensors: Mapping[str, Tensor], quantization: Quantization, where: str) -> dict[str, Tensor]:
    """Return the tensors with coded ones in place of codes, and without scales."""
    found = _Found(tensors, where)
    DECODERS[type(quantization)](found, quantization)  # type: ignore[operator]
    for name, tensor in found.left.items():
        if isinstance(tensor, CodedTensor) and quantization.is_plain(name):
            raise CheckpointError(
                f"{where}: {name} is stored as {tensor.dtype}, and its config.json says that it is not quantized"
            )
    return found.left
