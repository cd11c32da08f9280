"""Detects logical axes that only activations have; neither the parameters nor the traced step show them."""

from functools import lru_cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import AbstractMesh, AxisType

from shardplan.model.registry import Model
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.steps.forward import compute_activations

MESH_AXIS = "mesh axis"
TOKENS = 8
"""Positions of the traced sequence; the names of its axes do not depend on this number."""


@lru_cache(maxsize=128)
def is_activation_axis(model: Model, axis: str) -> bool:
    """Return whether mapping the logical axis `axis` changes the forward pass.

    Haliax keeps no record of the axes that it makes, so this compares the passes with and without the mapping.
    """
    return _forward_jaxpr(model, {axis: MESH_AXIS}) != _forward_jaxpr(model, {})


def _forward_jaxpr(model: Model, mapping: dict[str, str]) -> str:
    """Return the jaxpr of the forward pass on one sequence, as text, under a `mapping` of logical axes."""
    tokens = NamedArray(
        jax.ShapeDtypeStruct((1, TOKENS), jnp.int32), (hax.Axis(BATCH_AXIS, 1), model.template.Pos.resize(TOKENS))
    )
    arrays, static = eqx.partition((model.template, tokens), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def run(arrays: Any) -> Any:
        module, tokens = eqx.combine(arrays, static)
        with hax.axis_mapping(mapping):
            return compute_activations(model, module, tokens)

    mesh = AbstractMesh((1,), (MESH_AXIS,), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(run)(arrays))
