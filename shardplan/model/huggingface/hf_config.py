"""Reads a Hugging Face config.json, and checks it before a model is built from it."""

import json
from typing import Any

from shardplan.errors import ConfigError, one_line
from shardplan.model.axes import MAX_SIZE
from shardplan.model.bundled_configs import bundled_name, read_config_file
from shardplan.model.corrections.levanter_compat import ACTIVATION_KEYS, ACTIVATIONS, FIXED_VALUES
from shardplan.model.huggingface.kept_codes import KEEP_KEY, check_can_keep
from shardplan.model.huggingface.model_types import LEFT_OUT_KEYS
from shardplan.model.huggingface.rope_keys import read_rope
from shardplan.model.huggingface.support import check_supported
from shardplan.model.huggingface.text_part import read_text_part
from shardplan.model.model_class import CLASS_KEY, DECODER, class_of, is_own_class, resolve_class
from shardplan.storage import Folder, read_bytes
from shardplan.storage.contents import describe_contents, describe_folder

POSITIVE_INTEGER_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "num_local_experts", "num_experts_per_tok", "n_embd",
    "n_layer", "n_head", "n_positions", "n_inner",
)  # fmt: skip
"""Keys whose value, if given and not null, must be a positive integer."""
WINDOW_TYPES = ("gemma2", "mistral", "mixtral", "qwen2", "qwen3")
"""Model types that use `sliding_window`; transformers ignores the key for others."""
HEAD_DIM_TYPES = ("gemma", "gemma2", "qwen3")
"""Model types whose head size does not follow from other keys."""
SIZE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions",
)  # fmt: skip
"""Keys that may be absent, for the model type's default, but must not be null."""
BOOLEAN_KEYS = ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "scale_attn_by_inverse_layer_idx")
"""Keys whose value, if given and not null, must be true or false."""
POSITIVE_NUMBER_KEYS = ("rope_theta", "rms_norm_eps", "layer_norm_epsilon", "query_pre_attn_scalar")
"""Keys whose value, if given and not null, must be a positive number."""


def read_config(
    path: str | None, folder: Folder | None, model_class: str | None = None, keeps_dtype: bool = False
) -> dict[str, Any]:
    """Read the config.json at `path`, or of the bundled model `path`; without `path`, the config.json in `folder`.

    For a multimodal wrapper, the configuration of its text model is returned.

    Args:
        model_class: name of the class that computes the model (`shardplan.model.model_class`); default: the decoder.
            The name of any other class is added to the keys.
        keeps_dtype: whether weights stay on the devices as they are stored (`load.keep_dtype`), which is added to the
            keys.

    Raises:
        ConfigError: the file does not exist, it does not describe a model, or the model is not supported; or
            `keeps_dtype` is set, and the weights cannot stay as they are stored.
    """
    where = path or f"{folder.ref if folder else ''}/config.json"
    data = read_config_file(path) if path is not None else _read_in_folder(folder)
    if data is None:
        kind = describe_folder(folder.ref, folder) if folder else None
        if folder and kind:
            raise ConfigError(f"{folder.ref} has no config.json: {kind}")
        raise ConfigError(f"{where} does not exist; model.ref must be a Hugging Face checkpoint folder")
    try:
        loaded = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {describe_contents(data) or one_line(error)}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{where} holds no keys; it is not the config.json of a Hugging Face model")
    loaded.pop(CLASS_KEY, None)  # a checkpoint must not choose which code is imported
    loaded.pop(KEEP_KEY, None)
    if model_class is not None and is_own_class(resolve_class(model_class, loaded.get("model_type"))):
        # the class decides what the keys mean; its name replaces a missing model type
        name = model_class.rpartition(":")[2]
        _check_is_decoder(model_class, keeps_dtype)
        return {"model_type": name, **loaded, CLASS_KEY: model_class}
    if not isinstance(loaded.get("model_type"), str):
        raise ConfigError(
            f"{where} has no 'model_type'; it is not the config.json of a Hugging Face model (of your own model, set "
            "model.levanter_class)"
        )
    values, where = read_text_part(loaded, where)
    name = resolve_class(model_class, values["model_type"])
    _check_is_decoder(name, keeps_dtype)
    if keeps_dtype:
        check_can_keep(values, where)
        values = {**values, KEEP_KEY: True}
    return check_config(values if name == DECODER else {**values, CLASS_KEY: name}, where)


def _check_is_decoder(name: str, keeps_dtype: bool) -> None:
    """Check that a model whose weights stay as they are stored is computed by the decoder.

    Raises:
        ConfigError: another class computes the model.
    """
    if keeps_dtype and name != DECODER:
        raise ConfigError(
            f"load.keep_dtype is for shardplan's decoder, and the model is a {name}; leave it out, or leave "
            "model.levanter_class out"
        )


def _read_in_folder(folder: Folder | None) -> bytes | None:
    """Read the config.json of a checkpoint folder; None if it has none.

    Raises:
        ConfigError: the folder cannot be read; if the model is bundled, the message says so.
    """
    try:
        return read_bytes(folder, "config.json") if folder else None
    except ConfigError as error:
        name = bundled_name(folder.ref) if folder else None
        if name is None:
            raise
        raise ConfigError(f"{error}; to plan without weights, use --model {name}, which is bundled") from error


def check_config(values: dict[str, Any], where: str) -> dict[str, Any]:
    """Check the configuration of a model, and return it in the form that the model's class reads.

    The decoder gets sizes that released files leave out; Levanter's classes get rotary embeddings in one form.

    Raises:
        ConfigError: the model is not supported, or a value is not valid.
    """
    check_supported(values, where)
    if class_of(values) == DECODER:  # its family checks every key
        left_out = LEFT_OUT_KEYS.get(values["model_type"], {})
        return {**left_out, **values}
    _check_values(values, where)
    return values if values["model_type"] == "gpt2" else read_rope(values, where)


def _check_values(values: dict[str, Any], where: str) -> None:
    """Check sizes, numbers, and settings for which Levanter supports only some values; missing keys are valid.

    Raises:
        ConfigError: a value is not valid or not supported.
    """
    model_type = values["model_type"]
    window = ("sliding_window",) if model_type in WINDOW_TYPES else ()
    for key in (*POSITIVE_INTEGER_KEYS, *window):
        value = values.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= MAX_SIZE):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive integer of at most {MAX_SIZE}")
        if value is None and key in values and key in SIZE_KEYS:
            raise ConfigError(f"{where}: {key} is null; it must be a positive integer")
    for key in BOOLEAN_KEYS:
        if not isinstance(values.get(key), bool | None):
            raise ConfigError(f"{where}: {key} is {values[key]!r}; it must be true or false")
    if "head_dim" in values and values["head_dim"] is None and model_type in HEAD_DIM_TYPES:
        raise ConfigError(f"{where}: head_dim is null; a {model_type} needs a number, which is not hidden_size / heads")
    if "head_dim" in values and (values["head_dim"] or 0) % 2:
        raise ConfigError(f"{where}: head_dim is {values['head_dim']}; rotary embeddings need an even number")
    for key in POSITIVE_NUMBER_KEYS:
        value = values.get(key)
        if value is not None and (type(value) not in (int, float) or not 0 < value < float("inf")):
            raise ConfigError(f"{where}: {key} is {value!r}; it must be a positive number")
    for key, supported in FIXED_VALUES.get(model_type, {}).items():
        if values.get(key) is not None and values[key] not in supported:
            raise ConfigError(
                f"{where}: {key} is {values[key]!r}; Levanter's {model_type} supports only "
                f"{' or '.join(repr(each) for each in supported)}"
            )
    key = ACTIVATION_KEYS.get(model_type)
    if key is not None and values.get(key) is not None and values[key] not in ACTIVATIONS:
        raise ConfigError(f"{where}: {key} is {values[key]!r}; Levanter has only {', '.join(sorted(ACTIVATIONS))}")
