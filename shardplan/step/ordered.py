"""What a model computes of tokens whose positions a plan has in another order than the sequence's."""

from typing import Any

import haliax as hax
import jax.numpy as jnp
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from shardplan.attention import sequence
from shardplan.attention.sequence import CutSequence, in_order, next_token_losses, shard_sequence
from shardplan.model import Model, forward
from shardplan.plan.plan import Plan
from shardplan.positions.sequence_layout import CONTIGUOUS, SequenceLayout


def order_of(plan: Plan) -> SequenceLayout | None:
    """The order that positions are computed in; None where it is the sequence's."""
    return None if plan.attention.layout == CONTIGUOUS else plan.attention.order(plan.workload.position)


def losses(
    model: Model, module: Any, tokens: NamedArray, predicted: NamedArray, order: SequenceLayout | None
) -> NamedArray:
    """As `shardplan.model.forward.losses`."""
    if order is None:
        return forward.losses(model, module, tokens, predicted)
    cut = _placed(model, tokens, predicted, order)
    return in_order(next_token_losses(module, cut, model.logit_soft_cap), order)


def logits(model: Model, module: Any, tokens: NamedArray, order: SequenceLayout | None) -> NamedArray:
    """float32[batch, position, vocab] logits of int32[batch, position] tokens."""
    if order is None:
        stream = forward.activations(model, module, tokens)
    else:
        stream = in_order(sequence.activations(module, _placed(model, tokens, None, order)), order)
    return forward.logits(model, module, stream)


def next_logits(model: Model, module: Any, tokens: NamedArray, order: SequenceLayout | None) -> NamedArray:
    """As `shardplan.model.forward.next_logits`."""
    if order is None:
        return forward.next_logits(model, module, tokens)
    stream = sequence.activations(module, _placed(model, tokens, None, order))
    return forward.logits(model, module, stream[model.template.Pos.name, int(order.places()[-1])])


def _placed(model: Model, tokens: NamedArray, predicted: NamedArray | None, order: SequenceLayout) -> CutSequence:
    mask = AttentionMask.causal(sliding_window=model.sliding_window)
    counts = hax.ones_like(tokens) if predicted is None else predicted
    return shard_sequence(LmExample(tokens, counts.astype(jnp.float32), mask), order)
