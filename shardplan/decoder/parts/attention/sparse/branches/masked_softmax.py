"""Softmax over the keys that a query sees; zero, with zero gradient, for a query that sees none."""

import jax
import jax.numpy as jnp


def masked_softmax(scores: jax.Array, is_visible: jax.Array) -> jax.Array:
    """Return the softmax of scores over their last axis, restricted to visible keys.

    Scores are masked before the exponential, and the sum is replaced by 1 where it is 0: no infinity or NaN arises, in
    the result or in its gradient, and invisible keys have the weight 0 exactly.

    >>> masked_softmax(jnp.zeros((2, 3)), jnp.array([[True, True, False], [False, False, False]])).tolist()
    [[0.5, 0.5, 0.0], [0.0, 0.0, 0.0]]

    Args:
        scores: float32[..., keys]; there may be no keys at all.
        is_visible: bool[..., keys], which broadcasts to scores.

    Returns:
        float32[..., keys].
    """
    lowest = jnp.finfo(scores.dtype).min
    largest = jnp.where(is_visible, scores, lowest).max(axis=-1, keepdims=True, initial=lowest)
    shifted = jnp.where(is_visible, scores - jax.lax.stop_gradient(largest), 0.0)
    weights = jnp.where(is_visible, jnp.exp(shifted), 0.0)
    total = weights.sum(axis=-1, keepdims=True)
    return weights / jnp.where(total == 0, 1.0, total)
