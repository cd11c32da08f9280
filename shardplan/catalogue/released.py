"""The facts of a released model: its size, and its layers by kind of attention."""

import json
from collections import Counter
from dataclasses import dataclass
from typing import Any

from shardplan.errors import ConfigError
from shardplan.model.bundled_configs import BUNDLED, HUB_NAMES
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model, build_model
from shardplan.plan.workload.workload import Workload
from shardplan.program.attention_kind import AttentionKind
from shardplan.program.named_arrays import is_scores
from shardplan.program.step_trace import plan_step


@dataclass(frozen=True)
class ReleasedModel:
    """A released model."""

    name: str
    repositories: tuple[str, ...]
    """On the Hugging Face hub."""
    type: str
    parameters: int
    positions: int
    """Positions that it has."""
    refusal: str | None
    """Why not all of its positions can be planned; None if they can."""
    traced_positions: int
    """Positions of the sequences in which its layers have these kinds of attention."""
    layers: dict[AttentionKind, int]
    """Kind of attention -> its layers."""
    config: dict[str, Any]
    """The content of its config.json."""


def describe_model(name: str) -> ReleasedModel:
    """Return the facts of a released model, with the layers that a trace of its forward pass finds."""
    hf_config = read_config(name, None)
    model, refusal = build_model(hf_config, 1), None
    position = model.positions
    try:
        model = build_model(hf_config, position)
    except ConfigError as error:
        refusal = str(error)
        position = min(position, Workload().position)
    return ReleasedModel(
        name=name,
        repositories=HUB_NAMES.get(name, ()),
        type=model.type,
        parameters=inspect_model(model).size,
        positions=model.positions,
        refusal=refusal,
        traced_positions=position,
        layers=count_layers(model, position),
        config=json.loads(BUNDLED[name].read_bytes()),
    )


def count_layers(model: Model, position: int) -> dict[AttentionKind, int]:
    """Return kind of attention -> its layers, the most frequent first, for sequences of `position` tokens."""
    step = plan_step(model, Workload(batch=1, position=position).resolve())
    layers: Counter[AttentionKind] = Counter()
    for task in step.tasks:
        # one of the two matmuls of each layer makes scores
        if task.attention is not None and is_scores(task.results[0]):
            layers[task.attention] += task.executions
    return dict(layers.most_common())
