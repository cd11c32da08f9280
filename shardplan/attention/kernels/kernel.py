"""What kernels have in common: the attention of one device's queries on the keys of one hop. B batch, N key heads,
G query heads of each, S positions of queries and T of keys, K and V head sizes."""

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import jax.numpy as jnp
from jax import Array

from shardplan.positions.pattern import Pattern

EMPTY = -jnp.inf
"""The logarithm of no weight at all."""


class Tokens(NamedTuple):
    """What a mask goes by, of the positions of a shard."""

    positions: Array
    """int32[S]."""
    segments: Array | None = None
    """int32[B or 1, S]: the document of each; None where the mask knows none."""
    reach: Array | None = None
    """Of queries, int32[B or 1, S]: the last position each may attend to, where that is known at run time only."""


@dataclass(frozen=True)
class Rule:
    """How scores become weights, known while tracing."""

    pattern: Pattern
    scale: float
    soft_cap: float | None
    block: int
    """Positions of a block, of queries and of keys."""


class Hop(NamedTuple):
    """The queries of one device, and keys of one ring index."""

    place: Array
    """Which positions the queries are of; int32[]."""
    distance: int
    """How many ring indices back the keys are from."""
    queries: Tokens
    keys: Tokens
    explicit: Array | None
    """bool[B or 1, N or 1, G or 1, S, T], what may attend besides."""


class Kernel(Protocol):
    """Attention of q[B, N, G, S, K] on k[B, N, T, K] and v[B, N, T, V]."""

    def attend(self, hop: Hop, q: Array, k: Array, v: Array, wants_sums: bool = True) -> tuple[Array, Array]:
        """The output, float32[B, N, G, S, V], and the logarithm of the sum of weights, float32[B, N, G, S].

        A query that attends to nothing has zero and `EMPTY`.

        Args:
            wants_sums: whether these are wanted; else they may be any, and the output of the queries' type.
        """

    def attend_backward(
        self, hop: Hop, q: Array, k: Array, v: Array, logsum: Array, out_gradient: Array, offset: Array
    ) -> tuple[Array, Array, Array]:
        """What q, k and v get, in float32, of the gradient of outputs over all keys that these queries have.

        Args:
            logsum: over all keys, float32[B, N, G, S].
            out_gradient: float32[B, N, G, S, V].
            offset: sum of `out_gradient` times the output, less the gradient of `logsum`; float32[B, N, G, S].
        """


def merged(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Attention on two sets of keys: (output, logsum) of each, and of both together."""
    logsum = jnp.logaddexp(first[1], second[1])
    base = jnp.where(logsum == EMPTY, 0.0, logsum)
    one, other = (out * jnp.exp(part - base)[..., None] for out, part in (first, second))
    return one + other, logsum
