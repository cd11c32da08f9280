"""Weights in types of eight bits, under their own names, with scales beside them: fp8 and int8."""

from functools import lru_cache

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import GroupValues
from shardplan.checkpoint.format.codecs.stored_parts import FLOATS, StoredParts
from shardplan.checkpoint.mapping.views import Shape, row_major_strides
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import ByteCodes

SCALES = ("_scale_inv", "_scale")
"""Endings, after a weight's name, of the names of its scales; both multiply the codes, in spite of `inv`."""


def decode_bytes(parts: StoredParts, quantization: ByteCodes) -> None:
    """Replace weights stored as bytes, and their scales, by `CodedTensor`s.

    >>> from types import SimpleNamespace
    >>> from shardplan.checkpoint.format.header import Tensor
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> codes = Tensor(file, 0, (256, 128), np.dtype(ml_dtypes.float8_e4m3fn))
    >>> scales = Tensor(file, 0, (2, 1), np.dtype(np.float32))
    >>> parts = StoredParts({"up_proj.weight": codes, "up_proj.weight_scale_inv": scales}, "here")
    >>> decode_bytes(parts, ByteCodes("fp8", (), "float8_e4m3fn", block=(128, 128)))
    >>> {name: (tensor.shape, tensor.group) for name, tensor in parts.tensors.items()}
    {'up_proj.weight': ((256, 128), (128, 128))}

    Raises:
        CheckpointError: scales are missing, or have another type or shape.
    """
    dtype = np.dtype(getattr(ml_dtypes, quantization.dtype, quantization.dtype))
    coded = {name: tensor for name, tensor in parts.tensors.items() if tensor.dtype == dtype}
    for name, codes in coded.items():
        scale_names = [name + suffix for suffix in SCALES if name + suffix in parts.tensors]
        if len(scale_names) != 1:
            problem = f", with scales both in {' and in '.join(scale_names)}; remove one of them"
            if not scale_names:
                problem = f" without scales ({name}{SCALES[0]} or {name}{SCALES[1]}); download it again"
            raise CheckpointError(f"{parts.where}: {name} is stored as {codes.dtype}{problem}")
        scale = parts.take(scale_names[0], name, FLOATS)
        group = _group(quantization.block, codes.shape, scale.shape)
        if group is None:
            raise CheckpointError(
                f"{parts.where}: {scale_names[0]} has the shape {list(scale.shape)} for {name} {list(codes.shape)}; "
                f"with {_expected_scales(quantization.block, codes.shape)}"
            )
        values = GroupValues(scale_names[0], scale, row_major_strides(_count(codes.shape, group)))
        del parts.tensors[name]
        parts.put(name, codes, codes.shape, dtype, code_dims=codes.shape, group=group, scale=values)


@lru_cache
def _group(block: Shape | None, shape: Shape, scales: Shape) -> Shape | None:
    """Return the box of codes that share a scale; None if no possible box matches the shape of the scales."""
    for group in _possible_groups(block, shape):
        count = _count(shape, group)
        if scales == count or (block is None and _without_ones(scales) == _without_ones(count)):
            return group
    return None


def _possible_groups(block: Shape | None, shape: Shape) -> list[Shape]:
    """Return the possible boxes of codes that share a scale: config.json's, or a whole tensor, row or matrix."""
    if block is not None:
        return [(*[1] * (len(shape) - 2), *block)] if len(shape) >= 2 else []
    possible: list[Shape] = [tuple(max(n, 1) for n in shape)]
    if len(shape) >= 2:
        possible += [(*[1] * (len(shape) - 1), shape[-1]), (*[1] * (len(shape) - 2), *shape[-2:])]
    return possible


def _expected_scales(block: Shape | None, shape: Shape) -> str:
    """Return the shapes that the scales of a tensor can have, in words."""
    expected = " or ".join(str(list(_count(shape, group))) for group in _possible_groups(block, shape))
    by = f"blocks of {list(block)}" if block is not None else "a scale for each tensor, matrix or row"
    return f"{by} it has {expected or 'two dimensions or more'}"


def _count(shape: Shape, group: Shape) -> Shape:
    """Return the number of groups along each dimension."""
    return tuple(-(-n // max(size, 1)) for n, size in zip(shape, group, strict=True))


def _without_ones(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)
