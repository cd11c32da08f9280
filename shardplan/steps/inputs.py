"""The tokens of a step, as abstract arrays."""

from typing import Any

import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from shardplan.model.inspect import axes_of, named_leaves
from shardplan.model.registry import Model
from shardplan.plan.workload.workload import BATCH_AXIS, Workload

MICROBATCH = "microbatch"
"""Logical axis of microbatches, never sharded; primed if the model has an axis of this name."""


def token_axes(model: Model, workload: Workload) -> tuple[Axis, ...]:
    """Return the logical axes of a step's tokens: microbatch if there are several, batch and position."""
    parts = workload.num_microbatches
    axes = (Axis(BATCH_AXIS, workload.batch // parts), model.template.Pos.resize(workload.position))
    if parts == 1:
        return axes
    taken = {axis.name for _, leaf in named_leaves(model.template) for axis in axes_of(leaf)} | {a.name for a in axes}
    name = MICROBATCH
    while name in taken:
        name += "'"
    return (Axis(name, parts), *axes)


def abstract_tokens(model: Model, workload: Workload, dtype: Any = jnp.int32) -> NamedArray:
    """Return an abstract array with the axes of a step's tokens."""
    axes = token_axes(model, workload)
    return NamedArray(jax.ShapeDtypeStruct([axis.size for axis in axes], dtype), axes)
