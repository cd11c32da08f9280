"""The program of Levanter's own loader: one jit that makes the model from the checkpoint's state dict.

`stream_checkpoint` needs no such program. It is here so that the compiler can judge a configuration that Levanter's
loader loads: Levanter shards every tensor over all mesh axes but `replica` as far as dimensions are divisible, whatever
the mapping, and then stacks the layers and reshards all arrays. It casts all of them to one type, routers too.
"""

from typing import Any

import haliax as hax
import jax
from haliax.state_dict import from_torch_compatible_state_dict
from jax.sharding import Mesh
from levanter.utils.jax_utils import best_effort_sharding

from shardplan.checkpoint.mapping.state_dict_program import expected_tensors
from shardplan.execution import Program
from shardplan.model.registry import Model
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import Plan


def assemble_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """Return the program (state dict) -> module, in the plan's parameter type and parameter sharding."""
    mapping = as_tuples(plan.param_mapping)
    dtype = plan.workload.param_dtype

    def assemble(state: dict[str, Any]) -> Any:
        return hax.shard(from_torch_compatible_state_dict(model.template, state), mapping)

    state = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=best_effort_sharding(shape, mesh=mesh))
        for name, shape in expected_tensors(model.template).items()
    }
    return Program("assemble", assemble, (state,), mesh, donated=(0,))
