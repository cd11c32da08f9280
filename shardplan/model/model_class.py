"""Decides which class computes a model: shardplan's decoder, Levanter's class for its type, or a user's own class.

By default, evaluation uses the decoder for every model type. Levanter's classes are used where Levanter computes: in
its scripts, for its configuration files, and in training, which its Trainer does. A class that the user names wins.

A class is named `package.module:Class`. `read_config` puts the name into the config.json under `CLASS_KEY`, and a Plan
has it in `model.levanter_class`, so that later steps build, compile and load the model that was planned. Imports no
JAX.
"""

from collections.abc import Mapping
from typing import Any

CLASS_KEY = "levanter_class"
"""Key under which `read_config` adds the class's name to a config.json; without it, the class is the decoder."""
DECODER = "shardplan.decoder.config:DecoderConfig"
"""The configuration class of shardplan's own decoder."""
LEVANTER = "levanter"
"""Name that stands for Levanter's class for the model type, or for the decoder if there is none."""
LEVANTER_CLASSES = {
    "gemma": "levanter.models.gemma:GemmaConfig",
    "gemma2": "levanter.models.gemma:Gemma2Config",
    "gpt2": "levanter.models.gpt2:Gpt2Config",
    "llama": "levanter.models.llama:LlamaConfig",
    "mistral": "levanter.models.mistral:MistralConfig",
    "mixtral": "levanter.models.mixtral:MixtralConfig",
    "olmo2": "levanter.models.olmo:Olmo2Config",
    "qwen2": "levanter.models.qwen:QwenConfig",
    "qwen3": "levanter.models.qwen:Qwen3Config",
}
"""Hugging Face `model_type` -> Levanter's configuration class, for types that Levanter computes as transformers
does."""


def resolve_class(name: str | None, model_type: object) -> str:
    """Return the configuration class of a model.

    Args:
        name: the class that the user names, `LEVANTER`, or None for the decoder.
        model_type: the model type in its config.json.

    >>> resolve_class("levanter", "llama")
    'levanter.models.llama:LlamaConfig'
    """
    if name == LEVANTER:
        return LEVANTER_CLASSES.get(str(model_type), DECODER)
    return name or DECODER


def class_of(hf_config: Mapping[str, Any]) -> str:
    """Return the name of the class that computes a model, given its config.json as `read_config` returns it."""
    return resolve_class(hf_config.get(CLASS_KEY), hf_config["model_type"])


def is_own_class(name: str) -> bool:
    """Return whether a class is a user's own: neither the decoder nor a Levanter class that shardplan knows."""
    return name != DECODER and name not in LEVANTER_CLASSES.values()
