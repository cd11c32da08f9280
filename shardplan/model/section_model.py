"""Builds the model that the `model` section of a Levanter configuration describes, without a config.json."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import draccus
import haliax as hax
from levanter.layers.attention import AttentionMask

from shardplan.errors import ConfigError, nearest, one_line
from shardplan.model.model_class import DECODER, LEVANTER_CLASSES
from shardplan.model.registry import Model, abstract_module, config_class

SECTION_TYPES = {
    "gemma": "gemma", "gemma2": "gemma2", "gpt2": "gpt2", "llama": "llama", "mistral": "mistral", "mixtral": "mixtral",
    "olmo2": "olmo2", "qwen": "qwen2", "qwen3": "qwen3",
}  # fmt: skip
"""`type` of a model section -> `model_type` of Hugging Face."""
DECODER_SECTION = "shardplan.decoder.section:DecoderSection"
"""The class of sections for shardplan's own decoder, which name a config.json."""
DECODER_TYPE = "shardplan_decoder"
VOCABULARIES = {
    "gpt2": 50257, "openai-community/gpt2": 50257, "EleutherAI/gpt-neox-20b": 50277, "meta-llama/Llama-2": 32000,
    "NousResearch/Llama-2": 32000, "huggyllama/llama": 32000, "meta-llama/Llama-3": 128256,
    "meta-llama/Meta-Llama-3": 128256, "NousResearch/Meta-Llama-3": 128256, "stanford-crfm/marin-tokenizer": 128256,
    "marin-community/marin-tokenizer": 128256, "google/gemma-2": 256000, "google/gemma-7b": 256000,
    "mistralai/Mistral-7B-v0.1": 32000, "mistralai/Mixtral": 32000, "mistralai/Mistral-7B-v0.3": 32768,
}  # fmt: skip
"""Prefix of a tokenizer's name on the Hub -> number of tokens in its vocabulary."""
DEFAULT_TOKENIZER = "gpt2"
"""The tokenizer that Levanter uses if the file names none."""
ASSUMED_VOCABULARY = 128256
"""Number of tokens assumed for unknown tokenizers."""


def vocabulary_of(tokenizer: str) -> int | None:
    """Return the number of tokens of a tokenizer on the Hub; None if the tokenizer is unknown.

    >>> vocabulary_of("meta-llama/Llama-3.1-8B")
    128256
    """
    begins = [name for name in VOCABULARIES if tokenizer == name or ("/" in name and tokenizer.startswith(name))]
    return VOCABULARIES[max(begins, key=len)] if begins else None


def build_section_model(section: Mapping[str, Any], vocabulary: int, position: int | None) -> Model:
    """Build the Levanter model of a `model` section, for a vocabulary of `vocabulary` tokens.

    Args:
        position: tokens of a sequence, at most the model's number of positions, which is the default.

    Raises:
        ConfigError: the type is not supported, Levanter refuses a value, or the model has too few positions.
    """
    type_name = section.get("type", "llama")
    if type_name not in SECTION_TYPES and type_name != DECODER_TYPE:
        known = [*SECTION_TYPES, DECODER_TYPE]
        raise ConfigError(f"model.type {type_name!r} is not supported; {nearest(str(type_name), known)}")
    import_module("levanter.config")  # registers how values such as checkpointing policies are decoded
    values = {key: value for key, value in section.items() if key != "type"}
    is_decoder = type_name == DECODER_TYPE
    class_name = DECODER if is_decoder else LEVANTER_CLASSES[SECTION_TYPES[type_name]]
    section_class = config_class(DECODER_SECTION if is_decoder else class_name)
    try:
        config = draccus.decode(section_class, values)
        template = abstract_module(config, hax.Axis("vocab", vocabulary))
    except ConfigError:
        raise
    except Exception as error:  # Levanter raises anything for an odd configuration
        raise ConfigError(f"model: Levanter cannot build this {type_name}: {one_line(error)}") from error
    if position is not None and position > config.max_Pos.size:
        raise ConfigError(f"the file has {position} tokens per sequence, and its model {config.max_Pos.size} positions")
    model_type = config.family if is_decoder else SECTION_TYPES[type_name]
    window = getattr(config, "sliding_window", None) if type_name == "mistral" else None
    is_window_used = window is not None and position is not None and window < position
    soft_cap = config.logit_soft_cap if is_decoder else getattr(config, "final_logit_softcapping", None)
    mask = AttentionMask.causal(sliding_window=window if is_window_used else None)
    return Model(model_type, class_name, config, template, mask, soft_cap, config.max_Pos.size)
