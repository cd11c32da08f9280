"""Dense attention and its gradients in numpy, float64: the reference for every kernel."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DenseResult:
    out: np.ndarray
    """[B, N, G, S, V]."""
    gradients: tuple[np.ndarray, ...]
    """Gradients of q, k, v and the sink."""


def dense_attention(q, k, v, allowed, out_gradient, soft_cap=None, sink=None) -> DenseResult:
    """Compute attention of q[B, N, G, S, K] on k[B, N, T, K] and v[B, N, T, V]; allowed is bool[B or 1, 1, 1, S, T].

    Args:
        out_gradient: gradient of the output, [B, N, G, S, V].
        sink: a score per head [N, G] that takes weight and contributes no value.
    """
    scale = q.shape[-1] ** -0.5
    raw = np.einsum("bngsk,bntk->bngst", q, k) * scale
    scores = raw if soft_cap is None else soft_cap * np.tanh(raw / soft_cap)
    scores = np.where(allowed, scores, -np.inf)
    extra = np.full((*scores.shape[:-1], 1), -np.inf)
    if sink is not None:
        extra = np.broadcast_to(sink[None, :, :, None, None], extra.shape)
    max_score = np.maximum(scores.max(-1, keepdims=True), extra)
    base = np.where(np.isfinite(max_score), max_score, 0)
    weights, sink_weight = np.exp(scores - base), np.exp(extra - base)
    total = weights.sum(-1, keepdims=True) + sink_weight
    total = np.where(total > 0, total, 1)
    weights, sink_weight = weights / total, sink_weight / total
    out = np.einsum("bngst,bntv->bngsv", weights, v)
    weight_gradient = np.einsum("bngsv,bntv->bngst", out_gradient, v)
    delta = (out * out_gradient).sum(-1, keepdims=True)
    score_gradient = weights * (weight_gradient - delta)
    sink_gradient = -(sink_weight * delta).sum((0, 3, 4))
    if soft_cap is not None:
        score_gradient = score_gradient * (1 - np.tanh(raw / soft_cap) ** 2)
    gradients = (
        np.einsum("bngst,bntk->bngsk", score_gradient, k) * scale,
        np.einsum("bngst,bngsk->bntk", score_gradient, q) * scale,
        np.einsum("bngst,bngsv->bntv", weights, out_gradient),
        sink_gradient,
    )
    return DenseResult(out, gradients)
