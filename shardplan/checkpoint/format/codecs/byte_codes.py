"""Weights in types of eight bits, under their own names, with scales beside them: fp8 and int8."""

import ml_dtypes
import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import GroupValues
from shardplan.checkpoint.format.codecs.stored_parts import FLOATS, StoredParts
from shardplan.checkpoint.mapping.views import Shape, row_major_strides
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import ByteCodes

SCALES = ("_scale_inv", "_scale")
"""Endings of a weight's name that name its scales. Both hold factors of the codes, in spite of `inv`."""


def decode_bytes(parts: StoredParts, quantization: ByteCodes) -> None:
    """Put coded tensors in the place of weights and their scales.

    Raises:
        CheckpointError: scales are missing, or have another type or shape.
    """
    dtype = np.dtype(getattr(ml_dtypes, quantization.dtype, quantization.dtype))
    coded = {name: tensor for name, tensor in parts.tensors.items() if tensor.dtype == dtype}
    for name, codes in coded.items():
        scale_names = [name + suffix for suffix in SCALES if name + suffix in parts.tensors]
        stored = f"{parts.where}: {name} is stored as {codes.dtype}"
        if not scale_names:
            raise CheckpointError(
                f"{stored} without scales ({name}{SCALES[0]} or {name}{SCALES[1]}); download it again"
            )
        if len(scale_names) > 1:
            raise CheckpointError(f"{stored}, with scales both in {' and in '.join(scale_names)}; remove one of them")
        scale = parts.take(scale_names[0], name, FLOATS)
        group = _group(quantization.block, f"{parts.where}: {scale_names[0]}", name, codes.shape, scale.shape)
        values = GroupValues(scale_names[0], scale, row_major_strides(_count(codes.shape, group)))
        del parts.tensors[name]
        parts.put(name, codes, codes.shape, dtype, code_dims=codes.shape, group=group, scale=values)


def _group(block: tuple[int, int] | None, scale_text: str, name: str, shape: Shape, scales: Shape) -> Shape:
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
    by = f"blocks of {list(block)}" if block is not None else "a scale for each tensor, matrix or row"
    raise CheckpointError(
        f"{scale_text} has the shape {list(scales)} for {name} {list(shape)}; with {by} it has "
        f"{expected or 'two dimensions or more'}"
    )


def _count(shape: Shape, group: Shape) -> Shape:
    """Return the number of groups along each dimension."""
    return tuple(-(-n // max(size, 1)) for n, size in zip(shape, group, strict=True))


def _without_ones(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)
