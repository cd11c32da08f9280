"""Attention in a ring: queries stay, keys and values go round, and their gradients with them.

Inside `jax.shard_map`. Groups of devices that exchange heads for positions (Ulysses) do so before and after, and have
one ring index together. Each hop brings the keys of another ring index while those that are there are attended to; what
comes of each hop is merged in float32. The gradient makes the same hops (https://arxiv.org/abs/2310.01889).
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardplan.attention.kernels.kernel import Hop, Kernel, Tokens, merged
from shardplan.attention.strategies.all_gather import Gather
from shardplan.attention.strategies.ulysses import Exchange

RESIDUALS = "shardplan_attention"
"""Name of the output and the logarithms of weights, for policies of `jax.checkpoint`: kept, no hop is made again."""


@dataclass(frozen=True, eq=False)
class Ring:
    """Who keys come from."""

    axes: tuple[str, ...]
    """Mesh axes that cut the sequence, major to minor."""
    stride: int
    """Devices next to each other along `axes` that have one ring index."""
    keys: np.ndarray
    """int[ring, T]: the positions of the keys of each ring index."""
    distances: tuple[int, ...] = (0,)
    """How many ring indices back keys are needed from; the first is 0."""
    wants_sums: bool = False
    """Whether sums of weights are wanted too, as sinks need them."""

    @property
    def size(self) -> int:
        """Ring indices."""
        return len(self.keys)

    def index(self) -> Array:
        """The ring index of this device."""
        return jax.lax.axis_index(self.axes) // self.stride if self.size > 1 else jnp.int32(0)

    def moved(self, tree: Any, hops: int) -> Any:
        """`tree` as the device has it that is `hops` ring indices back."""
        if hops % self.size == 0:
            return tree
        # permutes number devices in the mesh's order of axes, whatever order they are given in
        mesh = jax.sharding.get_abstract_mesh()
        ordered = sorted(self.axes, key=mesh.axis_names.index)
        numbers = np.arange(self.size * self.stride).reshape([mesh.shape[axis] for axis in ordered])
        places = numbers.transpose([ordered.index(axis) for axis in self.axes]).reshape(-1).tolist()
        count = len(places)
        pairs = [(places[i], places[(i + hops * self.stride) % count]) for i in range(count)]
        return jax.tree.map(lambda x: jax.lax.ppermute(x, tuple(ordered), pairs), tree)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def ring_attention(
    kernel: Kernel,
    ring: Ring,
    exchange: Exchange | Gather | None,
    q: Array,
    k: Array,
    v: Array,
    place: Array,
    queries: Tokens,
    segments: Array | None,
    explicit: Array | None,
) -> tuple[Array, Array]:
    """Attention of this device's queries on the keys of all ring indices.

    Args:
        exchange: of heads for positions, or of keys and values for all of them; what follows is then of all positions
            of its group, but q, k and v.
        q: [B, N, G, S, K]; k: [B, N, T, K]; v: [B, N, T, V], of this device.
        place: which positions the queries are of, int32[].
        queries: what the mask goes by, of these queries.
        segments: documents of its keys, int32[B or 1, T].
        explicit: bool[B or 1, N or 1, G or 1, S, ring x T], what may attend besides.

    Returns:
        As `shardplan.attention.kernels.kernel.Kernel.attend`, but heads are exchanged as outputs of the queries' type.
    """
    # merging does too, and the gradient, for which `_forward` is called by itself
    wants_sums = ring.wants_sums or len(ring.distances) > 1
    return _forward(kernel, ring, exchange, q, k, v, place, queries, segments, explicit, wants_sums)[0]


def _forward(
    kernel: Kernel,
    ring: Ring,
    exchange: Exchange | Gather | None,
    q: Array,
    k: Array,
    v: Array,
    place: Array,
    queries: Tokens,
    segments: Array | None,
    explicit: Array | None,
    wants_sums: bool = True,
) -> tuple[tuple[Array, Array], Any]:
    if exchange is not None:
        q, k, v = exchange.queries(q), exchange.keys(k), exchange.keys(v)
    here = k, v, segments
    found: tuple[Array, Array] | None = None
    for distance, step in _steps(ring):
        following = ring.moved(here, step)  # under way while this one is attended to
        hop = _hop(ring, distance, place, queries, here[2], explicit)
        part = kernel.attend(hop, q, *here[:2], wants_sums)
        found = part if found is None else merged(found, part)
        found, here = _settled((found, following))
    assert found is not None
    out, logsum = (checkpoint_name(x.astype(jnp.float32), RESIDUALS) for x in found)
    result = out, logsum
    if exchange is not None:  # sent as narrow as queries are, and so are their gradients
        result = exchange.outputs(out, q.dtype), exchange.outputs(logsum, logsum.dtype)
    return result, (q, k, v, place, queries, segments, explicit, out, logsum)


def _backward(
    kernel: Kernel, ring: Ring, exchange: Exchange | Gather | None, kept: Any, gradients: tuple[Array, Array]
) -> tuple[Any, ...]:
    q, k, v, place, queries, segments, explicit, out, logsum = kept
    out_gradient, logsum_gradient = gradients
    if exchange is not None:
        out_gradient, logsum_gradient = exchange.queries(out_gradient), exchange.queries(logsum_gradient)
    out_gradient = out_gradient.astype(jnp.float32)
    offset = (out_gradient * out).sum(-1) - logsum_gradient
    here = k, v, segments
    q_gradient = jnp.zeros(q.shape, jnp.float32)
    of_keys = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for distance, step in _steps(ring):
        following = ring.moved(here, step)
        hop = _hop(ring, distance, place, queries, here[2], explicit)
        mine, *others = kernel.attend_backward(hop, q, *here[:2], logsum, out_gradient, offset)
        q_gradient += mine
        of_keys = ring.moved(tuple(map(jnp.add, of_keys, others)), step)
        q_gradient, here = _settled((q_gradient, following))
    of_keys = ring.moved(of_keys, -ring.distances[-1])
    of_q = q_gradient.astype(q.dtype)
    if exchange is None:
        of_k, of_v = (x.astype(like.dtype) for x, like in zip(of_keys, (k, v), strict=True))
    else:
        of_q = exchange.outputs(of_q, q.dtype)
        of_k, of_v = (exchange.keys_gradient(x, like.dtype) for x, like in zip(of_keys, (k, v), strict=True))
    return of_q, of_k, of_v, None, None, None, None


ring_attention.defvjp(_forward, _backward)


def _steps(ring: Ring) -> list[tuple[int, int]]:
    """Every distance, and how much further the next one is; nothing after the last."""
    following = (*ring.distances[1:], ring.distances[-1])
    return [(distance, after - distance) for distance, after in zip(ring.distances, following, strict=True)]


def _settled(tree: Any) -> Any:
    """`tree`, all of which is there before anything that comes of it begins.

    Else the compiler may leave all merging to the end, with what every hop gives in memory until then.
    """
    return jax.lax.optimization_barrier(tree)


def _hop(
    ring: Ring, distance: int, place: Array, queries: Tokens, segments: Array | None, explicit: Array | None
) -> Hop:
    """What is there when keys have come from that far."""
    source = (ring.index() - distance) % ring.size
    if explicit is not None:
        n = ring.keys.shape[1]
        explicit = jax.lax.dynamic_slice_in_dim(explicit, source * n, n, axis=4)
    return Hop(place, distance, queries, Tokens(jnp.asarray(ring.keys)[source], segments), explicit)
