"""Finds the supported features of each model type, by the predicates that planning, loading and evaluation use."""

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.decoder.config_keys import ConfigKeys
from shardplan.decoder.families import FAMILIES
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import inspect_model
from shardplan.model.model_class import LEVANTER_CLASSES
from shardplan.model.registry import Model, build_model
from shardplan.plan.workload.kinds import KINDS
from shardplan.plan.workload.workload import MIN_POSITION, Workload
from shardplan.program.step_trace import plan_step
from shardplan.search.components.compute_sharding import AttentionMethod
from shardplan.search.search_configuration import attention_methods
from shardplan.steps.kinds import STEP_KINDS

SHORT = Workload(batch=1, position=MIN_POSITION)
"""The shortest workload, which fits the number of positions of every model."""


class Feature(StrEnum):
    """A feature of shardplan that a model may support."""

    PLAN = "plan"
    VERIFY = "verify"
    LOAD = "load"
    SAVE = "save"
    SEQUENCE = "sequence"
    """The planner can plan the model with sharded positions."""
    EXTRACTION = "extraction"
    LM_EVAL = "lm_eval"


@dataclass(frozen=True)
class TypeFacts:
    """The facts about a supported model type."""

    type: str
    family: str
    about: str
    """One sentence on the features that distinguish this family of models."""
    levanter_class: str | None
    """Levanter's configuration class, for training and Levanter's scripts; None if these use the decoder as well."""
    features: tuple[Feature, ...]
    methods: tuple[AttentionMethod, ...]
    """The attention methods that a plan may choose if positions are sharded."""
    keys: tuple[str, ...]
    """Keys of config.json that the model's family reads."""
    only: dict[str, tuple[Any, ...]]
    """Key of config.json -> the only values that are supported for it."""
    released: tuple[str, ...]
    """Names of the released models of this type."""


def describe_type(model_type: str, released: Sequence[str]) -> TypeFacts:
    """Return the facts about a model type, derived from its first released model.

    Args:
        released: names of the type's released models, at least one.
    """
    hf_config = read_config(released[0], None)
    model = build_model(hf_config, 1)
    keys = read_keys(hf_config)
    module = FAMILIES[model_type].read.__module__
    about = (sys.modules[module].__doc__ or "").partition("\n")[0]
    return TypeFacts(
        type=model_type,
        family=module.rpartition(".")[2],
        about=about.partition(" Source")[0],
        levanter_class=LEVANTER_CLASSES.get(model_type),
        features=tuple(supported_features(model)),
        methods=sequence_methods(model),
        keys=keys.read,
        only=keys.only_values,
        released=tuple(released),
    )


def supported_features(model: Model) -> Iterator[Feature]:
    """Yield the features that a model supports."""
    # a model that was built can be traced, which planning needs, and compiled, which verification needs
    yield Feature.PLAN
    yield Feature.VERIFY
    # saving runs the program that reads a checkpoint backwards, so it needs what loading needs
    is_stored = sum(map(math.prod, expected_tensors(model.template).values())) == inspect_model(model).size
    if is_stored:
        yield Feature.LOAD
        yield Feature.SAVE
    if sequence_methods(model):
        yield Feature.SEQUENCE
    if is_stored and any(KINDS[name].is_scoring for name in STEP_KINDS):
        yield Feature.EXTRACTION
        yield Feature.LM_EVAL


@lru_cache(maxsize=1)
def sequence_methods(model: Model) -> tuple[AttentionMethod, ...]:
    """Return the attention methods that a plan may choose for a model if positions are sharded."""
    # kinds need a trace, and only matter for models whose attention is not planned
    kinds = () if model.is_attention_planned else plan_step(model, SHORT.resolve()).attention_kinds
    return attention_methods(model, kinds)


class RecordedKeys(ConfigKeys):
    """The keys of a config.json, with a record of the keys that a family reads and the values that it allows."""

    def __init__(self, values: dict[str, Any]) -> None:
        """Hold the keys of a file; none of them has been read yet."""
        super().__init__(values, "config.json")
        self.only_values: dict[str, tuple[Any, ...]] = {}

    @property
    def read(self) -> tuple[str, ...]:
        """The keys that were read, in alphabetical order."""
        return tuple(sorted(self._taken))

    def only(self, name: str, values: Sequence[Any]) -> None:
        """Check the value of a key as `ConfigKeys.only` does, and record the allowed values."""
        super().only(name, values)
        self.only_values[name] = tuple(values)


def read_keys(hf_config: dict[str, Any]) -> RecordedKeys:
    """Return the keys of a config.json after its family has read them, with a record of the keys read."""
    keys = RecordedKeys(hf_config)
    FAMILIES[hf_config["model_type"]].read(keys)
    return keys
