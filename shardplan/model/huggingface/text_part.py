"""Reads the configuration of the text model in the config.json of a multimodal wrapper."""

import logging
from functools import cache
from typing import Any

from shardplan.errors import ConfigError
from shardplan.model.huggingface.model_types import OTHER_TYPES, SUPPORTED_TYPES

TEXT_KEYS = ("text_config", "llm_config", "language_config")
"""Keys under which multimodal wrappers have the configuration of their text model."""
SHARED_KEYS = ("tie_word_embeddings", "quantization_config", "compression_config")
"""Keys of the wrapper that hold for its text model as well."""
TEXT_TYPES = {
    "aya_vision": "cohere2", "gemma3": "gemma3_text", "idefics2": "mistral", "idefics3": "llama", "internvl": "qwen2",
    "janus": "llama", "llama4": "llama4_text", "llava": "llama", "llava_next": "llama", "llava_onevision": "qwen2",
    "mistral3": "mistral", "paligemma": "gemma", "smolvlm": "llama", "video_llava": "llama", "vipllava": "llama",
}  # fmt: skip
"""Model type of a wrapper -> model type of its text model, if the text model's configuration does not name it."""

logger = logging.getLogger(__name__)


def read_text_part(config: dict[str, Any], where: str) -> tuple[dict[str, Any], str]:
    """Return the configuration of a wrapper's text model, and log which part of the config.json is read.

    Args:
        where: name of the file, for messages.

    Returns:
        The keys of the text model, and their name in messages; for any other model, the arguments.

    Raises:
        ConfigError: the model type of the text model is neither given nor known.
    """
    outer = config["model_type"]
    key = next((each for each in TEXT_KEYS if isinstance(config.get(each), dict)), None)
    if key is None or outer in SUPPORTED_TYPES or outer in OTHER_TYPES:
        return config, where
    inner = dict(config[key])
    inner.setdefault("model_type", TEXT_TYPES.get(outer))
    if not isinstance(inner["model_type"], str):
        raise ConfigError(f"{where}: {key} has no 'model_type', and that of the text model of {outer!r} is not known")
    for shared in SHARED_KEYS:
        if config.get(shared) is not None:
            inner[shared] = config[shared]
    if inner["model_type"] in SUPPORTED_TYPES:
        _say(f"{where} is that of a {outer}, a model of images and text; its {key} is read, a {inner['model_type']}")
    return inner, f"{where}, {key}"


@cache  # a command reads the file more than once
def _say(message: str) -> None:
    logger.warning("%s", message)
