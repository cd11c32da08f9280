"""Which class computes a model: shardplan's decoder, Levanter's class for its type, or a class of your own.

One rule: evaluation computes every type by the decoder. Levanter's classes are used where Levanter computes: in its
scripts, for its configuration files, and in training, which is the work of its Trainer. A class that is named wins.

A class is named as `package.module:Class`. A config.json that was read has the name under `CLASS_KEY`, and a Plan in
`model.levanter_class`, so that whatever is built, compiled or loaded later is what was planned. Imports no JAX.
"""

from collections.abc import Mapping
from typing import Any

CLASS_KEY = "levanter_class"
"""Key under which `read_config` puts the name of the class into a config.json; without it, the decoder computes."""
DECODER = "shardplan.decoder.config:DecoderConfig"
"""The configuration class of shardplan's own decoder."""
LEVANTER = "levanter"
"""Stands for Levanter's class for the type of a model, or the decoder for a type that Levanter does not have."""
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
"""Hugging Face `model_type` -> Levanter's configuration class, for types that it computes as transformers does."""


def resolve_class(name: str | None, model_type: object) -> str:
    """Return the configuration class of a model.

    Args:
        name: the class that is asked for, `LEVANTER`, or None for the decoder.
        model_type: of its config.json.

    >>> resolve_class("levanter", "llama")
    'levanter.models.llama:LlamaConfig'
    """
    if name == LEVANTER:
        return LEVANTER_CLASSES.get(str(model_type), DECODER)
    return name or DECODER


def class_of(hf_config: Mapping[str, Any]) -> str:
    """Return the class that computes the model of a config.json which `read_config` has read."""
    return resolve_class(hf_config.get(CLASS_KEY), hf_config["model_type"])


def is_own_class(name: str) -> bool:
    """Return whether a class is a user's own: neither the decoder nor one of Levanter's that shardplan knows."""
    return name != DECODER and name not in LEVANTER_CLASSES.values()
