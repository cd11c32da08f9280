"""Attention and its gradients in float64, with all scores at once: what every kernel is compared with."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Result:
    out: np.ndarray
    """[B, N, G, S, V]."""
    gradients: tuple[np.ndarray, ...]
    """Of q, k, v and the sink, where the gradient of `out` is given."""


def dense_attention(q, k, v, allowed, change, soft_cap=None, sink=None) -> Result:
    """q[B, N, G, S, K] on k[B, N, T, K] and v[B, N, T, V]; allowed is bool[B or 1, 1, 1, S, T].

    Args:
        change: gradient of the output, [B, N, G, S, V].
        sink: a score of each head [N, G] that takes weight and gives nothing.
    """
    scale = q.shape[-1] ** -0.5
    raw = np.einsum("bngsk,bntk->bngst", q, k) * scale
    scores = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    scores = np.where(allowed, scores, -np.inf)
    extra = np.full((*scores.shape[:-1], 1), -np.inf)
    if sink is not None:
        extra = np.broadcast_to(sink[None, :, :, None, None], extra.shape)
    largest = np.maximum(scores.max(-1, keepdims=True), extra)
    base = np.where(np.isfinite(largest), largest, 0)
    weights, taken = np.exp(scores - base), np.exp(extra - base)
    total = weights.sum(-1, keepdims=True) + taken
    total = np.where(total > 0, total, 1)
    weights, taken = weights / total, taken / total
    out = np.einsum("bngst,bntv->bngsv", weights, v)
    of_weights = np.einsum("bngsv,bntv->bngst", change, v)
    offset = (out * change).sum(-1, keepdims=True)
    of_scores = weights * (of_weights - offset)
    of_sink = -(taken * offset).sum((0, 3, 4))
    if soft_cap is not None:
        of_scores = of_scores * (1 - np.tanh(raw / soft_cap) ** 2)
    gradients = (
        np.einsum("bngst,bntk->bngsk", of_scores, k) * scale,
        np.einsum("bngst,bngsk->bntk", of_scores, q) * scale,
        np.einsum("bngst,bngsv->bntv", weights, change),
        of_sink,
    )
    return Result(out, gradients)
