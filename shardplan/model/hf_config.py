"""Hugging Face's config.json: read, and checked before anything is built from it."""

import json
from pathlib import Path
from typing import Any

from shardplan.errors import ConfigError, one_line
from shardplan.storage import Folder, read_bytes

COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "num_local_experts",
    "num_experts_per_tok", "n_embd", "n_layer", "n_head", "n_positions", "n_inner",
)  # fmt: skip
"""Keys that hold positive integers, where they are there and not null."""
NUMBERS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar")
"""Keys that hold positive numbers, where they are there and not null."""
ASSUMED: dict[str, dict[str, Any]] = {
    "": {"attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0},
    "gemma": {"hidden_activation": "gelu_pytorch_tanh"},
    "gpt2": {"scale_attn_weights": True},
}
"""Model type ("" for every type) -> keys that Levanter's models ignore, and the only value they are right for."""


def read_config(path: str | None, folder: Folder | None) -> dict[str, Any]:
    """The config.json at `path`, or else the one in `folder`.

    Raises:
        ConfigError: there is none, or it is not the configuration of a model.
    """
    where = path or f"{folder.ref if folder else ''}/config.json"
    if path is not None:
        try:
            data: bytes | None = Path(path).read_bytes()
        except OSError as error:
            raise ConfigError(f"model.config {path} cannot be read: {error.strerror}") from error
    else:
        data = read_bytes(folder, "config.json") if folder else None
    if data is None:
        raise ConfigError(f"{where} does not exist; model.ref must be a Hugging Face checkpoint folder")
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {one_line(error)}") from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("model_type"), str):
        raise ConfigError(f"{where} has no 'model_type'; it is not the config.json of a Hugging Face model")
    _check(loaded, where)
    return _with_rope_keys(loaded, where)


def _check(values: dict[str, Any], where: str) -> None:
    for key in COUNTS:
        value = values.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive integer")
    for key in NUMBERS:
        value = values.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive number")
    for model_type in ("", values["model_type"]):
        for key, assumed in ASSUMED.get(model_type, {}).items():
            if values.get(key, assumed) not in (None, assumed):
                raise ConfigError(
                    f"{where}: {key} is {values[key]!r}; Levanter's {values['model_type']} has {assumed!r} only"
                )


def _with_rope_keys(values: dict[str, Any], where: str) -> dict[str, Any]:
    """`values` with `rope_theta` and `rope_scaling` in place of `rope_parameters`, as transformers 5 writes them."""
    rope = values.get("rope_parameters")
    if rope is None:
        return values
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), int | float):
        raise ConfigError(f"{where}: rope_parameters {rope!r} have no single rope_theta, which Levanter's models need")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    unscaled = scaling.get("rope_type", "default") == "default"
    return {**values, "rope_theta": rope["rope_theta"], "rope_scaling": None if unscaled else scaling}
