"""The config.json of a model that a Levanter converter saves.

Levanter makes it from its own configuration, which has no place for some keys of Hugging Face. So where the model has
the sizes of the converter's reference checkpoint, the keys are those of the reference, and only what was changed since
is taken from Levanter.
"""

import json
from enum import Enum
from typing import Any

from shardplan.checkpoint.match import is_tied
from shardplan.decoder.architecture import Architecture
from shardplan.errors import ConfigError
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.huggingface.model_types import SUPPORTED_TYPES
from shardplan.model.model_class import LEVANTER, is_own_class
from shardplan.model.registry import build_model, name_of_class
from shardplan.storage import open_folder

SIZE_KEYS = (
    "model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "num_local_experts", "n_embd", "n_layer", "n_head",
)  # fmt: skip
"""Keys of config.json that are equal for two checkpoints of one architecture."""


def make_hf_config(converter: Any, model: Any) -> dict[str, Any]:
    """Return the content of config.json for `model`.

    Args:
        converter: a Levanter `HFCheckpointConverter`; its tokenizer and `config_overrides` decide some keys.
        model: a Levanter model.
    """
    values = _to_json(converter._build_hf_config_dict(model))
    own = _to_json(model.config.to_hf_config(model.Vocab.size).to_dict())
    if isinstance(model.config, Architecture):  # it has its config.json; the converter changes some keys
        unchanged = _with_legacy_rope_keys(own)
        changed = {key: v for key, v in _with_legacy_rope_keys(values).items() if v != unchanged.get(key)}
        return {**json.loads(model.config.hf_config), "vocab_size": model.Vocab.size, **changed}
    reference, reference_config = _read_reference(converter)
    if reference_config is None:
        return _with_legacy_rope_keys({**values, **_left_out(own, model)})
    unchanged = _to_json(reference_config.to_hf_config(model.Vocab.size).to_dict())
    if any(own.get(key) != unchanged.get(key) for key in SIZE_KEYS):
        return _with_legacy_rope_keys({**values, **_left_out(own, model)})
    # a key that neither the converter nor a training has set is as the reference has it
    same = [key for key in reference if values.get(key) == own.get(key) == unchanged.get(key)]
    result = {**values, **{key: reference[key] for key in same}}
    if getattr(model.config, "rope", None) != getattr(reference_config, "rope", None):
        result |= _rope_keys(own, model.config)
    return _with_legacy_rope_keys(result)


def _to_json(values: dict[str, Any]) -> dict[str, Any]:
    """Return values after a round trip through JSON."""

    def encode(value: Any) -> str:
        if isinstance(value, Enum):  # an activation function of Levanter
            return value.name
        raise TypeError(f"{value!r} is not a value of a config.json")

    result: dict[str, Any] = json.loads(json.dumps(values, default=encode))
    return result


def _read_reference(converter: Any) -> tuple[dict[str, Any], Any]:
    """Return the config.json of the reference checkpoint, and Levanter's configuration made from it.

    The configuration is None if there is no reference checkpoint, or none that shardplan can read.
    """
    if converter.reference_checkpoint is None:
        return {}, None
    try:
        values = converter.default_hf_config.to_dict()
        if values["model_type"] not in SUPPORTED_TYPES:
            return {}, None
        given = converter.LevConfigClass
        name = name_of_class(given if isinstance(given, type) else type(given))
        folder = open_folder(str(converter.reference_checkpoint))
        hf_config = read_config(None, folder, LEVANTER if is_own_class(name) else name)
        return _to_json(values), build_model(hf_config, position=1).config
    except (ConfigError, OSError):  # another model, or a hub that does not answer: Levanter saves all the same
        return {}, None


def _left_out(own: dict[str, Any], model: Any) -> dict[str, Any]:
    """Return the keys that describe a Levanter model but are missing from `to_hf_config` of its configuration."""
    config = model.config
    result: dict[str, Any] = {"tie_word_embeddings": True} if is_tied(model) else {}
    if hasattr(config, "attention_config") and "hidden_size" in own:
        head_dim = config.attention_config().head_size
        implied = own.get("head_dim") or own["hidden_size"] // own["num_attention_heads"]
        if head_dim != implied:
            result["head_dim"] = head_dim
    return result | _rope_keys(own, config)


def _rope_keys(own: dict[str, Any], config: Any) -> dict[str, Any]:
    """Return the keys of rotary embeddings; `to_hf_config` omits their scaling for Mistral and Mixtral."""
    rope = own.get("rope_parameters")
    if not getattr(config, "rope", None) or (rope is not None and "rope_theta" not in rope):
        return {}  # none, or one for each kind of layer
    theta, scaling = config.rope.to_hf_config()
    keys = {"rope_theta": theta, "rope_scaling": scaling}
    if rope is not None:
        keys["rope_parameters"] = {"rope_type": "default", **(scaling or {}), "rope_theta": theta}
    return keys


def _with_legacy_rope_keys(values: dict[str, Any]) -> dict[str, Any]:
    """Add the older keys of rotary embeddings, because Levanter does not read `rope_parameters`."""
    rope = values.get("rope_parameters")
    if not isinstance(rope, dict) or "rope_theta" not in rope:
        return values
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    is_scaled = scaling.get("rope_type", "default") != "default"
    return {**values, "rope_theta": rope["rope_theta"], "rope_scaling": scaling if is_scaled else None}
