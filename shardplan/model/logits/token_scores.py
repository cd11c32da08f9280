"""Scores every next token on the devices: its log-probability, its rank, and the probability of the top k tokens."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray

from shardplan.model.logits.logit_blocks import map_blocks, prepare_head


@dataclass(frozen=True)
class ScoreSettings:
    """Which scores are computed for each next token, and how."""

    top_k: int
    """Number of tokens in `TokenScores.top_log_prob`; 0 leaves it out."""
    blocks: int = 1
    """Number of blocks of positions, a divisor of their number; the logits of one block are live at a time."""
    vocab_shards: int = 1
    """Number of shards of the vocabulary; each device finds the most probable tokens in its own shard."""
    temperature: float = 1.0
    """Probabilities are softmax(logits / temperature)."""


class TokenScores(NamedTuple):
    """Scores of the token after each position; at the last position, scores of the first token of the sequence."""

    log_prob: NamedArray
    """Log-probability of the token in nats, float32[batch, position], by softmax(logits / temperature) over the whole
    vocabulary."""
    rank: NamedArray
    """Number of tokens that are more probable, or equally probable with a smaller id, int32[batch, position]."""
    top_log_prob: NamedArray
    """Log of the summed probability of the top k tokens in nats, float32[batch, position]; 0 if `top_k` is 0."""


def score_next_tokens(
    module: Any, activations: NamedArray, tokens: NamedArray, soft_cap: float | None, settings: ScoreSettings
) -> TokenScores:
    """Score the token after each position, in float32.

    Args:
        module: a Levanter model with its weights.
        activations: [batch, position, embed] after the last layer.
        tokens: int32[batch, position].
        soft_cap: logits are `soft_cap * tanh(logits / soft_cap)`; None for no cap.
    """
    position = tokens.axes[-1]
    targets = hax.roll(tokens, -1, position.name)
    head = prepare_head(module, soft_cap, settings.blocks)

    def score(activations: NamedArray, targets: NamedArray) -> TokenScores:
        products = hax.dot(activations, head.weight, axis=module.Embed, preferred_element_type=jnp.float32)
        logits = head.finish(products.rearrange((*targets.axes, module.Vocab)))
        return _score_logits(logits, module.Vocab, targets, settings)

    scores: TokenScores = map_blocks(score, position, settings.blocks, activations, targets)
    return scores


def _score_logits(logits: NamedArray, vocab: Axis, targets: NamedArray, settings: ScoreSettings) -> TokenScores:
    """Score the tokens `targets` with float32[..., vocab] logits."""
    ids, wanted = hax.arange(vocab), targets.broadcast_axis(vocab)
    target = hax.sum(hax.where(ids == wanted, logits, 0.0), vocab)
    precedes = (logits > target) | ((logits == target) & (ids < wanted))
    rank = hax.sum(precedes.astype(jnp.int32), vocab)
    if settings.temperature != 1:  # after the ranks, as division may make logits equal
        logits, target = logits / settings.temperature, target / settings.temperature
    total = hax.nn.logsumexp(logits, vocab)
    if settings.top_k == 0:
        return TokenScores(target - total, rank, hax.zeros_like(total))
    shape = targets.array.shape
    shards = logits.array.reshape(*shape, settings.vocab_shards, vocab.size // settings.vocab_shards)
    candidates = jax.lax.top_k(shards, min(settings.top_k, shards.shape[-1]))[0].reshape(*shape, -1)
    if settings.vocab_shards > 1:
        candidates = jax.lax.top_k(candidates, min(settings.top_k, candidates.shape[-1]))[0]
    top = jax.nn.logsumexp(candidates, axis=-1)
    return TokenScores(target - total, rank, NamedArray(top, targets.axes) - total)
