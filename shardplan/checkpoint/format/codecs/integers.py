"""Weights in integers of four or eight bits, several to a word of 32 bits: compressed-tensors, AWQ and GPTQ.

The lowest bits of a word are its first code, so that the codes of words one after the other are codes of bytes and
halves of bytes one after the other.
"""

import numpy as np

from shardplan.checkpoint.format.codecs.coded_tensor import GroupValues, RowGroups
from shardplan.checkpoint.format.codecs.stored_parts import FLOATS, StoredParts
from shardplan.checkpoint.format.header import UINT4, Tensor
from shardplan.checkpoint.mapping.views import tensor_view
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import Awq, Gptq, PackedIntegers

CODE_TYPES = {4: UINT4, 8: np.dtype(np.uint8)}
"""Bits of a code -> its type."""
WORD_BITS = 32
WORD = (np.dtype(np.int32),)
SHAPE = (np.dtype(np.int64), np.dtype(np.int32))
AWQ_HALVES, AWQ_COLUMNS = 2, 4
"""A word of AWQ has columns 0 2 4 6 1 3 5 7: the even and the odd ones of four pairs."""


def decode_packed(parts: StoredParts, quantization: PackedIntegers) -> None:
    """Replace words (packed along inputs) and scales [outputs, groups] by `CodedTensor`s [outputs, inputs].

    >>> from types import SimpleNamespace
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> kinds = {"packed": ((64, 16), WORD[0]), "scale": ((64, 4), FLOATS[0]), "shape": ((2,), SHAPE[0])}
    >>> parts = StoredParts({f"up_proj.weight_{end}": Tensor(file, 0, *kind) for end, kind in kinds.items()}, "here")
    >>> decode_packed(parts, PackedIntegers("compressed-tensors", (), bits=4, group=32, is_symmetric=True))
    >>> {name: tensor.shape for name, tensor in parts.tensors.items()}
    {'up_proj.weight': (64, 128)}

    Raises:
        CheckpointError: parts are missing, or have another type or shape.
    """
    bits = quantization.bits
    codes_in_word = WORD_BITS // bits
    for name in parts.names_ending(".weight_packed"):
        words = parts.take_codes(f"{name}.weight_packed", name, WORD)
        rows, columns = words.shape[0], words.shape[1] * codes_in_word
        size = quantization.group or columns
        groups = -(-columns // size)
        scale = parts.take(f"{name}.weight_scale", name, FLOATS, ((rows, groups),))
        # the model has the shape: where rows end with padding, it has fewer columns, and refuses the tensor
        parts.take(f"{name}.weight_shape", name, SHAPE, ((2,),))
        if quantization.is_symmetric:
            parts.put(
                f"{name}.weight", words, (rows, columns), CODE_TYPES[bits], code_dims=(rows, columns), group=(1, size),
                scale=GroupValues(f"{name}.weight_scale", scale, (groups, 1)), zero_offset=float(2 ** (bits - 1)),
            )  # fmt: skip
            continue
        if rows % codes_in_word:
            raise CheckpointError(
                f"{parts.where}: {name} has {rows} rows, and zero points of {codes_in_word} rows are in one word"
            )
        zeros = parts.take(f"{name}.weight_zero_point", name, WORD, ((rows // codes_in_word, groups),))
        parts.put(
            f"{name}.weight", words, (rows, columns), CODE_TYPES[bits],
            code_dims=(rows // codes_in_word, codes_in_word, columns), group=(1, 1, size),
            scale=GroupValues(f"{name}.weight_scale", scale, (groups * codes_in_word, groups, 1)),
            zero=_zero_points(f"{name}.weight_zero_point", zeros, bits, (groups * codes_in_word, 1, codes_in_word)),
        )  # fmt: skip


def decode_awq(parts: StoredParts, quantization: Awq) -> None:
    """Replace words [inputs, outputs / 8], scales and zero points by `CodedTensor`s [outputs, inputs].

    >>> from types import SimpleNamespace
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> kinds = {"qweight": ((128, 8), WORD[0]), "scales": ((4, 64), FLOATS[0]), "qzeros": ((4, 8), WORD[0])}
    >>> parts = StoredParts({f"up_proj.{end}": Tensor(file, 0, *kind) for end, kind in kinds.items()}, "here")
    >>> decode_awq(parts, Awq("awq", (), group=32))
    >>> {name: tensor.shape for name, tensor in parts.tensors.items()}
    {'up_proj.weight': (64, 128)}

    Raises:
        CheckpointError: parts are missing, or have another type or shape.
    """
    for name in parts.names_ending(".qweight"):
        words = parts.take_codes(f"{name}.qweight", name, WORD)
        inner, outer = words.shape[0], words.shape[1] * AWQ_HALVES * AWQ_COLUMNS
        group = quantization.group or inner
        scale, zeros = _scales_and_zeros(parts, name, -(-inner // group), outer, 4)
        dims = (inner, words.shape[1], AWQ_HALVES, AWQ_COLUMNS)
        layout = tensor_view("", dims).transpose((0, 1, 3, 2)).reshape((inner, outer)).transpose((1, 0))
        in_word = AWQ_HALVES * AWQ_COLUMNS
        parts.put(
            f"{name}.weight", words, layout.shape, CODE_TYPES[4], code_dims=dims, group=(group, 1, 1, 1), layout=layout,
            scale=GroupValues(f"{name}.scales", scale, (outer, in_word, 1, AWQ_HALVES)),
            zero=_zero_points(f"{name}.qzeros", zeros, 4, (outer, in_word, AWQ_COLUMNS, 1)),
        )  # fmt: skip


def decode_gptq(parts: StoredParts, quantization: Gptq) -> None:
    """Replace words [inputs / 8, outputs], scales, zero points and groups by `CodedTensor`s [outputs, inputs].

    `g_idx` has the group of each input; groups may be in any order.

    >>> from types import SimpleNamespace
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> kinds = {"qweight": ((16, 64), WORD[0]), "scales": ((4, 64), FLOATS[0]), "qzeros": ((4, 8), WORD[0])}
    >>> parts = StoredParts({f"up_proj.{end}": Tensor(file, 0, *kind) for end, kind in kinds.items()}, "here")
    >>> decode_gptq(parts, Gptq("gptq", (), bits=4, group=32, zero_offset=1, has_order=False))
    >>> {name: tensor.shape for name, tensor in parts.tensors.items()}
    {'up_proj.weight': (64, 128)}

    Raises:
        CheckpointError: parts are missing, or have another type or shape.
    """
    bits = quantization.bits
    in_word = WORD_BITS // bits
    for name in parts.names_ending(".qweight"):
        words = parts.take_codes(f"{name}.qweight", name, WORD)
        inner, outer = words.shape[0] * in_word, words.shape[1]
        group = quantization.group or inner
        if group % in_word:
            raise CheckpointError(
                f"{parts.where}: {name} has groups of {group} inputs, and words of {in_word}; groups that divide words "
                "are not supported"
            )
        scale, zeros = _scales_and_zeros(parts, name, -(-inner // group), outer, bits)
        row_groups = None
        if f"{name}.g_idx" in parts.tensors or quantization.has_order:
            order = parts.take(f"{name}.g_idx", name, WORD, ((inner,),))
            row_groups = RowGroups(f"{name}.g_idx", order, in_word)
        dims = (words.shape[0], outer, in_word)
        layout = tensor_view("", dims).transpose((0, 2, 1)).reshape((inner, outer)).transpose((1, 0))
        parts.put(
            f"{name}.weight", words, layout.shape, CODE_TYPES[bits], code_dims=dims,
            group=(group // in_word, 1, in_word), layout=layout, row_groups=row_groups,
            scale=GroupValues(f"{name}.scales", scale, (outer, 1, 0)),
            zero=_zero_points(f"{name}.qzeros", zeros, bits, (outer, 1, 0)), zero_offset=quantization.zero_offset,
        )  # fmt: skip


def _scales_and_zeros(parts: StoredParts, name: str, groups: int, outer: int, bits: int) -> tuple[Tensor, Tensor]:
    """Take out the scales [groups, outputs], and the words that hold zero points along outputs."""
    scale = parts.take(f"{name}.scales", name, FLOATS, ((groups, outer),))
    return scale, parts.take(f"{name}.qzeros", name, WORD, ((groups, outer * bits // WORD_BITS),))


def _zero_points(name: str, words: Tensor, bits: int, strides: tuple[int, ...]) -> GroupValues:
    shape = (*words.shape[:-1], words.shape[-1] * WORD_BITS // bits)
    codes = Tensor(words.file, words.offset, shape, CODE_TYPES[bits], words.path, words.is_listed)
    return GroupValues(name, codes, strides, is_scale=False)
