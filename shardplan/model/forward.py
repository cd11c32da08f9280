"""The forward pass of a Levanter model on a batch of tokens: activations, logits, losses and gradients."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask
from levanter.utils.tree_utils import inference_mode

from shardplan.model.levanter_loss import next_token_losses
from shardplan.model.logit_blocks import compute_target_losses, project_to_vocab
from shardplan.model.registry import Model
from shardplan.model.token_scores import ScoreSettings, TokenScores, score_next_tokens


def equal_windows(position: Axis, window: int | None) -> NamedArray | None:
    """Return the `window_starts` of sequences that are divided into windows of `window` tokens; None for one window."""
    return None if window is None else hax.arange(position) // window * window


def compute_activations(
    model: Model, module: Any, tokens: NamedArray, window_starts: NamedArray | None = None
) -> NamedArray:
    """Compute the residual stream [batch, position, embed] after the last layer, for int32[batch, position] tokens.

    Args:
        window_starts: int32[batch, position] or int32[position], the index at which each token's window begins, where
            several windows are packed into a sequence: every window has positions from 0 on, and its tokens attend to
            those of the same window alone; None for one window.
    """
    mask, settings = AttentionMask.causal(sliding_window=model.sliding_window), {}
    if window_starts is not None:
        mask = mask.with_segment_ids(window_starts)
        settings = {"pos_ids": hax.arange(tokens.axes[-1]) - window_starts}
    result = module.activations(tokens, mask, key=None, **settings)
    # mixture-of-experts models return the router's auxiliary loss as well, which is not part of the likelihood
    return result[0] if isinstance(result, tuple) else result


def compute_logits(model: Model, module: Any, activations: NamedArray) -> NamedArray:
    """Compute float32[..., vocab] logits from activations [..., embed], with the model's soft cap."""
    return project_to_vocab(activations, module.get_lm_head(), module.Embed, model.logit_soft_cap)


def compute_losses(
    model: Model,
    module: Any,
    tokens: NamedArray,
    predicted: NamedArray,
    window_starts: NamedArray | None = None,
    blocks: int = 1,
) -> NamedArray:
    """Compute the loss, float32[batch, position] in nats, of the token after each position.

    Args:
        tokens: int32[batch, position].
        predicted: bool[batch, position]; where it is False the loss is 0.
        window_starts: as for `compute_activations`.
        blocks: parts of the positions whose logits are in memory one after the other.
    """
    activations = compute_activations(model, module, tokens, window_starts)
    position = tokens.axes[-1]
    has_target = 1 - hax.nn.one_hot(-1, position, dtype=jnp.float32)
    weights = predicted.astype(jnp.float32) * has_target
    targets = hax.roll(tokens, -1, position)
    return compute_target_losses(module, activations, targets, weights, model.logit_soft_cap, blocks)


def compute_scores(
    model: Model, module: Any, tokens: NamedArray, window_starts: NamedArray | None, settings: ScoreSettings
) -> TokenScores:
    """Score the token after each position of int32[batch, position] tokens.

    Args:
        window_starts: as for `compute_activations`.
    """
    activations = compute_activations(model, module, tokens, window_starts)
    return score_next_tokens(module, activations, tokens, model.logit_soft_cap, settings)


def compute_next_logits(model: Model, module: Any, tokens: NamedArray) -> NamedArray:
    """Compute float32[batch, vocab] logits of the token after each prompt int32[batch, position]."""
    stream = compute_activations(model, module, tokens)
    return compute_logits(model, module, stream[module.Pos.name, stream.axis_size(module.Pos.name) - 1])


def loss_and_gradients(
    model: Model, module: Any, tokens: NamedArray, predicted: NamedArray, dtype: str, shard: Callable[[Any], Any]
) -> tuple[jax.Array, Any]:
    """Compute the mean loss of the `predicted` tokens, in nats, and its gradients.

    The loss is Levanter's own, with the auxiliary loss of routers, as its trainer has it.

    Args:
        tokens: int32[batch, position]; or int32[microbatch, batch, position], whose microbatches are computed one
            after the other and whose losses and gradients are summed.
        predicted: bool, with the axes of `tokens`; where it is False the token does not count.
        dtype: compute type of the forward and backward pass.
        shard: puts a tree of gradients into the parameter sharding.
    """
    count = predicted.sum().array

    def loss_of(module: Any, tokens: NamedArray, predicted: NamedArray) -> jax.Array:
        mask = AttentionMask.causal(sliding_window=model.sliding_window)
        losses = next_token_losses(cast_for_compute(module, dtype), tokens, predicted, mask, model.logit_soft_cap)
        # an auxiliary loss stands at every position
        return (losses * predicted).sum().array / count

    differentiate = eqx.filter_value_and_grad(loss_of)
    if tokens.ndim == 2:
        loss, gradients = differentiate(module, tokens, predicted)
        return loss, shard(gradients)

    def add(sums: tuple[jax.Array, Any], part: tuple[jax.Array, jax.Array]) -> tuple[tuple[jax.Array, Any], None]:
        loss, gradients = differentiate(module, *(NamedArray(array, tokens.axes[1:]) for array in part))
        added = jax.tree.map(jnp.add, sums, (loss, shard(gradients)))
        return (added[0], shard(added[1])), None

    zeros = shard(jax.tree.map(jnp.zeros_like, eqx.filter(module, eqx.is_inexact_array)))
    return jax.lax.scan(add, (jnp.zeros((), jnp.float32), zeros), (tokens.array, predicted.array))[0]


def cast_for_compute(module: Any, dtype: str) -> Any:
    """Cast the floating-point arrays of the module to the compute type, and switch its dropout off."""

    def cast(leaf: Any) -> Any:
        return leaf.astype(dtype) if hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, inference_mode(module, True))
