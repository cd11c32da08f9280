"""Reads the quantization_config of a config.json: every key is read or refused."""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from shardplan.errors import ConfigError
from shardplan.model.huggingface.checked_keys import CheckedKeys
from shardplan.model.huggingface.quantization import (
    PATTERN,
    Awq,
    ByteCodes,
    Gptq,
    Mxfp4,
    Nvfp4,
    Nvfp4Names,
    PackedIntegers,
    Quantization,
)

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe stored weights."""
FORMATS = {
    "e4m3": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "float8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Value of `fmt` -> type of the codes."""
E4M3 = FORMATS["e4m3"]
PLAIN_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules")
"""Keys that list modules which are stored unquantized."""
COMPRESSED_NVFP4 = Nvfp4Names(".weight_packed", ".weight_scale", ".weight_global_scale", divides=True)
MODELOPT_NVFP4 = Nvfp4Names(".weight", ".weight_scale", ".weight_scale_2", divides=False)
MODELOPT_FILE = "hf_quant_config.json"
"""File beside config.json in which TensorRT Model Optimizer describes stored weights."""
REMEDY = "use the checkpoint in bfloat16 or float32 that it was made from"


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Read how the weights are stored; None for unquantized weights.

    Args:
        config: the content of a config.json.
        where: name of the file, for messages.

    Raises:
        ConfigError: weights are stored in a way that is not supported, or a key has an unknown value.
    """
    key = next((key for key in KEYS if config.get(key)), None)
    if key is None:
        return None
    values = config[key]
    method = values.get("quant_method") if isinstance(values, dict) else None
    read = READERS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ConfigError(
            f"{where}: it has a {key}{f' ({method})' if method else ''}, and weights that are quantized so are not "
            f"supported ({', '.join(READERS)} are); {REMEDY}"
        )
    return read(_Keys(values, f"{where}: {key}"))


def read_modelopt_file(data: bytes, where: str) -> Quantization | None:
    """Read how the weights are stored from a `hf_quant_config.json`; None for unquantized weights.

    Raises:
        ConfigError: `read_quantization` refuses the content, or the file is not such a JSON file.
    """
    try:
        values = json.loads(data)["quantization"]
        if values["quant_algo"] is None:
            return None
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{where} has no quantization.quant_algo; remove it if weights are plain numbers") from error
    return _read_modelopt(_Keys({"quant_method": "modelopt", **values}, f"{where}: quantization"))


class _Keys(CheckedKeys):
    """The keys of a quantization_config, among them lists of modules that are stored unquantized."""

    def __init__(self, values: Any, where: str) -> None:
        super().__init__(values, where)
        self.known |= {"quant_method", *PLAIN_KEYS}
        modules: list[str] = []
        for key in PLAIN_KEYS:
            modules += self.names(key)
        for name in modules:
            try:
                re.compile(name.removeprefix(PATTERN) if name.startswith(PATTERN) else "")
            except re.error as error:
                raise ConfigError(f"{where} lists {name!r}, which is no regular expression: {error}") from error
        self.plain = tuple(modules)

    def block(self, name: str) -> tuple[int, int] | None:
        """Return the rows and columns of a block; None if there are no blocks."""
        value = self.take(name, None)
        if value is None:
            return None
        if not isinstance(value, list) or len(value) != 2 or not all(type(n) is int and n > 0 for n in value):
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be two positive integers, rows and columns")
        return value[0], value[1]

    def section(self, name: str) -> "_Keys":
        """Return the keys of the mapping that is a key's value."""
        return _Keys(self.take(name, {}), f"{self.where}.{name}")


def _read_fp8(keys: _Keys) -> ByteCodes:
    fmt = FORMATS[keys.take("fmt", "e4m3", *FORMATS)]
    block = keys.block("weight_block_size")
    # how a server computes changes no weight
    keys.check("activation_scheme", "scale_fmt", "dequantize", "kv_cache_scheme")
    return ByteCodes("fp8", keys.plain, fmt, block)


def _read_fbgemm(keys: _Keys) -> ByteCodes:
    keys.check("activation_scale_ub")
    return ByteCodes("fbgemm_fp8", keys.plain, E4M3, None)


def _read_mxfp4(keys: _Keys) -> Mxfp4:
    keys.check("dequantize")
    return Mxfp4("mxfp4", keys.plain)


def _read_modelopt(keys: _Keys) -> Quantization:
    algorithm = keys.take("quant_algo", None, "FP8", "NVFP4")
    keys.take("has_zero_point", False, False)
    keys.take("pre_quant_scale", False, False)
    group = keys.size("group_size", 16)
    if algorithm == "NVFP4" and group != 16:
        raise ConfigError(f"{keys.where}.group_size is {group}; it must be 16")
    keys.check("kv_cache_quant_algo", "kv_cache_scheme", "producer", "config_groups")
    if algorithm == "FP8":
        return ByteCodes("modelopt FP8", keys.plain, E4M3, None)
    return Nvfp4("modelopt NVFP4", keys.plain, MODELOPT_NVFP4)


def _read_compressed(keys: _Keys) -> Quantization:
    form = keys.take("format", "pack-quantized", *COMPRESSED)
    for section, allowed in (("sparsity_config", ("dense",)), ("transform_config", ())):
        values = keys.section(section).values
        if values and values.get("format") not in allowed:
            raise ConfigError(f"{keys.where}.{section} is {values!r}, which is not supported; {REMEDY}")
    groups = keys.section("config_groups")
    keys.check("quantization_status", "global_compression_ratio", "version", "kv_cache_scheme")
    found = []
    for name in groups.values:
        group = groups.section(name)
        group.take("format", form, form)
        weights = group.section("weights")
        group.check("targets", "input_activations", "output_activations")
        found.append(COMPRESSED[form](keys, weights))
    if not found or any(each != found[0] for each in found):
        raise ConfigError(
            f"{keys.where}.config_groups has {len(found)} ways to store weights; one is supported: {REMEDY}"
        )
    return found[0]


WEIGHT_KEYS = ("observer", "observer_kwargs", "dynamic", "scale_dtype", "zp_dtype", "targets")
"""Keys that say how a group's weights were quantized, and do not affect how they are stored."""


def _read_compressed_bytes(keys: _Keys, weights: _Keys) -> ByteCodes:
    kind = weights.take("type", "int", "int", "float")
    weights.take("num_bits", 8, 8)
    weights.take("symmetric", True, True)
    strategy = weights.take("strategy", "tensor", "tensor", "channel", "block")
    block = weights.block("block_structure")
    if (block is None) == (strategy == "block"):
        raise ConfigError(f"{weights.where} has strategy {strategy!r} and block_structure {block}")
    weights.take("actorder", None, None)
    weights.check(*WEIGHT_KEYS, "group_size")
    return ByteCodes("compressed-tensors", keys.plain, E4M3 if kind == "float" else "int8", block)


def _read_compressed_integers(keys: _Keys, weights: _Keys) -> PackedIntegers:
    weights.take("type", "int", "int")
    bits = weights.take("num_bits", 4, 4, 8)
    is_symmetric = weights.is_true("symmetric", True)
    order = weights.take("actorder", None)
    if order not in (None, "weight", "static"):
        raise ConfigError(
            f"{weights.where}.actorder is {order!r}: inputs in the order of their activations (act-order) are not "
            f"supported; {REMEDY}"
        )
    strategy = weights.take("strategy", "channel", "group", "channel")
    size = weights.size("group_size", -1)
    if strategy == "group" and size is None:
        raise ConfigError(f"{weights.where} has strategy 'group' and no group_size")
    weights.take("block_structure", None, None)
    weights.check(*WEIGHT_KEYS)
    return PackedIntegers("compressed-tensors", keys.plain, bits, size if strategy == "group" else None, is_symmetric)


def _read_compressed_nvfp4(keys: _Keys, weights: _Keys) -> Nvfp4:
    weights.take("type", "float", "float")
    weights.take("num_bits", 4, 4)
    weights.take("symmetric", True, True)
    weights.take("strategy", "tensor_group", "tensor_group")
    weights.take("group_size", 16, 16)
    weights.take("actorder", None, None)
    weights.check(*WEIGHT_KEYS, "block_structure")
    return Nvfp4("compressed-tensors", keys.plain, COMPRESSED_NVFP4)


COMPRESSED: Mapping[str, Callable[[_Keys, _Keys], Quantization]] = {
    "pack-quantized": _read_compressed_integers, "float-quantized": _read_compressed_bytes,
    "int-quantized": _read_compressed_bytes, "naive-quantized": _read_compressed_bytes,
    "nvfp4-pack-quantized": _read_compressed_nvfp4,
}  # fmt: skip
"""`format` of compressed-tensors -> function that reads the weights of a group."""


def _read_awq(keys: _Keys) -> Awq:
    keys.take("bits", 4, 4)
    keys.take("w_bit", 4, 4)
    keys.take("version", "gemm", "gemm", "GEMM")
    keys.take("zero_point", True, True)
    group = keys.size("group_size", 128)
    keys.check("backend", "do_fuse", "exllama_config", "q_group_size")
    return Awq("awq", keys.plain, group)


def _read_gptq(keys: _Keys) -> Gptq:
    bits = keys.take("bits", 4, 4, 8)
    has_order = keys.is_true("desc_act", False)
    form = keys.take("checkpoint_format", "gptq", "gptq", "gptq_v2")
    group = keys.size("group_size", 128)
    keys.check(
        "damp_percent", "static_groups", "sym", "true_sequential", "meta", "lm_head", "dataset", "tokenizer", "backend",
        "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id",
        "use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length", "cache_block_outputs",
        "damp_auto_increment", "modules_in_block_to_quantize", "pack_dtype", "model_name_or_path",
        "model_file_base_name",
    )  # fmt: skip
    return Gptq("gptq", keys.plain, bits, group, 1 if form == "gptq" else 0, has_order)


READERS: Mapping[str, Callable[[_Keys], Quantization]] = {
    "fp8": _read_fp8, "fbgemm_fp8": _read_fbgemm, "mxfp4": _read_mxfp4, "compressed-tensors": _read_compressed,
    "modelopt": _read_modelopt, "awq": _read_awq, "gptq": _read_gptq,
}  # fmt: skip
"""Value of `quant_method` -> function that reads the other keys."""
