"""What a Levanter model computes of a batch of tokens: activations, logits, losses."""

from typing import Any

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
    result = hax.dot(activations, module.get_lm_head(), axis=module.Embed).astype(jnp.float32)
    cap = model.logit_soft_cap
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


def mean_loss(model: Model, module: Any, tokens: NamedArray, predicted: NamedArray) -> jax.Array:
    """Mean nats of the `predicted` tokens."""
    return losses(model, module, tokens, predicted).sum().array / predicted.sum().array


def for_compute(module: Any, dtype: str) -> Any:
    """The module in the compute type, without dropout."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, inference_mode(module, True))
