"""Ring attention: queries stay on their device; keys, values and, in the backward pass, their gradients are sent round.

Runs inside `jax.shard_map`. Every hop receives the keys and values of another ring index while the device attends to
those it has; the outputs of all hops are combined in float32, and the backward pass makes the same hops
(https://arxiv.org/abs/2310.01889). With Ulysses, a group of devices shares one ring index, and exchanges heads for
positions before and after. All other strategies are rings of one index.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardplan.attention.kernels.interface import AttentionKernel, Hop, MaskInputs, OutputGradient, merge_attention
from shardplan.attention.strategies.all_gather import KeyValueGather
from shardplan.attention.strategies.ulysses import UlyssesExchange
from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.runtime.permute import permute


@dataclass(frozen=True, eq=False)
class Ring:
    """The devices that form a ring, and the distances over which they send keys and values."""

    axes: tuple[str, ...]
    """Mesh axes that shard the sequence, major to minor."""
    stride: int
    """Neighbouring devices along `axes` that share one ring index."""
    keys: np.ndarray
    """Number of neighbouring devices along `axes` that share one ring index."""
    distances: tuple[int, ...] = (0,)
    """Distance of each hop in ring indices: how far back the keys come from; the first is 0."""
    save_lse: bool = False
    """Whether the caller uses the log-sum-exp, as attention sinks do."""

    @property
    def size(self) -> int:
        """Number of ring indices."""
        return len(self.keys)

    def index(self) -> Array:
        """Return the ring index of this device."""
        return jax.lax.axis_index(self.axes) // self.stride if self.size > 1 else jnp.int32(0)

    def permute(self, tree: Any, hops: int) -> Any:
        """Send `tree` forward by `hops` ring indices; return the tree received from that many indices back."""
        if hops % self.size == 0:
            return tree
        count = self.size * self.stride
        pairs = [(device, (device + hops * self.stride) % count) for device in range(count)]
        return jax.tree.map(lambda x: permute(x, self.axes, pairs), tree)


@dataclass(frozen=True, eq=False)
class RingProgram:
    """One device's program in a ring: the kernel of each hop, and the collectives around and between hops."""

    kernel: AttentionKernel
    ring: Ring
    exchange: UlyssesExchange | KeyValueGather | None = None
    """Collectives before and after attention."""


class DeviceMask(NamedTuple):
    """Mask inputs of one device at the first hop, after the collectives that precede attention."""

    query_shard: Array
    """Index of the shard of the sequence that the queries belong to, int32[]."""
    queries: MaskInputs
    key_segments: Array | None
    """Document ids of the device's keys, int32[B or 1, T]."""
    explicit: Array | None
    """Additional mask bool[B or 1, N or 1, G or 1, S, ring x T]."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(program: RingProgram, q: Array, k: Array, v: Array, mask: DeviceMask) -> tuple[Array, Array]:
    """Attend with this device's queries to the keys of all ring indices.

    Args:
        q: [B, N, G, S, K]; k: [B, N, T, K]; v: [B, N, T, V], before the exchange.

    Returns:
        As `AttentionKernel.attend`; over several hops the output is float32, and with an exchange it has the dtype of
        the queries.
    """
    # combining hops needs the log-sum-exp; differentiation calls `_forward` itself, and always saves it
    save_lse = program.ring.save_lse or len(program.ring.distances) > 1
    return _forward(program, q, k, v, mask, save_lse)[0]


def _forward(
    program: RingProgram, q: Array, k: Array, v: Array, mask: DeviceMask, save_lse: bool = True
) -> tuple[tuple[Array, Array], Any]:
    """Return the result of `ring_attention`, and the residuals for `_backward`: its inputs, output and log-sum-exp.

    Keys and values travel around the ring; the attention of each hop is merged into the result of the earlier hops.
    """
    ring, exchange = program.ring, program.exchange
    if exchange is not None:
        q, k, v = exchange.reshard_queries(q), exchange.reshard_keys(k), exchange.reshard_keys(v)
    here = k, v, mask.key_segments
    merged: tuple[Array, Array] | None = None
    for distance, step in _hop_steps(ring):
        received = ring.permute(here, step)  # overlaps with the attention below
        hop = _make_hop(ring, distance, mask, here[2])
        result = program.kernel.attend(hop, q, *here[:2], save_lse)
        merged = result if merged is None else merge_attention(merged, result)
        merged, here = _finish_hop(ring, (merged, received))
    assert merged is not None
    # if both are kept, the backward pass repeats no hop
    out, lse = (checkpoint_name(x, ActivationName.CONTEXT.value) for x in merged)
    result = out, lse
    if exchange is not None:  # outputs, and in the backward pass their gradients, are sent in the dtype of queries
        result = exchange.reshard_outputs(out, q.dtype), exchange.reshard_outputs(lse, lse.dtype)
    return result, (q, k, v, mask, out, lse)


def _backward(program: RingProgram, residuals: Any, gradients: tuple[Array, Array]) -> tuple[Any, ...]:
    """Return the gradients of the arguments of `ring_attention` from `q` on; None for the mask.

    Keys and values travel around the ring as in `_forward`, together with their gradients, to which each device adds
    its part. After the last hop, the gradients return to the device that owns the keys.

    Args:
        gradients: gradients of the output and of the log-sum-exp.
    """
    ring, exchange = program.ring, program.exchange
    q, k, v, mask, out, lse = residuals
    out_gradient, lse_gradient = gradients
    if exchange is not None:
        out_gradient, lse_gradient = exchange.reshard_queries(out_gradient), exchange.reshard_queries(lse_gradient)
    out_gradient = out_gradient.astype(jnp.float32)
    output = OutputGradient(lse, out_gradient, delta=(out_gradient * out).sum(-1) - lse_gradient)
    here = k, v, mask.key_segments
    q_gradient = jnp.zeros(q.shape, jnp.float32)
    kv_gradients = jnp.zeros(k.shape, jnp.float32), jnp.zeros(v.shape, jnp.float32)
    for distance, step in _hop_steps(ring):
        received = ring.permute(here, step)
        hop = _make_hop(ring, distance, mask, here[2])
        q_added, *kv_added = program.kernel.attend_backward(hop, q, *here[:2], output)
        q_gradient += q_added
        kv_gradients = ring.permute(tuple(map(jnp.add, kv_gradients, kv_added)), step)
        q_gradient, here = _finish_hop(ring, (q_gradient, received))
    kv_gradients = ring.permute(kv_gradients, -ring.distances[-1])  # back to the device of these keys
    q_gradient = q_gradient.astype(q.dtype)
    if exchange is None:
        k_gradient, v_gradient = (x.astype(like.dtype) for x, like in zip(kv_gradients, (k, v), strict=True))
    else:
        q_gradient = exchange.reshard_outputs(q_gradient, q.dtype)
        k_gradient, v_gradient = (
            exchange.reshard_keys_gradient(x, like.dtype) for x, like in zip(kv_gradients, (k, v), strict=True)
        )
    return q_gradient, k_gradient, v_gradient, None


ring_attention.defvjp(_forward, _backward)


def _hop_steps(ring: Ring) -> list[tuple[int, int]]:
    """Return each hop's distance, and the number of ring indices from it to the next hop (0 after the last)."""
    following = (*ring.distances[1:], ring.distances[-1])
    return [(distance, after - distance) for distance, after in zip(ring.distances, following, strict=True)]


def _finish_hop(ring: Ring, tree: Any) -> Any:
    """Return `tree` behind a barrier: the compiler finishes all of it before operations that depend on it.

    Without this barrier the compiler may combine all hops at the end, with the output of every hop in memory. If there
    is only one hop there is no barrier, because it would make the compiler write the output in float32 before the cast.
    """
    return tree if len(ring.distances) == 1 else jax.lax.optimization_barrier(tree)


def _make_hop(ring: Ring, distance: int, mask: DeviceMask, key_segments: Array | None) -> Hop:
    """Return the mask inputs of one hop, whose keys come from `distance` ring indices back."""
    source = (ring.index() - distance) % ring.size
    explicit = mask.explicit
    if explicit is not None:
        n = ring.keys.shape[1]
        explicit = jax.lax.dynamic_slice_in_dim(explicit, source * n, n, axis=4)
    keys = MaskInputs(jnp.asarray(ring.keys)[source], key_segments)
    return Hop(mask.query_shard, distance, mask.queries, keys, explicit)
