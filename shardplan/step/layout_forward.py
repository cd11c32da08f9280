"""The forward pass under a plan: tokens are reordered to the plan's sequence layout, results back to sequence order."""

from typing import Any

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from shardplan.attention.sequence import (
    ShardedSequence,
    next_token_losses,
    restore_order,
    sequence_activations,
    shard_sequence,
)
from shardplan.model import forward
from shardplan.model.registry import Model
from shardplan.model.token_scores import ScoreSettings, TokenScores, score_next_tokens
from shardplan.plan.plan import Plan
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder


def planned_layout(plan: Plan) -> SequenceLayout | None:
    """Return the layout of positions during compute; None if it is the order of the sequence."""
    if plan.attention.layout == SequenceOrder.CONTIGUOUS:
        return None
    return plan.attention.sequence_layout(plan.workload.position)


def compute_losses_in_layout(
    model: Model,
    module: Any,
    tokens: NamedArray,
    predicted: NamedArray,
    window_starts: NamedArray | None,
    layout: SequenceLayout | None,
    blocks: int,
) -> NamedArray:
    """Compute the loss of every next token, as `shardplan.model.forward.compute_losses`.

    Args:
        layout: the order during compute, for sequences of one window; None for the order of the sequence.
        blocks: parts of the positions whose logits are in memory one after the other.
    """
    if layout is None:
        return forward.compute_losses(model, module, tokens, predicted, window_starts, blocks)
    sequence = _shard_tokens(model, tokens, predicted, layout)
    length = sequence.tokens.axes[-1].size  # with padding, which the number of blocks need not divide
    blocks = next(n for n in range(blocks, length + 1) if length % n == 0)
    return restore_order(next_token_losses(module, sequence, model.logit_soft_cap, blocks), sequence)


def compute_logits_in_layout(
    model: Model, module: Any, tokens: NamedArray, layout: SequenceLayout | None
) -> NamedArray:
    """Compute float32[batch, position, vocab] logits of int32[batch, position] tokens.

    Their order is that of the sequence; `layout` is the order during compute, None for the same one.
    """
    if layout is None:
        stream = forward.compute_activations(model, module, tokens)
    else:
        sequence = _shard_tokens(model, tokens, None, layout)
        stream = restore_order(sequence_activations(module, sequence), sequence)
    return forward.compute_logits(model, module, stream)


def compute_scores_in_layout(
    model: Model,
    module: Any,
    tokens: NamedArray,
    window_starts: NamedArray | None,
    settings: ScoreSettings,
    layout: SequenceLayout | None,
) -> TokenScores:
    """Score the token after each position, as `shardplan.model.forward.compute_scores`, in the order of the sequence.

    Args:
        layout: the order during compute, for sequences of one window; None for the order of the sequence.
    """
    if layout is None:
        return forward.compute_scores(model, module, tokens, window_starts, settings)
    sequence = _shard_tokens(model, tokens, None, layout)
    stream = restore_order(sequence_activations(module, sequence), sequence)
    return score_next_tokens(module, stream, tokens, model.logit_soft_cap, settings)


def compute_next_logits_in_layout(
    model: Model, module: Any, tokens: NamedArray, layout: SequenceLayout | None
) -> NamedArray:
    """Compute the logits of the token after each prompt, as `shardplan.model.forward.compute_next_logits`."""
    if layout is None:
        return forward.compute_next_logits(model, module, tokens)
    stream = sequence_activations(module, _shard_tokens(model, tokens, None, layout))
    last = int(layout.array_indices()[-1])
    return forward.compute_logits(model, module, stream[model.template.Pos.name, last])


def _shard_tokens(
    model: Model, tokens: NamedArray, predicted: NamedArray | None, layout: SequenceLayout
) -> ShardedSequence:
    mask = AttentionMask.causal(sliding_window=model.sliding_window)
    loss_mask = hax.ones_like(tokens) if predicted is None else predicted
    return shard_sequence(LmExample(tokens, loss_mask.astype(jnp.float32), mask), layout)
