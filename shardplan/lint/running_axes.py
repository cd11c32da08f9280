"""Logical axes that arrays have only while the model runs, which neither parameters nor the traced step tell."""

from functools import lru_cache
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import AbstractMesh, AxisType

from shardplan.model import Model
from shardplan.model.forward import activations
from shardplan.plan.plan import BATCH_AXIS

MESH_AXIS = "mesh axis"
TOKENS = 8
"""Positions of the traced sequence; names do not depend on it."""


@lru_cache(maxsize=128)
def is_of_running_model(model: Model, axis: str) -> bool:
    """Whether mapping the logical axis `axis` changes the forward pass.

    Haliax keeps no record of the axes that it makes, so that the passes with and without the mapping are compared.
    """
    return _forward(model, {axis: MESH_AXIS}) != _forward(model, {})


def _forward(model: Model, mapping: dict[str, str]) -> str:
    tokens = NamedArray(
        jax.ShapeDtypeStruct((1, TOKENS), jnp.int32), (hax.Axis(BATCH_AXIS, 1), model.template.Pos.resize(TOKENS))
    )
    arrays, static = eqx.partition((model.template, tokens), lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))

    def run(arrays: Any) -> Any:
        module, tokens = eqx.combine(arrays, static)
        with hax.axis_mapping(mapping):
            return activations(model, module, tokens)

    mesh = AbstractMesh((1,), (MESH_AXIS,), axis_types=(AxisType.Auto,))
    with jax.sharding.use_abstract_mesh(mesh):
        return str(jax.make_jaxpr(run)(arrays))
