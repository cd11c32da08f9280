"""The step of a plan's workload as a `Program`: the Levanter model with the plan's mappings."""

import inspect
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray
from jax.sharding import Mesh

from shardplan.execution.aot_program import Program, abstract_model
from shardplan.execution.layout_forward import planned_forward
from shardplan.execution.planned_attention import planned_attention
from shardplan.execution.planned_experts import planned_experts
from shardplan.model.dtypes.parameter_dtypes import with_dtypes
from shardplan.model.inspect import axes_of
from shardplan.model.logits.levanter_loss import block_sizes_of
from shardplan.model.registry import Model
from shardplan.plan.mapping import as_tuples, mesh_size
from shardplan.plan.plan import Plan
from shardplan.steps.kind import StepRun
from shardplan.steps.kinds import step_of


def step_program(model: Model, plan: Plan, mesh: Mesh, is_packed: bool = False) -> Program:
    """Return the program of the plan's workload, which runs the `compute` of its kind of step; see `shardplan.steps`.

    Levanter's own loss uses the block sizes that it would choose on the devices of the mesh.

    Args:
        is_packed: whether several windows of different lengths are packed into a sequence. The plan must not shard
            positions then.
    """
    workload = plan.workload.resolve()
    kind, compute_mapping, stored = step_of(workload), as_tuples(plan.compute_mapping), as_tuples(plan.param_mapping)
    device_kind = mesh.devices.flat[0].device_kind
    vocab_shards = mesh_size(plan.mesh, plan.compute_mapping.get(model.vocab.name, ()))
    run = StepRun(model, workload, planned_forward(plan), vocab_shards, lambda tree: _shard(tree, stored))

    def step(module: Any, *arguments: Any) -> Any:
        """Compute the step on sharded arrays."""
        with (
            hax.axis_mapping(compute_mapping), block_sizes_of(device_kind), planned_attention(model, plan),
            planned_experts(plan),
        ):  # fmt: skip
            return kind.compute(run, module, *arguments)

    signature = inspect.signature(kind.compute)
    _, *parameters_of_step = signature.parameters.values()
    step.__signature__ = signature.replace(parameters=parameters_of_step)  # type: ignore[attr-defined]
    module = abstract_model(with_dtypes(model.template, workload.param_dtype), mesh, stored)
    parameters = eqx.filter(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    # the state has the axes of its parameters, so that the same mapping gives their sharding
    state = tuple(abstract_model(each, mesh, stored) for each in kind.state(workload, parameters))
    inputs = abstract_model(kind.inputs(model, workload, is_packed), mesh, compute_mapping)
    donated = tuple(range(1 + len(state))) if kind.donates else ()
    return Program(f"{kind.name}_step", step, (module, *state, *inputs), mesh, donated)


def _shard(tree: Any, mapping: Any) -> Any:
    """Constrain every named array of a pytree to the sharding of a mapping."""
    return jax.tree.map(
        lambda leaf: hax.shard(leaf, mapping) if axes_of(leaf) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, NamedArray),
    )
