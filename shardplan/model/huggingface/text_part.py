"""Reads the configuration of the text model in the config.json of a multimodal wrapper."""

import logging
from collections.abc import Mapping
from functools import cache
from typing import Any

from shardplan.errors import ConfigError
from shardplan.model.huggingface.model_types import OTHER_TYPES, SUPPORTED_TYPES
from shardplan.model.huggingface.mrope_types import MROPE_TYPES, read_mrope_type
from shardplan.model.huggingface.read_quantization import KEYS as QUANTIZATION_KEYS

TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal wrappers have their text model's configuration."""
TIES = "tie_word_embeddings"
SHARED_KEYS = (TIES, "dtype", "torch_dtype", *QUANTIZATION_KEYS)
"""Keys of the wrapper that apply to its text model as well."""
SIZE_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
)  # fmt: skip
"""Keys of the text model that some wrappers repeat; transformers reads only the text model's."""
TEXT_TYPES = {
    "aya_vision": "cohere2", "gemma3": "gemma3_text", "glm46v": "glm4v_text", "glm4v": "glm4v_text",
    "glm4v_moe": "glm4v_moe_text", "idefics2": "mistral", "idefics3": "llama", "internvl": "qwen2", "janus": "llama",
    "kimi_k25": "kimi_k2", "llama4": "llama4_text", "llava": "llama", "llava_next": "llama",
    "llava_next_video": "llama", "llava_onevision": "qwen2", "mistral3": "mistral", "paligemma": "gemma",
    "qwen2_5_vl": "qwen2_5_vl_text", "qwen2_vl": "qwen2_vl_text", "qwen3_vl": "qwen3_vl_text", "smolvlm": "llama",
    "video_llava": "llama", "vipllava": "llama",
}  # fmt: skip
"""Model type of a wrapper -> model type of its text model, if the text model's configuration does not give it."""
FLAT_TYPES = ("qwen2_5_vl", "qwen2_vl")
"""Wrappers whose released configurations mix the text model's keys with those of images."""
IMAGE_KEYS = ("vision_config",)
"""Keys of the image model in the configurations of `FLAT_TYPES`."""

logger = logging.getLogger(__name__)


def read_text_part(config: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Return the configuration of a wrapper's text model, and log which part of the config.json is read.

    Args:
        where: name of the file, for messages.

    Returns:
        The keys of the text model, and their name in messages. If the model has no wrapper, these are the arguments.

    Raises:
        ConfigError: there is no text model, its model type is neither given nor known, or the wrapper contradicts it.
    """
    outer = config["model_type"]
    if outer in SUPPORTED_TYPES or outer in OTHER_TYPES:
        return config, where
    if outer in MROPE_TYPES:
        return read_mrope_type(config, where), where
    key = next((each for each in TEXT_KEYS if config.get(each) is not None), None)
    if key is None and outer in FLAT_TYPES:
        text = {name: value for name, value in config.items() if name not in IMAGE_KEYS}
        result = read_mrope_type({**text, "model_type": TEXT_TYPES[outer]}, where)
        _say_read(outer, "text model", result, where)
        return result, where
    if outer in TEXT_TYPES and (key is None or not isinstance(config[key], dict)):
        problem = "no text_config" if key is None else f"{config[key]!r} as {key}"
        raise ConfigError(
            f"{where}: it has {problem}; a {outer!r} needs the keys of its text model there, as in the config.json "
            "that it was released with"
        )
    if key is None or not isinstance(config[key], dict):
        return config, where
    inner = dict(config[key])
    inner.setdefault("model_type", TEXT_TYPES.get(outer))
    if not isinstance(inner["model_type"], str):
        raise ConfigError(f"{where}: {key} has no 'model_type', and that of the text model of {outer!r} is not known")
    inner |= _shared_values(config, inner, key, where)
    _say_repeated(config, inner, key, where)
    inner_where = f"{where}, {key}"
    result = read_mrope_type(inner, inner_where)
    _say_read(outer, key, result, where)
    return result, inner_where


def _say_read(outer: str, part: str, result: Mapping[str, Any], where: str) -> None:
    """Log which part of a wrapper is read, if its text model is of a supported type."""
    kind = result["model_type"]
    if kind in SUPPORTED_TYPES:
        _say(f"{where} is that of a {outer}, a model of images and text; its {part} is read, a {kind}")


def _shared_values(config: Mapping[str, Any], inner: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """Return the wrapper's values that apply to its text model.

    Raises:
        ConfigError: wrapper and text model describe the storage of weights differently.
    """
    shared = {name: config[name] for name in SHARED_KEYS if config.get(name) is not None}
    for name in QUANTIZATION_KEYS:
        if name in shared and inner.get(name) is not None and inner[name] != shared[name]:
            raise ConfigError(
                f"{where}: {name} says something else than that of its {key}; remove the one that is not meant"
            )
    if inner.get(TIES) is True:
        # transformers 4 wrote false for the wrapper of a tied model; a head that the files hold is used nevertheless
        shared.pop(TIES, None)
    return shared


def _say_repeated(config: Mapping[str, Any], inner: Mapping[str, Any], key: str, where: str) -> None:
    """Log sizes at a wrapper's top level that differ from its text model's."""
    for name in SIZE_KEYS:
        if None not in (config.get(name), inner.get(name)) and config[name] != inner[name]:
            _say(f"{where}: {name} is {config[name]!r}, and {inner[name]!r} in its {key}, which is read")


@cache  # a command reads the file more than once
def _say(message: str) -> None:
    logger.warning("%s", message)
