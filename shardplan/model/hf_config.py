"""Reads a Hugging Face config.json, and checks it before a model is built from it."""

import json
from typing import Any

from shardplan.errors import ConfigError, one_line
from shardplan.model.axes import MAX_SIZE
from shardplan.model.bundled_configs import BUNDLED, read_config_file
from shardplan.model.levanter_compat import FIXED_VALUES
from shardplan.model.own_model import CLASS_KEY
from shardplan.storage import Folder, read_bytes
from shardplan.storage.contents import describe_contents, describe_folder

POSITIVE_INTEGER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window", "num_local_experts",
    "num_experts_per_tok", "n_embd", "n_layer", "n_head", "n_positions", "n_inner",
)  # fmt: skip
"""Keys whose value, if present and not null, must be a positive integer."""
BOOLEAN_KEYS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "scale_attn_by_inverse_layer_idx")
"""Keys whose value, if present and not null, must be true or false."""
POSITIVE_NUMBER_KEYS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar")
"""Keys whose value, if present and not null, must be a positive number."""


def read_config(path: str | None, folder: Folder | None, own_class: str | None = None) -> dict[str, Any]:
    """Read the config.json at `path`, which may be the name of a bundled model, or else the one in `folder`.

    Args:
        own_class: name of the Levanter configuration class of a model that shardplan does not know, which is added.

    Raises:
        ConfigError: there is none, or it is not the configuration of a model.
    """
    where = path or f"{folder.ref if folder else ''}/config.json"
    data = read_config_file(path) if path is not None else _read_from(folder) if folder else None
    if data is None:
        kind = describe_folder(folder.ref, folder) if folder else None
        raise ConfigError(f"{where} does not exist; {kind or 'model.ref must be a Hugging Face checkpoint folder'}")
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {describe_contents(data) or one_line(error)}") from error
    if not isinstance(loaded, dict) or not isinstance(loaded.get("model_type"), str):
        raise ConfigError(f"{where} has no 'model_type'; it is not the config.json of a Hugging Face model")
    loaded.pop(CLASS_KEY, None)  # which code is imported is not for a checkpoint to say
    if own_class is not None:
        return {**loaded, CLASS_KEY: own_class}  # its keys mean what the class says
    _check(loaded, where)
    return _with_rope_keys(loaded, where)


def _read_from(folder: Folder) -> bytes | None:
    """Return the config.json of a folder; None if it has none.

    Raises:
        ConfigError: the folder cannot be read; the message names the bundled model that it is of, if there is one.
    """
    try:
        return read_bytes(folder, "config.json")
    except ConfigError as error:
        name = folder.ref.partition("@")[0].rpartition("/")[2].lower().removeprefix("meta-")
        bundled = max((each for each in BUNDLED if name.startswith(each)), key=len, default=None)
        if bundled is None:
            raise
        raise ConfigError(f"{error}; {bundled} is bundled: plan with --model {bundled}") from error


def _check(values: dict[str, Any], where: str) -> None:
    """Check sizes and numbers, and the settings of which Levanter supports only one value; missing keys are valid.

    Raises:
        ConfigError: a value is not valid or not supported.
    """
    for key in POSITIVE_INTEGER_KEYS:
        value = values.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_SIZE):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive integer of at most {MAX_SIZE}")
    for key in BOOLEAN_KEYS:
        if not isinstance(values.get(key), bool | None):
            raise ConfigError(f"{where}: {key} is {values[key]!r}; it must be true or false")
    if "head_dim" in values and (values["head_dim"] or 0) % 2:
        raise ConfigError(f"{where}: head_dim is {values['head_dim']}; rotary embeddings need an even number")
    if values.get("quantization_config"):
        raise ConfigError(
            f"{where}: it has a quantization_config, and quantized checkpoints are not supported; use the checkpoint "
            "that was quantized, or plan without this key"
        )
    for key in POSITIVE_NUMBER_KEYS:
        value = values.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive number")
    for model_type in ("", values["model_type"]):
        for key, fixed in FIXED_VALUES.get(model_type, {}).items():
            if values.get(key, fixed) not in (None, fixed):
                raise ConfigError(
                    f"{where}: {key} is {values[key]!r}; Levanter's {values['model_type']} supports only {fixed!r}"
                )


def _with_rope_keys(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Replace `rope_parameters`, which transformers 5 writes, with `rope_theta` and `rope_scaling`."""
    rope = values.get("rope_parameters")
    if rope is None:
        return values
    if not isinstance(rope, dict) or not isinstance(rope.get("rope_theta"), int | float):
        raise ConfigError(f"{where}: rope_parameters {rope!r} have no single rope_theta, which Levanter's models need")
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    unscaled = scaling.get("rope_type", "default") == "default"
    return {**values, "rope_theta": rope["rope_theta"], "rope_scaling": None if unscaled else scaling}
