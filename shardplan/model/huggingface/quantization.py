"""The quantization_config of a config.json: how a checkpoint stores its weights, where they are not plain numbers.

Every key is read or refused. Which tensors are stored so, the files say; `Quantization.is_plain` must agree.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from shardplan.errors import ConfigError, nearest

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe stored weights."""
FORMATS = {
    "e4m3": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn", "e5m2": "float8_e5m2", "float8_e5m2": "float8_e5m2",
}  # fmt: skip
"""Value of `fmt` -> type of the stored numbers."""
PLAIN_KEYS = ("modules_to_not_convert", "ignored_layers", "ignore")
"""Keys that list modules which are stored as plain numbers."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are stored."""

    plain_modules: tuple[str, ...]
    """Modules that are stored as plain numbers: parts of names, with `*` for anything, or `re:` and a pattern."""
    METHOD: ClassVar[str] = ""
    """Value of `quant_method`."""

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is said to be stored as plain numbers.

        >>> Mxfp4(("model.layers.*.mlp.gate", "lm_head")).is_plain("model.layers.3.mlp.gate.weight")
        True
        """
        return any(_pattern(module).search(name) for module in self.plain_modules)


@dataclass(frozen=True)
class Fp8(Quantization):
    """Numbers of eight bits with scales of blocks, rows, matrices or tensors."""

    dtype: str
    """Type of the stored numbers."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None if a tensor, or each of its rows, has one."""
    METHOD = "fp8"


@dataclass(frozen=True)
class Mxfp4(Quantization):
    """Numbers of four bits, 32 of which share a power of two (gpt-oss)."""

    METHOD = "mxfp4"


@dataclass(frozen=True)
class PackedIntegers(Quantization):
    """Integers of four or eight bits in words of 32 bits, with scales of groups of a row (compressed-tensors)."""

    bits: int
    group: int | None
    """Columns that share a scale; None for all of a row."""
    METHOD = "compressed-tensors"


@dataclass(frozen=True)
class Awq(Quantization):
    """Integers of four bits with scales and zero points of groups of rows, in the order of AWQ's kernel."""

    group: int
    METHOD = "awq"


@dataclass(frozen=True)
class Gptq(Quantization):
    """Integers of four bits with scales and zero points of groups of rows."""

    group: int
    zero_offset: int
    """What is added to stored zero points."""
    METHOD = "gptq"


def read_quantization(config: Mapping[str, Any], where: str) -> Quantization | None:
    """Read how the weights are stored; None for plain numbers.

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
            f"supported ({', '.join(READERS)} are); use the checkpoint in bfloat16 or float32 that it was made from"
        )
    return read(_Keys(values, f"{where}: {key}"))


class _Keys:
    """The keys of a quantization_config, each of which is taken or ignored by name."""

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        self.values, self.where = values, where
        self.known = {"quant_method", *PLAIN_KEYS}
        modules: list[str] = []
        for key in PLAIN_KEYS:
            listed = values.get(key) or []
            if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
                raise ConfigError(f"{where}.{key} is {listed!r}; it must be a list of names of modules")
            modules += listed
        self.plain = tuple(modules)

    def take(self, name: str, default: Any, *allowed: Any) -> Any:
        """Return a value; of those that are allowed, if any are named."""
        self.known.add(name)
        value = self.values.get(name, default)
        value = default if value is None else value
        if allowed and value not in allowed:
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be {' or '.join(map(repr, allowed))}")
        return value

    def size(self, name: str, default: Any = None) -> int:
        """Return a positive integer."""
        value = self.take(name, default)
        if type(value) is not int or value < 1:
            raise ConfigError(f"{self.where}.{name} is {value!r}; it must be a positive integer")
        return value

    def check(self, *ignored: str) -> None:
        """Refuse keys that are neither taken nor known to change no weight."""
        method = self.values["quant_method"]
        for name in self.values.keys() - self.known - {*ignored}:
            if self.values[name] is not None:
                known = sorted({*self.known, *ignored})
                raise ConfigError(f"{self.where}.{name} is not known for {method}; {nearest(name, known)}")


def _read_fp8(keys: _Keys) -> Fp8:
    fmt = FORMATS[keys.take("fmt", "e4m3", *FORMATS)]
    block = keys.take("weight_block_size", None)
    is_block = isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    if block is not None and not is_block:
        raise ConfigError(
            f"{keys.where}.weight_block_size is {block!r}; it must be two positive integers, rows and columns"
        )
    # how a server computes changes no weight
    keys.check("activation_scheme", "scale_fmt", "dequantize")
    return Fp8(keys.plain, fmt, None if block is None else (block[0], block[1]))


def _read_mxfp4(keys: _Keys) -> Mxfp4:
    keys.check("dequantize")
    return Mxfp4(keys.plain)


def _read_packed(keys: _Keys) -> PackedIntegers:
    keys.take("format", "pack-quantized", "pack-quantized")
    keys.take("sparsity_config", {}, {})
    keys.take("kv_cache_scheme", None, None)
    groups = keys.take("config_groups", {})
    keys.check("quantization_status", "global_compression_ratio", "version", "transform_config")
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ConfigError(f"{keys.where}.config_groups has {len(groups)} groups; one is supported")
    [(name, group)] = groups.items()
    where = f"{keys.where}.config_groups.{name}.weights"
    weights = _Keys({"quant_method": PackedIntegers.METHOD, **(group.get("weights") or {})}, where)
    weights.take("type", "int", "int")
    weights.take("symmetric", True, True)
    weights.take("actorder", None, None)
    strategy = weights.take("strategy", "channel", "group", "channel")
    bits = weights.take("num_bits", 4, 4, 8)
    size = weights.size("group_size") if strategy == "group" else None
    weights.check("observer", "observer_kwargs", "dynamic", "block_structure", "group_size", "scale_dtype", "zp_dtype")
    return PackedIntegers(keys.plain, bits, size)


def _read_awq(keys: _Keys) -> Awq:
    keys.take("bits", 4, 4)
    keys.take("version", "gemm", "gemm", "GEMM")
    keys.take("zero_point", True, True)
    group = keys.size("group_size", 128)
    keys.check("backend", "do_fuse", "exllama_config")
    return Awq(keys.plain, group)


def _read_gptq(keys: _Keys) -> Gptq:
    keys.take("bits", 4, 4)
    if keys.take("desc_act", False):
        raise ConfigError(
            f"{keys.where}.desc_act is true: its rows are in the order of their activations (act-order), which is not "
            "supported; use a checkpoint without it"
        )
    form = keys.take("checkpoint_format", "gptq", "gptq", "gptq_v2")
    group = keys.size("group_size", 128)
    keys.check(
        "damp_percent", "static_groups", "sym", "true_sequential", "meta", "lm_head", "dataset", "tokenizer", "backend",
        "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block", "batch_size", "pad_token_id",
        "use_cuda_fp16", "use_exllama", "exllama_config", "max_input_length", "cache_block_outputs",
        "damp_auto_increment", "modules_in_block_to_quantize", "pack_dtype", "model_name_or_path",
        "model_file_base_name",
    )  # fmt: skip
    return Gptq(keys.plain, group, 1 if form == "gptq" else 0)


READERS: Mapping[str, Callable[[_Keys], Quantization]] = {
    Fp8.METHOD: _read_fp8, Mxfp4.METHOD: _read_mxfp4, PackedIntegers.METHOD: _read_packed, Awq.METHOD: _read_awq,
    Gptq.METHOD: _read_gptq,
}  # fmt: skip
"""Value of `quant_method` -> what reads the other keys."""


def _pattern(module: str) -> re.Pattern[str]:
    """Return the pattern of the names of a module's tensors."""
    if module.startswith("re:"):
        return re.compile(module.removeprefix("re:"))
    parts = ".*".join(map(re.escape, module.split("*")))
    return re.compile(rf"(^|\.){parts}(\.|$)")
