"""Checks the rotary embeddings of a config.json, and converts the keys of transformers 4 and 5 to one form.

transformers 5 writes `rope_parameters`; transformers 4 wrote `rope_theta` and `rope_scaling`, and many files mix them.
They are read as by transformers 5: `rope_scaling` wins over `rope_parameters`, a `rope_theta` inside of these wins over
`rope_theta` at the top level, and the default of the model type comes last. Imports no JAX.
"""

import math
from collections.abc import Mapping
from typing import Any

from shardplan.errors import ConfigError

NEEDED_KEYS = {
    "default": (),
    "dynamic": ("factor",),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": (),
}
"""Type of scaling -> its required keys; all keys of YaRN have defaults."""
NEUTRAL_VALUES = {"partial_rotary_factor": 1.0, "llama_4_scaling_beta": 0.0}
"""Key that changes the computation for other model types -> its value that changes nothing."""
ROPE_KEYS = ("rope_scaling", "rope_parameters", "rope_theta")


def read_rope(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a config.json that describes its rotary embeddings only by `rope_theta` and `rope_scaling`.

    `rope_theta` is absent if the model type's default applies, and `rope_scaling` is None if frequencies are not
    scaled.

    Args:
        where: name of the file, for messages.

    Raises:
        ConfigError: shardplan does not support the rotary embeddings, or a value is missing or wrong.
    """
    source = next((key for key in ROPE_KEYS[:2] if config.get(key)), "rope_scaling")
    rope = config.get(source) or {}
    if not isinstance(rope, dict):
        raise ConfigError(f"{where}: {source} is {rope!r}; it must be a mapping")
    nested = [key for key, value in rope.items() if isinstance(value, dict)]
    if nested:
        raise ConfigError(
            f"{where}: {source} has values for kinds of layers ({', '.join(nested)}); only rotary embeddings that all "
            f"layers of a {config['model_type']} share are supported"
        )
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if not isinstance(kind, str) or kind not in NEEDED_KEYS:
        raise ConfigError(
            f"{where}: {source} has the type {kind!r}, which is not supported (supported: {', '.join(NEEDED_KEYS)})"
        )
    for key, neutral in NEUTRAL_VALUES.items():
        if rope.get(key) not in (None, neutral):
            raise ConfigError(f"{where}: {source}.{key} is {rope[key]!r}; only {neutral!r} is supported")
    result = {key: value for key, value in config.items() if key not in ROPE_KEYS}
    theta = rope.get("rope_theta") or config.get("rope_theta")
    if theta is not None:
        result["rope_theta"] = _positive(
            theta, "rope_theta" if "rope_theta" in config else f"{source}.rope_theta", where
        )
    for key in NEEDED_KEYS[kind]:
        _positive(rope.get(key), f"{source}.{key}", where)
    return {**result, "rope_scaling": _scaling(kind, rope, config, source, where)}


def _scaling(
    kind: str, rope: Mapping[str, Any], config: Mapping[str, Any], source: str, where: str
) -> dict[str, Any] | None:
    """Return the scaling of the frequencies with all its values; None if they are not scaled."""
    match kind:
        case "linear":
            return {"rope_type": kind, "factor": rope["factor"]}
        case "llama3":
            original = _original_positions(rope, config, source, where)
            scaling = {key: rope[key] for key in NEEDED_KEYS[kind]}
            return {"rope_type": kind, **scaling, "original_max_position_embeddings": original}
        case "yarn":
            return _yarn(rope, config, source, where)
        case _:
            # "dynamic" changes the base only for sequences longer than max_position_embeddings, and no workload may
            # have such sequences
            return None


def _original_positions(rope: Mapping[str, Any], config: Mapping[str, Any], source: str, where: str) -> float:
    """Return the number of positions before frequencies were scaled; default: `max_position_embeddings`."""
    name = "original_max_position_embeddings"
    if config.get(name) is not None:
        return _positive(config[name], name, where)
    if rope.get(name) is not None:
        return _positive(rope[name], f"{source}.{name}", where)
    return _positive(config.get("max_position_embeddings"), "max_position_embeddings", where)


def _yarn(rope: Mapping[str, Any], config: Mapping[str, Any], source: str, where: str) -> dict[str, Any]:
    """Return the values of YaRN, with every default filled in."""
    values = {
        key: _positive(rope[key], f"{source}.{key}", where) if rope.get(key) else None  # 0 means the default
        for key in ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")
    }
    original = _original_positions(rope, config, source, where)
    factor = values["factor"]
    if factor is None:
        factor = _positive(config.get("max_position_embeddings"), "max_position_embeddings", where) / original
    attention_factor, mscale, mscale_all_dim = (values[key] for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if attention_factor is None:
        attention_factor = _magnitude(factor, 1.0)
        if mscale is not None and mscale_all_dim is not None:
            attention_factor = _magnitude(factor, mscale) / _magnitude(factor, mscale_all_dim)
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention_factor,
        "beta_fast": values["beta_fast"] or 32.0,
        "beta_slow": values["beta_slow"] or 1.0,
        "original_max_position_embeddings": original,
        "truncate": rope.get("truncate") is not False,
    }


def _magnitude(factor: float, scale: float) -> float:
    """Return YaRN's factor of queries and keys: 0.1 * scale * ln(factor) + 1, or 1 if factor <= 1."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0


def _positive(value: Any, key: str, where: str) -> Any:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        problem = "is missing" if value is None else f"is {value!r}"
        raise ConfigError(f"{where}: {key} {problem}; it must be a positive number")
    return value
