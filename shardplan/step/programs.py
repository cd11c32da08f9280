"""One step of each kind of workload, as a `Program` of the Levanter model with a plan's mappings."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import optax
from haliax import Axis, NamedArray
from jax.sharding import Mesh
from levanter.layers.attention import AttentionMask
from levanter.models.loss import maybe_fused_next_token_loss
from levanter.utils.tree_utils import inference_mode

from shardplan.model import Model
from shardplan.plan.plan import BATCH_AXIS, Mapping, Plan
from shardplan.step.program import Program, abstract_model, abstract_tokens

LEARNING_RATE = 1e-5


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
        with hax.axis_mapping(_resources(plan.compute_mapping)):
            return _losses(model, _for_compute(module, plan), tokens, predicted)

    return Program("evaluate", evaluate, (_module(model, plan, mesh), *_batch(model, plan, mesh)), mesh)


def logits_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, tokens) -> float32[batch, position, vocab] logits."""

    def logits(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(_resources(plan.compute_mapping)):
            module = _for_compute(module, plan)
            return _logits(model, module, _activations(model, module, tokens))

    tokens, _ = _batch(model, plan, mesh)
    return Program("logits", logits, (_module(model, plan, mesh), tokens), mesh)


def prefill_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, tokens) -> float32[batch, vocab] logits of the token after each prompt.

    No keys and values are kept: Levanter's training path, which this is, has no cache.
    """

    def prefill(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(_resources(plan.compute_mapping)):
            module = _for_compute(module, plan)
            activations = _activations(model, module, tokens)
            last = activations[module.Pos.name, activations.axis_size(module.Pos.name) - 1]
            return _logits(model, module, last)

    tokens, _ = _batch(model, plan, mesh)
    return Program("prefill", prefill, (_module(model, plan, mesh), tokens), mesh)


def train_program(model: Model, plan: Plan, mesh: Mesh) -> Program:
    """(module, state, tokens, predicted) -> (module, state, mean loss in nats): AdamW, everything updated in place.

    Parameters, gradients and both moments rest in the parameters' mapping and type, the loss is computed in the
    compute type; which activations are kept for the gradient is the model's `gradient_checkpointing`.
    """
    optimizer = optax.adamw(LEARNING_RATE)

    def train(module: Any, state: Any, tokens: NamedArray, predicted: NamedArray) -> tuple[Any, Any, jax.Array]:
        def mean_loss(module: Any) -> jax.Array:
            with hax.axis_mapping(_resources(plan.compute_mapping)):
                losses = _losses(model, _for_compute(module, plan), tokens, predicted)
                return losses.sum().array / predicted.sum().array

        loss, gradients = eqx.filter_value_and_grad(mean_loss)(module)
        gradients = _at_rest(gradients, plan)
        arrays = eqx.filter(module, eqx.is_inexact_array)
        updates, state = optimizer.update(gradients, state, arrays)
        return _at_rest(eqx.apply_updates(module, updates), plan), _at_rest(state, plan), loss

    module = _module(model, plan, mesh)
    parameters = eqx.filter(module, lambda leaf: isinstance(leaf, jax.ShapeDtypeStruct))
    # eval_shape forgets shardings: the moments have the axes of their parameters, so the same mapping says them
    state = abstract_model(
        eqx.filter_eval_shape(optimizer.init, parameters), mesh, _resources(plan.param_mapping), None
    )
    return Program("train", train, (module, state, *_batch(model, plan, mesh)), mesh, donated=(0, 1))


def _losses(model: Model, module: Any, tokens: NamedArray, predicted: NamedArray) -> NamedArray:
    return maybe_fused_next_token_loss(
        module.Pos,
        module.Embed,
        module.Vocab,
        _activations(model, module, tokens),
        module.get_lm_head(),
        tokens,
        loss_mask=predicted.astype(jnp.float32),
        reduction=None,
        dtype=jnp.float32,
        logit_soft_cap=model.logit_soft_cap,
    )


def _logits(model: Model, module: Any, activations: NamedArray) -> NamedArray:
    logits = hax.dot(activations, module.get_lm_head(), axis=module.Embed).astype(jnp.float32)
    cap = model.logit_soft_cap
    return logits if cap is None else cap * hax.tanh(logits / cap)


def _activations(model: Model, module: Any, tokens: NamedArray) -> NamedArray:
    mask = AttentionMask.causal(sliding_window=model.sliding_window)
    result = module.activations(tokens, mask, key=None)
    # mixture-of-experts models return the router's auxiliary loss as well, which is no part of the likelihood
    return result[0] if isinstance(result, tuple) else result


def _for_compute(module: Any, plan: Plan) -> Any:
    """The model in the compute type, without dropout."""
    dtype = jnp.dtype(plan.workload.compute_dtype)

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, inference_mode(module, True))


def _at_rest(tree: Any, plan: Plan) -> Any:
    return hax.shard(tree, _resources(plan.param_mapping))


def _module(model: Model, plan: Plan, mesh: Mesh) -> Any:
    return abstract_model(model.template, mesh, _resources(plan.param_mapping), plan.workload.param_dtype)


def _batch(model: Model, plan: Plan, mesh: Mesh) -> tuple[NamedArray, NamedArray]:
    axes = (Axis(BATCH_AXIS, plan.workload.batch), model.template.Pos.resize(plan.workload.position))
    compute = _resources(plan.compute_mapping)
    return abstract_tokens(axes, jnp.int32, mesh, compute), abstract_tokens(axes, jnp.bool_, mesh, compute)


def _resources(mapping: Mapping) -> dict[str, tuple[str, ...]]:
    """A mapping as Haliax takes it."""
    return {axis: tuple(mesh_axes) for axis, mesh_axes in mapping.items()}
