"""Weights in E2M1, four-bit floating-point numbers, with scales of groups along the inputs: MXFP4 and NVFP4."""

import ml_dtypes
import numpy as np
from msgspec.structs import replace

from shardplan.checkpoint.format.codecs.coded_tensor import CommonScale, GroupValues
from shardplan.checkpoint.format.codecs.stored_parts import FLOATS, StoredParts
from shardplan.checkpoint.format.header import E2M1
from shardplan.checkpoint.mapping.views import row_major_strides, tensor_view
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import Mxfp4, Nvfp4

E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
POWERS = np.dtype(ml_dtypes.float8_e8m0fnu)
BYTE = np.dtype(np.uint8)
MX_GROUP, NV_GROUP = 32, 16
"""Number of codes that share a scale; the scale is a power of two in MXFP4, and in E4M3 in NVFP4."""
HALVES = 2


def decode_mxfp4(parts: StoredParts, _: Mxfp4) -> None:
    """Replace `_blocks` [..., outputs, groups, 16] and `_scales` by `CodedTensor`s [..., inputs, outputs].

    >>> from types import SimpleNamespace
    >>> from shardplan.checkpoint.format.header import Tensor
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> shapes = {"experts.up_proj_blocks": (4, 64, 3, 16), "experts.up_proj_scales": (4, 64, 3)}
    >>> parts = StoredParts({name: Tensor(file, 0, shape, BYTE) for name, shape in shapes.items()}, "here")
    >>> decode_mxfp4(parts, Mxfp4("mxfp4", ()))
    >>> {name: tensor.shape for name, tensor in parts.tensors.items()}
    {'experts.up_proj': (4, 96, 64)}

    Raises:
        CheckpointError: parts are missing, or have another type or shape.
    """
    for name in parts.names_ending("_blocks"):
        blocks = parts.take_codes(f"{name}_blocks", name, (BYTE,), rank=None)
        if len(blocks.shape) < 3 or blocks.shape[-1] != MX_GROUP // HALVES:
            has = f"{parts.where}: {name}_blocks has the shape {list(blocks.shape)}"
            raise CheckpointError(f"{has}; its last dimension is {MX_GROUP // HALVES}")
        *outer, groups, _bytes = blocks.shape
        scale = parts.take(f"{name}_scales", name, (BYTE,), ((*outer, groups),))
        dims = (*outer, groups * MX_GROUP)
        last = len(dims) - 1
        layout = tensor_view("", dims).transpose((*range(last - 1), last, last - 1))
        parts.put(
            name, blocks, layout.shape, E2M1, code_dims=dims, group=(*[1] * len(outer), MX_GROUP), layout=layout,
            scale=GroupValues(f"{name}_scales", replace(scale, dtype=POWERS), row_major_strides(scale.shape)),
        )  # fmt: skip


def decode_nvfp4(parts: StoredParts, quantization: Nvfp4) -> None:
    """Replace the codes, group scales and tensor scale of each weight by one `CodedTensor` [outputs, inputs].

    >>> from types import SimpleNamespace
    >>> from shardplan.checkpoint.format.header import Tensor
    >>> from shardplan.model.huggingface.quantization import Nvfp4Names
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> kinds = {"": ((64, 16), BYTE), "_scale": ((64, 2), E4M3), "_scale_2": ((), np.dtype(np.float32))}
    >>> tensors = {f"up_proj.weight{end}": Tensor(file, 0, *kind) for end, kind in kinds.items()}
    >>> parts = StoredParts(tensors, "here")
    >>> decode_nvfp4(parts, Nvfp4("nvfp4", (), Nvfp4Names(".weight", ".weight_scale", ".weight_scale_2", False)))
    >>> {name: tensor.shape for name, tensor in parts.tensors.items()}
    {'up_proj.weight': (64, 32)}

    Raises:
        CheckpointError: parts are missing, or have another type or shape.
    """
    names = quantization.names
    for name in parts.names_ending(names.group_scale):
        codes_name = name + names.codes
        codes = parts.take_codes(codes_name, name, (BYTE,))
        dims = (codes.shape[0], codes.shape[1] * HALVES)
        scale = parts.take(name + names.group_scale, name, (E4M3,), ((dims[0], -(-dims[1] // NV_GROUP)),))
        common = parts.take(name + names.tensor_scale, name, FLOATS, ((), (1,)))
        values = GroupValues(
            name + names.group_scale, scale, row_major_strides(scale.shape),
            common=CommonScale(name + names.tensor_scale, common, names.divides),
        )  # fmt: skip
        parts.put(f"{name}.weight", codes, dims, E2M1, code_dims=dims, group=(1, NV_GROUP), scale=values)
