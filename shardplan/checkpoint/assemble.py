"""The assembly that Levanter's loader does: the whole state dict goes in, the model comes out, in one jit.

`stream_model` needs no such program. It is here so that the compiler can judge a configuration that is loaded that way.
"""

from typing import Any

import haliax as hax
import jax
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh

from shardplan.checkpoint.best_effort import best_effort_sharding
from shardplan.checkpoint.program import expected_tensors
from shardplan.model import Model
from shardplan.plan.plan import Plan
from shardplan.step import Program


def assemble_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(state dict) -> module: tensors spread evenly over the mesh, then stacked and sharded as the plan says."""
    mapping = {axis: tuple(mesh_axes) for axis, mesh_axes in plan.param_mapping.items()}
    dtype = plan.workload.param_dtype

    def assemble(state: dict[str, Any]) -> Any:
        return hax.shard(from_torch_compatible_state_dict(model.template, state), mapping)

    state = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=best_effort_sharding(shape, mesh))
        for name, shape in expected_tensors(model.template).items()
    }
    return Program("assemble", assemble, (state,), mesh, donated=(0,))
