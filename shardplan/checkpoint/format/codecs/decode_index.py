"""Finds the coded tensors of a checkpoint: codes and the scales beside them become tensors with the weights' names.

The configuration says how weights are stored, and the files which; where they contradict each other, the checkpoint is
refused.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardplan.checkpoint.format.codecs.byte_codes import decode_bytes
from shardplan.checkpoint.format.codecs.coded_tensor import CodedTensor
from shardplan.checkpoint.format.codecs.four_bit_floats import decode_mxfp4, decode_nvfp4
from shardplan.checkpoint.format.codecs.integers import decode_awq, decode_gptq, decode_packed
from shardplan.checkpoint.format.codecs.stored_parts import StoredParts
from shardplan.checkpoint.format.header import Tensor
from shardplan.checkpoint.format.index import TensorIndex
from shardplan.errors import CheckpointError
from shardplan.model.huggingface.quantization import Awq, ByteCodes, Gptq, Mxfp4, Nvfp4, PackedIntegers, Quantization
from shardplan.model.huggingface.read_quantization import MODELOPT_FILE, read_modelopt_file, read_quantization
from shardplan.model.huggingface.text_part import TEXT_KEYS
from shardplan.storage import Folder, read_bytes

ACTIVATION_SCALES = (
    ".input_scale", ".activation_scale", ".input_scale_ub", ".input_global_scale", ".k_scale", ".v_scale", ".q_scale",
)  # fmt: skip
"""Endings of scales by which servers quantize activations and caches; no weight depends on them."""
NUMBER = re.compile(r"\d+")
DECODERS: Mapping[type[Quantization], Callable[[StoredParts, Any], None]] = {
    ByteCodes: decode_bytes, Mxfp4: decode_mxfp4, Nvfp4: decode_nvfp4, PackedIntegers: decode_packed, Awq: decode_awq,
    Gptq: decode_gptq,
}  # fmt: skip
"""How weights are stored -> function that replaces their codes, scales and other parts by coded tensors."""


def quantization_of(folder: Folder) -> Quantization | None:
    """Read from a checkpoint's configuration how its weights are stored; None for unquantized weights.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text('{"quantization_config": {"quant_method": "mxfp4"}}')
    ...     quantization_of(open_folder(folder)).method
    'mxfp4'

    Raises:
        ConfigError: weights are stored in a way that is not supported.
    """
    text = read_bytes(folder, "config.json")
    config = json.loads(text) if text is not None else {}
    where = f"{folder.ref}/config.json"
    inner: Mapping[str, Any] = next((config[key] for key in TEXT_KEYS if isinstance(config.get(key), dict)), {})
    found = read_quantization(config, where) or read_quantization(inner, where)
    if found is not None:
        return found
    data = read_bytes(folder, MODELOPT_FILE)
    return None if data is None else read_modelopt_file(data, f"{folder.ref}/{MODELOPT_FILE}")


def decode_index(
    index: TensorIndex, quantization: Quantization | None, where: str
) -> tuple[TensorIndex, tuple[str, ...]]:
    """Replace codes and scales in an index by `CodedTensor`s; also return the names of the tensors that are not read.

    >>> import numpy as np
    >>> from types import SimpleNamespace
    >>> file = SimpleNamespace(name="model.safetensors", size=0, version="", tuning=None, is_shared=True)
    >>> shapes = {"up_proj_blocks": (64, 3, 16), "up_proj_scales": (64, 3), "self_attn.k_scale": ()}
    >>> index = TensorIndex({name: Tensor(file, 0, shape, np.dtype(np.uint8)) for name, shape in shapes.items()})
    >>> decoded, not_read = decode_index(index, Mxfp4("mxfp4", ()), "here")
    >>> list(decoded.tensors), not_read
    (['up_proj'], ('self_attn.k_scale',))

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
            f"{where}: its config.json says that weights are stored in {quantization.method}, and no tensor is; remove "
            "quantization_config from config.json if they were dequantized"
        )
    decoded = replace(index, tensors=tensors, single=_decode(index.single, quantization, where))
    return decoded, tuple(name for name in index.tensors if name.endswith(ACTIVATION_SCALES))


def _decode(tensors: Mapping[str, Tensor], quantization: Quantization, where: str) -> dict[str, Tensor]:
    """Return the tensors with `CodedTensor`s in place of codes, and without scales."""
    read = {name: tensor for name, tensor in tensors.items() if not name.endswith(ACTIVATION_SCALES)}
    parts = StoredParts(read, where)
    DECODERS[type(quantization)](parts, quantization)
    _check_agreement(parts.tensors, quantization, where)
    return parts.tensors


def _check_agreement(tensors: Mapping[str, Tensor], quantization: Quantization, where: str) -> None:
    """Check that a weight is coded in all layers and experts or in none, apart from exceptions in config.json."""
    coded = {}
    """Name with `*` for numbers -> a coded tensor with a name of this form."""
    for name, tensor in tensors.items():
        if isinstance(tensor, CodedTensor):
            coded[NUMBER.sub("*", name)] = name
            if quantization.is_plain(name):
                raise CheckpointError(
                    f"{where}: {name} is stored as {tensor.dtype}, and its config.json says that it is not quantized"
                )
    for name, tensor in tensors.items():
        other = coded.get(NUMBER.sub("*", name))
        if other is not None and not isinstance(tensor, CodedTensor) and not quantization.is_plain(name):
            raise CheckpointError(
                f"{where}: {name} is stored as {tensor.dtype}, and {other} as codes; config.json must list it as not "
                "quantized if that is meant"
            )
