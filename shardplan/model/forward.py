"""What a Levanter model computes of a batch of tokens: activations, logits, losses, gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.loss import maybe_fused_next_token_loss
from levanter.utils.tree_utils import inference_mode

from shardplan.model.registry import Model


def activations(model: Model, module: Any, tokens: NamedArray) -> NamedArray:
    """The residual stream [batch, position, embed] behind the last layer, for int32[batch, position] tokens."""
    mask = AttentionMask.causal(sliding_window=model.sliding_window)
    result = module.activations(tokens, mask, key=None)
    # mixture-of-experts models return the router's auxiliary loss as well, which is no part of the likelihood
    return result[0] if isinstance(result, tuple) else result


def logits(model: Model, module: Any, activations: NamedArray) -> NamedArray:
    """float32[..., vocab] logits of activations [..., embed]."""
    return capped_logits(module, activations, model.logit_soft_cap)


def capped_logits(module: Any, activations: NamedArray, cap: float | None) -> NamedArray:
    """The same of a Levanter module by itself; logits stay below `cap`."""
    result = hax.dot(activations, module.get_lm_head(), axis=module.Embed).astype(jnp.float32)
    return result if cap is None else cap * hax.tanh(result / cap)


def losses(model: Model, module: Any, tokens: NamedArray, predicted: NamedArray) -> NamedArray:
    """float32[batch, position]: nats of the token after each; 0 where not `predicted` (bool[batch, position])."""
    return maybe_fused_next_token_loss(
        module.Pos,
        module.Embed,
        module.Vocab,
        activations(model, module, tokens),
        module.get_lm_head(),
        tokens,
        loss_mask=predicted.astype(jnp.float32),
        reduction=None,
        dtype=jnp.float32,
        logit_soft_cap=model.logit_soft_cap,
    )


def next_logits(model: Model, module: Any, tokens: NamedArray) -> NamedArray:
    """float32[batch, vocab] logits of the token after each prompt int32[batch, position]."""
    stream = activations(model, module, tokens)
    return logits(model, module, stream[module.Pos.name, stream.axis_size(module.Pos.name) - 1])


def loss_and_gradients(
    model: Model, module: Any, tokens: NamedArray, predicted: NamedArray, dtype: str, placed: Callable[[Any], Any]
) -> tuple[jax.Array, Any]:
    """Mean nats of the `predicted` tokens, computed in `dtype`, and its gradients, each `placed` where it rests.

    Args:
        tokens: int32[batch, position], or int32[microbatch, batch, position], of which one microbatch is taken after
            the other and what it gives is added up.
    """
    count = predicted.sum().array

    def loss_of(module: Any, tokens: NamedArray, predicted: NamedArray) -> jax.Array:
        return losses(model, for_compute(module, dtype), tokens, predicted).sum().array / count

    differentiate = eqx.filter_value_and_grad(loss_of)
    if tokens.ndim == 2:
        loss, gradients = differentiate(module, tokens, predicted)
        return loss, placed(gradients)

    def add(sums: tuple[jax.Array, Any], part: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
        loss, gradients = differentiate(module, *(NamedArray(array, tokens.axes[1:]) for array in part))
        added = jax.tree.map(jnp.add, sums, (loss, placed(gradients)))
        return (added[0], placed(added[1])), None

    zeros = placed(jax.tree.map(jnp.zeros_like, eqx.filter(module, eqx.is_inexact_array)))
    return jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), (tokens.array, predicted.array))[0]


def for_compute(module: Any, dtype: str) -> Any:
    """The module in the compute type, without dropout."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, inference_mode(module, True))
