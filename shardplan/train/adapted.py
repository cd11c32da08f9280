"""The model of a training with a LoRA adapter as the plan describes it, without the adapter."""

from dataclasses import replace
from typing import Any

import jax
from levanter.adaptor.lora import LoraLinear

from shardplan.plan.plan import Plan


def without_adapter(model: Any) -> Any:
    """Return the model as it was before adapters were added to its layers; without an adapter, the same model."""

    def is_adapted(node: Any) -> bool:
        return isinstance(node, LoraLinear)

    if not any(map(is_adapted, jax.tree.leaves(model, is_leaf=is_adapted))):
        return model
    return jax.tree.map(lambda node: node.wrapped if is_adapted(node) else node, model, is_leaf=is_adapted)


def with_frozen_parameters(plan: Plan) -> Plan:
    """Return the plan of a model whose own parameters are frozen, which Levanter keeps in the compute dtype."""
    dtype = plan.workload.compute_dtype
    return replace(plan, parameters=[replace(parameter, dtype=dtype) for parameter in plan.parameters])
