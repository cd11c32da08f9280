"""Resolves names of models: model types, released models, and repositories on the Hugging Face hub. Imports no JAX."""

import json
from collections import defaultdict
from dataclasses import dataclass

from shardplan.errors import ConfigError, closest
from shardplan.model.bundled_configs import BUNDLED, bundled_name
from shardplan.model.huggingface.model_types import OTHER_TYPES, SUPPORTED_TYPES
from shardplan.model.huggingface.mrope_types import MROPE_TYPES
from shardplan.model.huggingface.text_part import TEXT_TYPES


@dataclass(frozen=True)
class NamedModel:
    """The model type, and perhaps the released model, that a name stands for."""

    type: str
    """The model type, supported or not."""
    released: str | None = None
    """Name of the released model; None if the name is a model type."""
    wrapper: str | None = None
    """Model type of a multimodal wrapper whose text model is used; None for other names."""


@dataclass(frozen=True)
class RefusedTypes:
    """Unsupported model types that share one reason."""

    types: tuple[str, ...]
    nearest: str | None
    """The most similar supported type; None if no type is similar."""
    differences: str
    """The features that these types have and the nearest supported type lacks."""


def find_model(name: str) -> NamedModel:
    """Resolve the name of a released model, of its repository on the Hugging Face hub, or of a model type.

    >>> find_model("meta-llama/Llama-3.1-8B")
    NamedModel(type='llama', released='llama-3.1-8b', wrapper=None)

    Raises:
        ConfigError: nothing has this name.
    """
    released = name if name in BUNDLED else bundled_name(name)
    if released is not None:
        return NamedModel(_type_of(released), released)
    if name in SUPPORTED_TYPES or name in OTHER_TYPES:
        return NamedModel(name)
    if name in TEXT_TYPES:
        text = TEXT_TYPES[name]
        return NamedModel(MROPE_TYPES[text].type if text in MROPE_TYPES else text, wrapper=name)
    meant = closest(name.rpartition("/")[2], [*BUNDLED, *SUPPORTED_TYPES, *OTHER_TYPES, *TEXT_TYPES])
    hint = f"did you mean {meant!r}?" if meant else "`shardplan models` lists both"
    raise ConfigError(f"{name!r} is no released model that is known here, and no model type; {hint}")


def released_by_type() -> dict[str, tuple[str, ...]]:
    """Return the names of the released models of each supported type, sorted by name and then by size."""
    names: defaultdict[str, list[str]] = defaultdict(list)
    for name in BUNDLED:
        names[_type_of(name)].append(name)
    return {each: tuple(names[each]) for each in sorted(SUPPORTED_TYPES)}


def refused_types() -> tuple[RefusedTypes, ...]:
    """Return the well-known model types that are not supported, grouped by reason."""
    types: defaultdict[tuple[str | None, str], list[str]] = defaultdict(list)
    for name, other in sorted(OTHER_TYPES.items()):
        types[other.nearest, other.differences].append(name)
    return tuple(RefusedTypes(tuple(names), *reason) for reason, names in types.items())


def _type_of(released: str) -> str:
    """Return the model type of a released model."""
    name: str = json.loads(BUNDLED[released].read_bytes())["model_type"]
    return name
