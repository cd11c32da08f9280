"""A traced step that is one call of `attend_to_blocks`, or its gradient, and shardings of it."""

import haliax as hax
import jax
import jax.numpy as jnp

from shardplan.attention import attend_to_blocks
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.program.marked.marked_blocks import mark_block_attention
from shardplan.program.tasks import TaskKind
from shardplan.program.trace import Argument, trace_jaxpr
from shardplan.program.walk import build_step

AXES = ("batch", "position", "kv_head")


def block_step(queries, value_size, selected, dtype, is_training, *arguments, **settings):
    """The step of a call with queries of the shape [b, t, g, r, d], as a trace marks it.

    Args:
        arguments, settings: of `attend_to_blocks`, after its arrays.
    """
    tokens = queries[:3]
    own = {"q_heads_per_group": queries[3], "head_size": queries[4]}
    axes = [own, {"head_size": queries[4]}, {"value_head_size": value_size}, {"selected": selected}]
    dtypes = (dtype, dtype, dtype, jnp.int32)
    shapes = [jax.ShapeDtypeStruct((*tokens, *each.values()), of) for each, of in zip(axes, dtypes, strict=True)]
    names = [(*AXES, *each) for each in axes]

    def attend(*arrays):
        named = [hax.named(array, each) for array, each in zip(arrays, names, strict=True)]
        return attend_to_blocks(*named, *arguments, **settings).array

    def loss(*arrays):
        return (attend(*arrays) * arrays[0][..., :value_size]).sum().astype(jnp.float32)

    with mark_block_attention():
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)) if is_training else attend)(*shapes)
    return build_step(trace_jaxpr(jaxpr, [Argument(each) for each in names]))


def block_tasks(step):
    return [task for task in step.tasks if task.kind == TaskKind.BLOCK_ATTENTION]


def sharding(mesh, compute, **quirks):
    compute = {axis: (mesh_axes,) for axis, mesh_axes in compute.items()}
    return ShardingAssignment(mesh, compute, {}, {}, ("batch", "position"), CompilerQuirks(**quirks))
