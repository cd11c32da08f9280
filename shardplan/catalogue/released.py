"""Finds the facts about a released model: its size, its positions, and its layers by kind of attention."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shardplan.model.bundled_configs import BUNDLED, HUB_NAMES
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model, build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.step_trace import plan_step


@dataclass(frozen=True)
class ReleasedModel:
    """The facts about a released model."""

    name: str
    repositories: tuple[str, ...]
    """The model's repositories on the Hugging Face hub."""
    type: str
    parameters: int
    positions: int
    """Number of positions of the model."""
    layers: dict[AttentionKind, int]
    """Kind of attention -> number of layers that have it."""
    config: dict[str, Any]
    """The content of the model's config.json."""


def describe_model(name: str) -> ReleasedModel:
    """Return the facts about a released model; its layers are counted in a trace of the forward pass."""
    model = build_model(read_config(name, None), 1)
    return ReleasedModel(
        name=name,
        repositories=HUB_NAMES.get(name, ()),
        type=model.type,
        parameters=inspect_model(model).size,
        positions=model.positions,
        layers=count_layers(model),
        config=json.loads(BUNDLED[name].read_bytes()),
    )


def count_layers(model: Model) -> dict[AttentionKind, int]:
    """Return kind of attention -> number of layers, most frequent first, for sequences of the model's full length."""
    step = plan_step(model, Workload(batch=1, position=model.positions).resolve())
    return dict(Counter(step.attention_calls).most_common())
