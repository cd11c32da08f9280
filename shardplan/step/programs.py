"""One step of each kind of workload, as a `Program` of the Levanter model with a plan's mappings."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from jax.sharding import Mesh

from shardplan.model import Model
from shardplan.model.axes import axes_of
from shardplan.model.forward import for_compute, loss_and_gradients
from shardplan.plan.mapping import as_tuples
from shardplan.plan.plan import Plan
from shardplan.plan.workload import workload_of
from shardplan.program.step_trace import abstract_state, optimizer, token_axes
from shardplan.step.ordered import logits, losses, next_logits, order_of
from shardplan.step.program import Program, abstract_model, abstract_tokens


def step_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """The step that the plan's workload is: `eval`, `train` or `prefill`."""
    return {"eval": loss_program, "train": train_program, "prefill": prefill_program}[plan.workload.kind](
        model, plan, mesh
    )


def loss_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, tokens, predicted) -> float32[batch, position]: nats of the token after each; 0 where not `predicted`.

    `tokens` is int32[batch, position], `predicted` bool[batch, position].
    """

    def evaluate(module: Any, tokens: NamedArray, predicted: NamedArray) -> NamedArray:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            return losses(model, for_compute(module, plan.workload.compute_dtype), tokens, predicted, order_of(plan))

    return Program("evaluate", evaluate, (_module(model, plan, mesh), *_batch(model, plan, mesh)), mesh)


def logits_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, tokens) -> float32[batch, position, vocab] logits."""

    def all_logits(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            return logits(model, for_compute(module, plan.workload.compute_dtype), tokens, order_of(plan))

    tokens, _ = _batch(model, plan, mesh)
    return Program("logits", all_logits, (_module(model, plan, mesh), tokens), mesh)


def prefill_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, tokens) -> float32[batch, vocab] logits of the token after each prompt.

    No keys and values are kept: Levanter's training path, which this is, has no cache.
    """

    def prefill(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            return next_logits(model, for_compute(module, plan.workload.compute_dtype), tokens, order_of(plan))

    tokens, _ = _batch(model, plan, mesh)
    return Program("prefill", prefill, (_module(model, plan, mesh), tokens), mesh)


def train_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, state, tokens, predicted) -> (module, state, mean loss in nats), everything updated in place.

    Parameters, gradients and the optimizer's state rest in the parameters' mapping and type, the loss is computed in
    the compute type; which activations are kept for the gradient is the model's `gradient_checkpointing`. With several
    microbatches the tokens are int32[microbatch, batch, position].
    """
    transformation, dtype = optimizer(plan.workload.optimizer), plan.workload.compute_dtype

    def train(module: Any, state: Any, tokens: NamedArray, predicted: NamedArray) -> tuple[Any, Any, jax.Array]:
        with hax.axis_mapping(as_tuples(plan.compute_mapping)):
            loss, gradients = loss_and_gradients(
                model, module, tokens, predicted, dtype, lambda tree: _at_rest(tree, plan)
            )
        arrays = eqx.filter(module, eqx.is_inexact_array)
        updates, state = transformation.update(gradients, state, arrays)
        return _at_rest(eqx.apply_updates(module, updates), plan), _at_rest(state, plan), loss

    module = _module(model, plan, mesh)
    parameters = eqx.filter(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    # eval_shape forgets shardings: the state has the axes of its parameters, so the same mapping says them
    state = abstract_model(abstract_state(transformation, parameters), mesh, as_tuples(plan.param_mapping), None)
    return Program("train", train, (module, state, *_batch(model, plan, mesh)), mesh, donated=(0, 1))


def _at_rest(tree: Any, plan: Plan) -> Any:
    mapping = as_tuples(plan.param_mapping)
    return jax.tree.map(
        lambda leaf: hax.shard(leaf, mapping) if axes_of(leaf) else leaf,
        tree,
        is_leaf=lambda node: isinstance(node, NamedArray),
    )


def _module(model: Model, plan: Plan, mesh: Mesh) -> Any:
    return abstract_model(model.template, mesh, as_tuples(plan.param_mapping), plan.workload.param_dtype)


def _batch(model: Model, plan: Plan, mesh: Mesh) -> tuple[NamedArray, NamedArray]:
    axes = token_axes(model, workload_of(plan.workload))
    compute = as_tuples(plan.compute_mapping)
    return abstract_tokens(axes, jnp.int32, mesh, compute), abstract_tokens(axes, jnp.bool_, mesh, compute)
