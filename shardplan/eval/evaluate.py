"""The evaluation step under `hax.named_jit`, and the loop over batches."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from levanter.layers.attention import AttentionMask
from levanter.models.loss import maybe_fused_next_token_loss
from levanter.utils.tree_utils import inference_mode

from shardplan.eval.documents import Windows
from shardplan.model import Model
from shardplan.plan.plan import BATCH_AXIS, Plan
from shardplan.runtime.progress import progress_bar


@dataclass(frozen=True)
class EvalRun:
    """What the loop over batches measured."""

    losses: np.ndarray
    """float32[window, position]: negative log-likelihood in nats of the token after each; 0 where none is predicted."""
    seconds: float
    """Time of all steps but the first."""
    first_step_seconds: float
    """Time of the first step, compilation included."""
    tokens_timed: int
    """Tokens predicted in `seconds`."""


def evaluate(module: Any, model: Model, plan: Plan, mesh: Mesh, windows: Windows) -> EvalRun:
    """Losses of every window, batch by batch, on the plan's mesh.

    Args:
        module: the Levanter model with its arrays, sharded by the plan's parameter mapping.
        windows: a multiple of the plan's batch.
    """
    batch = Axis(BATCH_AXIS, plan.workload.batch)
    position = model.template.Pos.resize(plan.workload.position)
    count = len(windows.tokens) // batch.size
    losses, seconds, first, timed = [], 0.0, 0.0, 0
    with hax.partitioning.set_mesh(mesh), progress_bar(count, "evaluating", "step") as bar:
        step = loss_step(model, plan)
        for index in range(count):
            rows = slice(index * batch.size, (index + 1) * batch.size)
            started = time.perf_counter()
            tokens = _place(windows.tokens[rows], (batch, position), plan, mesh)
            predicted = _place(windows.predicted[rows], (batch, position), plan, mesh)
            loss = step(module, tokens, predicted)
            losses.append(_to_host(loss.rearrange((batch, position)).array))
            elapsed = time.perf_counter() - started
            if index == 0:
                first = elapsed
            else:
                seconds, timed = seconds + elapsed, timed + int(windows.predicted[rows].sum())
            bar.update(1)
    return EvalRun(np.concatenate(losses), seconds, first, timed)


def loss_step(model: Model, plan: Plan) -> Callable[[Any, NamedArray, NamedArray], NamedArray]:
    """(module, tokens, predicted) -> float32[batch, position] losses, jitted with the plan's mappings."""

    def step(module: Any, tokens: NamedArray, predicted: NamedArray) -> NamedArray:
        with hax.axis_mapping(_resources(plan)):
            module = _for_inference(module, plan)
            return maybe_fused_next_token_loss(
                module.Pos,
                module.Embed,
                module.Vocab,
                _activations(module, model, tokens),
                module.get_lm_head(),
                tokens,
                loss_mask=predicted.astype(jnp.float32),
                reduction=None,
                dtype=jnp.float32,
                logit_soft_cap=model.logit_soft_cap,
            )

    return hax.named_jit(step, axis_resources=_resources(plan), in_axis_resources=None)


def forward_logits(module: Any, model: Model, plan: Plan, mesh: Mesh, tokens: np.ndarray) -> np.ndarray:
    """float32[batch, position, vocab] logits of int32[batch, position] `tokens`, on the plan's mesh."""
    axes = (Axis(BATCH_AXIS, tokens.shape[0]), model.template.Pos.resize(tokens.shape[1]))

    def step(module: Any, tokens: NamedArray) -> NamedArray:
        with hax.axis_mapping(_resources(plan)):
            module = _for_inference(module, plan)
            logits = hax.dot(_activations(module, model, tokens), module.get_lm_head(), axis=module.Embed)
            logits = logits.astype(jnp.float32)
            cap = model.logit_soft_cap
            return logits if cap is None else cap * hax.tanh(logits / cap)

    with hax.partitioning.set_mesh(mesh):
        logits = hax.named_jit(step, axis_resources=_resources(plan), in_axis_resources=None)(
            module, _place(tokens, axes, plan, mesh)
        )
        return _to_host(logits.rearrange((*axes, model.vocab)).array)


def _activations(module: Any, model: Model, tokens: NamedArray) -> NamedArray:
    mask = AttentionMask.causal(sliding_window=model.sliding_window)
    result = module.activations(tokens, mask, key=None)
    # mixture-of-experts models return the router's auxiliary loss as well, which is no part of the likelihood
    return result[0] if isinstance(result, tuple) else result


def _for_inference(module: Any, plan: Plan) -> Any:
    """The model in the compute type, without dropout."""
    dtype = jnp.dtype(plan.workload.compute_dtype)

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, inference_mode(module, True))


def _resources(plan: Plan) -> dict[str, tuple[str, ...]]:
    """The compute mapping as Haliax takes it."""
    return {axis: tuple(mesh_axes) for axis, mesh_axes in plan.compute_mapping.items()}


def _place(values: np.ndarray, axes: tuple[Axis, ...], plan: Plan, mesh: Mesh) -> NamedArray:
    sharding = NamedSharding(mesh, hax.partitioning.pspec_for_axis(axes, _resources(plan)))
    array = jax.make_array_from_callback(values.shape, sharding, lambda index: values[index])
    return hax.named(array, axes)


def _to_host(array: jax.Array) -> np.ndarray:
    if array.is_fully_addressable:
        return np.asarray(array)
    return multihost_utils.process_allgather(array, tiled=True)
