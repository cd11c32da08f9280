"""Checks whether the model of a config.json is supported, by its type and by the keys that change the computation.

Every command and every loader checks this before anything else, so that no user mends the slice, a tensor or a key for
a model that cannot be planned or evaluated. Imports no JAX.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

from shardplan.errors import ConfigError, closest
from shardplan.model.huggingface.foreign_keys import foreign_keys
from shardplan.model.huggingface.model_types import OTHER_TYPES, SUPPORTED_TYPES
from shardplan.model.huggingface.read_quantization import read_quantization
from shardplan.model.model_class import LEVANTER_CLASSES

MISSPELT = 0.85
"""Least similarity to a supported type at which an unknown type counts as misspelt: `lama` does, `llava` does not."""
MAX_NAMED = 3
"""Maximum number of keys that a message names."""


def check_supported(config: Mapping[str, Any], where: str) -> None:
    """Check that shardplan supports the model that `config` describes.

    Args:
        config: the content of a config.json, with a `model_type`.
        where: name of the file, for messages.

    Raises:
        ConfigError: the model type or the quantization is not supported, or the config.json has a key that changes the
            computation and does not belong to the model type.
    """
    model_type = config["model_type"]
    if model_type not in SUPPORTED_TYPES:
        raise ConfigError(f"{where}: {_describe_type(config)}")
    # the decoder's families refuse keys that they do not understand; for Levanter's types, keys are refused here
    foreign = list(foreign_keys(config, model_type)) if model_type in LEVANTER_CLASSES else []
    if foreign:
        raise ConfigError(
            f"{where}: it has {_name_keys(foreign, config)}, which no {model_type!r} has: this is another model than "
            "its model_type says, and is not supported"
        )
    read_quantization(config, where)


def _describe_type(config: Mapping[str, Any]) -> str:
    """Return the message that a model type is not supported, with the nearest supported type and the differences."""
    model_type = config["model_type"]
    supported = f"supported: {', '.join(sorted(SUPPORTED_TYPES))}; for your own model, set model.levanter_class"
    refusal = f"model_type {model_type!r} is not supported"
    other = OTHER_TYPES.get(model_type)
    nearest = other.nearest if other else _nearest(config)
    foreign = list(foreign_keys(config, nearest or ""))
    if other is None and not foreign:
        meant = _misspelt(model_type)
        if meant is not None:
            return f"{refusal}; did you mean {meant!r}? ({supported})"
        return f"{refusal}, and it is not known here how it differs from a type that is ({supported})"
    if other is None:
        differences = _name_keys(foreign, config)
    else:
        named = [f"{name} {_short(config[name])}" for name, _ in foreign[:MAX_NAMED]]
        differences = other.differences + (f" ({', '.join(named)})" if named else "")
    if nearest is None:
        return f"{refusal}, and no type that is comes near it: it has {differences} ({supported})"
    return f"{refusal}; nearest is {nearest!r}, which is another model: {model_type} has {differences} ({supported})"


def _name_keys(foreign: list[tuple[str, str]], config: Mapping[str, Any]) -> str:
    """Format the meaning, name and value of each key."""
    values: dict[str, list[str]] = {}
    for name, meaning in foreign[:MAX_NAMED]:
        values.setdefault(meaning, []).append(f"{name} is {_short(config[name])}")
    return ", ".join(f"{meaning} ({', '.join(each)})" for meaning, each in values.items())


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def _nearest(config: Mapping[str, Any]) -> str | None:
    """Return the supported type nearest to an unknown type, by its name or else by its keys."""
    names = [each for each in SUPPORTED_TYPES if config["model_type"].startswith(each)]
    has_experts = any("expert" in name for name, _ in foreign_keys(config))
    return max(names, key=len, default="mixtral" if has_experts else None)


def _misspelt(model_type: str) -> str | None:
    """Return the supported type that `model_type` probably misspells; None if it names another known model."""
    spelling = re.sub(r"[^a-z0-9]", "", model_type.lower())
    if spelling in SUPPORTED_TYPES:
        return spelling
    meant = closest(spelling, SUPPORTED_TYPES, MISSPELT)
    # names of models differ in digits and endings: qwen4 and llama_moe are no misspellings
    is_longer = meant is not None and spelling.startswith(meant)
    same_digits = meant is not None and re.sub(r"\D", "", spelling) == re.sub(r"\D", "", meant)
    return meant if same_digits and not is_longer else None
