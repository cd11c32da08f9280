"""The quantization_config of a config.json: how a checkpoint stores its weights, where they are not plain numbers.

Every key is read or refused. Which tensors are stored so, the files say; `Quantization.is_plain` must agree.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ConfigError, nearest

KEYS = ("quantization_config", "compression_config")
"""Keys of config.json that describe stored weights."""
FP8 = "fp8"
FORMATS = {
    "e4m3": "float8_e4m3fn",
    "float8_e4m3fn": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    "float8_e5m2": "float8_e5m2",
}
"""Value of `fmt` -> type of the stored numbers."""
FP8_KEYS = {
    "quant_method", "fmt", "weight_block_size", "modules_to_not_convert", "ignored_layers", "activation_scheme",
    "scale_fmt", "dequantize",
}  # fmt: skip
"""Keys that checkpoints in fp8 have. The last three say how a server computes, and change no weight."""


@dataclass(frozen=True)
class Quantization:
    """How the weights of a checkpoint are stored."""

    method: str
    dtype: str
    """Type of the stored numbers."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None if a tensor, or each of its rows, has one."""
    plain_modules: tuple[str, ...]
    """Modules that are stored as plain numbers: parts of names, with `*` for anything, or `re:` and a pattern."""

    def is_plain(self, name: str) -> bool:
        """Whether a tensor is said to be stored as plain numbers.

        >>> Quantization("fp8", "float8_e4m3fn", (128, 128), ("model.layers.*.mlp.gate", "lm_head")).is_plain(
        ...     "model.layers.3.mlp.gate.weight")
        True
        """
        return any(_pattern(module).search(name) for module in self.plain_modules)


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
    if method != FP8:
        raise ConfigError(
            f"{where}: it has a {key}{f' ({method})' if method else ''}, and weights that are quantized so are not "
            f"supported ({FP8} is); use the checkpoint in bfloat16 or float32 that it was made from"
        )
    for name in values.keys() - FP8_KEYS:
        if values[name] is not None:
            raise ConfigError(f"{where}: {key}.{name} is not known for {FP8}; {nearest(name, sorted(FP8_KEYS))}")
    fmt = values.get("fmt", "e4m3")
    if fmt not in FORMATS:
        raise ConfigError(f"{where}: {key}.fmt is {fmt!r}; {nearest(str(fmt), FORMATS)}")
    return Quantization(
        FP8, FORMATS[fmt], _read_block(values, f"{where}: {key}"), _read_modules(values, f"{where}: {key}")
    )


def _read_block(values: Mapping[str, Any], where: str) -> tuple[int, int] | None:
    block = values.get("weight_block_size")
    if block is None:
        return None
    if not isinstance(block, list) or len(block) != 2 or any(type(n) is not int or n < 1 for n in block):
        raise ConfigError(f"{where}.weight_block_size is {block!r}; it must be two positive integers, rows and columns")
    return block[0], block[1]


def _read_modules(values: Mapping[str, Any], where: str) -> tuple[str, ...]:
    modules: list[str] = []
    for key in ("modules_to_not_convert", "ignored_layers"):
        listed = values.get(key) or []
        if not isinstance(listed, list) or not all(isinstance(name, str) for name in listed):
            raise ConfigError(f"{where}.{key} is {listed!r}; it must be a list of names of modules")
        modules += listed
    return tuple(modules)


def _pattern(module: str) -> re.Pattern[str]:
    """Return the pattern of the names of a module's tensors."""
    if module.startswith("re:"):
        return re.compile(module.removeprefix("re:"))
    parts = ".*".join(map(re.escape, module.split("*")))
    return re.compile(rf"(^|\.){parts}(\.|$)")
