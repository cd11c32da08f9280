"""Replaces a Levanter model's blocks of experts, where possible, by shardplan's, which a plan can shard.

Models are built with Levanter's own blocks. A search for a plan replaces them, where it can.
"""

from dataclasses import replace
from typing import Any

from shardplan.experts.levanter import has_parallel_experts, has_replaceable_experts, replace_blocks, restore_blocks
from shardplan.model.registry import Model, abstract_module


def with_planned_experts(model: Model) -> Model:
    """Return a model whose experts a plan can shard; the same model if no block can be replaced."""
    if not has_replaceable_experts(model.template):
        return model
    return replace(model, template=replace_blocks(model.template, None))


def with_own_experts(model: Model) -> Model:
    """Return a model with Levanter's own blocks of experts: undo `with_planned_experts`."""
    if not has_parallel_experts(model.template):
        return model
    return replace(model, template=restore_blocks(model.template))


def make_module(model: Model, config: Any) -> Any:
    """Make the module of a model with another configuration, keeping the kind of its blocks of experts."""
    module = abstract_module(config, model.vocab)
    return replace_blocks(module, None) if has_parallel_experts(model.template) else module
