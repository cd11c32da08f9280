"""Softmax attention of a tile of queries in one walk over keys, with a running maximum of scores (online softmax).

Scores are transposed, [key, row], so that largest scores, sums and masks are rows of registers. A step may mask all its
keys for some rows: their weights are wrong until a key is visible, and then multiplied by exp(-1e30) = 0.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LOG2_E,
    MASKED_SCORE,
    SUBLANES,
    transpose_multiply,
)


class OnlineSoftmax(NamedTuple):
    """The running softmax of each row of a tile."""

    largest: jax.Array
    """Largest score * log2(e) so far, float32[1, row]."""
    total: jax.Array
    """Sum of weights so far, float32[1, row]."""
    accumulated: jax.Array
    """Sum of weights * values so far, float32[d, row]."""

    @classmethod
    def scratch(cls, rows: int, value_size: int) -> list[Any]:
        """Return the scratch memory that keeps a state between steps."""
        return [pltpu.VMEM((size, rows), jnp.float32) for size in (1, 1, value_size)]

    @classmethod
    def load(cls, refs: Sequence[Any]) -> "OnlineSoftmax":
        """Return the state kept in `scratch`."""
        return cls(*(ref[...] for ref in refs))

    @classmethod
    def clear(cls, refs: Sequence[Any]) -> None:
        """Store the initial state, before the first key."""
        for ref, value in zip(refs, (MASKED_SCORE, 0.0, 0.0), strict=True):
            ref[...] = jnp.full_like(ref, value)

    def store(self, refs: Sequence[Any]) -> None:
        """Store the state."""
        for ref, value in zip(refs, self, strict=True):
            ref[...] = value

    def add(self, scores: jax.Array, values: jax.Array) -> tuple["OnlineSoftmax", jax.Array, jax.Array]:
        """Add keys; return the new state, the keys' weights, and the factor that rescales all earlier weights.

        Args:
            scores: float32[key, row], times log2(e); `MASKED_SCORE` where they are masked.
            values: [key, d].
        """
        largest = jnp.maximum(self.largest, fold_rows(jnp.maximum, scores))
        weights, decay = jnp.exp2(scores - largest), jnp.exp2(self.largest - largest)
        total = self.total * decay + fold_rows(jnp.add, weights)
        accumulated = self.accumulated * decay + transpose_multiply(values, weights.astype(values.dtype))
        return OnlineSoftmax(largest, total, accumulated), weights, decay

    def inverse_total(self) -> jax.Array:
        """Return float32[1, row], 1 / the sum of weights; 0 for rows without a visible key."""
        return jnp.where(self._has_keys(), 1 / self.total, 0.0)

    def log_sums(self) -> jax.Array:
        """Return float32[1, row], the log-sum-exp of scores; 0 for rows without a visible key."""
        return jnp.where(self._has_keys(), self.largest * (1 / LOG2_E) + jnp.log(self.total), 0.0)

    def output(self) -> jax.Array:
        """Return float32[row, d]; 0 for rows without a visible key."""
        return (self.accumulated * self.inverse_total()).T

    def _has_keys(self) -> jax.Array:
        return self.largest > MASKED_SCORE / 2


def fold_rows(combine: Callable[[jax.Array, jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """Reduce all rows with `combine` to [1, n], as a tree, whose latency is shorter than a chain's.

    >>> import numpy as np
    >>> fold_rows(jnp.maximum, np.arange(48).reshape(24, 2)).tolist()
    [[46, 47]]
    """
    parts = [x[i : i + SUBLANES] for i in range(0, x.shape[0], SUBLANES)]
    while len(parts) > 1:
        pairs = [combine(*parts[i : i + 2]) for i in range(0, len(parts) - 1, 2)]
        parts = pairs + parts[2 * len(pairs) :]
    return _REDUCE[combine](parts[0], axis=0, keepdims=True)


_REDUCE: dict[Any, Callable[..., jax.Array]] = {jnp.add: jnp.sum, jnp.maximum: jnp.max}
