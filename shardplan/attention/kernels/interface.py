"""The interface of attention kernels: one device's queries attend to the keys of one ring hop.

Dimensions: B batch, N key heads, G query heads per key head, S query positions, T key positions, K and V head sizes.
"""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from shardplan.positions.pattern import Pattern

NEG_INF = -jnp.inf
"""Score of a masked pair, and log-sum-exp of a query that attends to no key."""


class MaskInputs(NamedTuple):
    """Per-position inputs of the mask, for one shard of queries or keys."""

    positions: Array
    """Position of each query or key, int32[S]; `PADDING` for padding."""
    segments: Array | None = None
    """Document ids, int32[B or 1, S]; None if the mask has no documents."""
    max_key_position: Array | None = None
    """Last key position each query may attend to, int32[B or 1, S]; None for keys, and if the pattern is static."""


@dataclass(frozen=True)
class KernelConfig:
    """Static settings of a kernel: the mask pattern and how scores are scaled, capped and blocked."""

    pattern: Pattern
    scale: float
    soft_cap: float | None
    block: int
    """Side of a block of scores, in positions."""


class Hop(NamedTuple):
    """Mask inputs of one ring hop: one shard of queries, and the keys of one ring index."""

    query_shard: Array
    """Index of the shard of the sequence that the queries belong to, int32[]."""
    distance: int
    """Number of ring indices between the queries' device and the device that the keys came from."""
    queries: MaskInputs
    keys: MaskInputs
    explicit: Array | None
    """Additional mask bool[B or 1, N or 1, G or 1, S, T], true where attention is allowed."""


class OutputGradient(NamedTuple):
    """Inputs of the backward pass for each query, in float32, summed over the keys of all hops."""

    lse: Array
    """Log-sum-exp of the scores, [B, N, G, S]."""
    gradient: Array
    """Gradient of the output, [B, N, G, S, V]."""
    delta: Array
    """Sum over V of `gradient` times the output, minus the gradient of `lse`; [B, N, G, S]."""


class AttentionKernel(Protocol):
    """A kernel for attention of q[B, N, G, S, K] on k[B, N, T, K] and v[B, N, T, V]."""

    def attend(self, hop: Hop, q: Array, k: Array, v: Array, save_lse: bool = True) -> tuple[Array, Array]:
        """Return the output [B, N, G, S, V], float32 or of the dtype of `q`, and the log-sum-exp float32[B, N, G, S].

        A query that attends to no key has output 0 and log-sum-exp `NEG_INF`.

        Args:
            save_lse: whether the caller uses the log-sum-exp of the scores. If false, its values are arbitrary.
        """

    def attend_backward(
        self, hop: Hop, q: Array, k: Array, v: Array, output: OutputGradient
    ) -> tuple[Array, Array, Array]:
        """Return this hop's contributions to the gradients of q, k and v, in float32."""


def merge_attention(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Combine (output, lse) over two disjoint sets of keys into (output, lse) over their union.

    >>> one, other = (jnp.array([[1.0]]), jnp.array([0.0])), (jnp.array([[3.0]]), jnp.array([0.0]))
    >>> output, lse = merge_attention(one, other)
    >>> output.tolist(), round(float(lse[0]), 4)
    ([[2.0]], 0.6931)
    """
    lse = jnp.logaddexp(first[1], second[1])
    base = jnp.where(lse == NEG_INF, 0.0, lse)
    one, other = (out * jnp.exp(part - base)[..., None] for out, part in (first, second))
    return one + other, lse
