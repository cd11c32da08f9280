"""Computes one device's part of an attention, for any strategy, inside `jax.shard_map`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from haliax import Axis
from jax import Array

from shardplan.attention.axes import AxisRoles, merge_axes
from shardplan.attention.kernels.interface import NEG_INF, AttentionKernel, MaskInputs
from shardplan.attention.strategies.all_gather import KeyValueGather
from shardplan.attention.strategies.ring import DeviceMask, Ring, RingProgram, ring_attention
from shardplan.attention.strategies.ulysses import UlyssesExchange
from shardplan.positions.sequence_layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class DeviceAttention:
    """One attention call with its strategy and kernel chosen, to run on each device."""

    kernel: AttentionKernel
    axes: AxisRoles
    position_mesh_axes: tuple[str, ...]
    """Mesh axes that shard positions, major to minor."""
    gathers_keys: bool
    """Whether keys and values are all-gathered first; otherwise they pass around a ring (of one index for Ulysses)."""
    ring: Ring
    query_layout: SequenceLayout

    def run(self, inputs: Mapping[str, Array], input_axes: Mapping[str, tuple[Axis, ...]]) -> Array:
        """Return the output of this device's queries, with the axes `AxisRoles.output`.

        Args:
            inputs: this device's shards of q, k, v, the sink, and the arrays of
                `shardplan.attention.masking.MaskSpec.arrays`.
            input_axes: the axes of each input, with their global sizes.
        """
        axes = self.axes
        sizes = {axis.name: n for axis, n in zip(axes.query, inputs["q"].shape, strict=True)}
        sizes[axes.keys.name] = inputs["k"].shape[-2]
        # the head size of values may differ from that of queries and keys, under the same name
        value_sizes = {**sizes, **{axis.name: axis.size for axis in axes.value_size}}

        def merge(name: str, *groups: Sequence[Axis], sizes: Mapping[str, int] = sizes) -> Array:
            return merge_axes(inputs[name], input_axes[name], groups, sizes)

        def merge_optional(name: str, *groups: Sequence[Axis]) -> Array | None:
            return merge(name, *groups) if name in inputs else None

        b, n, g, s, t = axes.batch, axes.key_heads, axes.query_groups, [axes.queries], [axes.keys]
        q = merge("q", b, n, g, s, [axes.head_size])
        k = merge("k", b, n, t, [axes.head_size])
        v = merge("v", b, n, t, axes.value_size, sizes=value_sizes)
        q_segments, k_segments = merge_optional("q_segments", b, s), merge_optional("k_segments", b, t)
        max_key_position, sink = merge_optional("max_key_position", b, s), merge_optional("sink", n, g)
        explicit = None
        if "explicit" in inputs:  # its keys are not sharded
            explicit = merge("explicit", b, n, g, s, t, sizes={**sizes, axes.keys.name: self.ring.keys.size})
        exchange: KeyValueGather | UlyssesExchange | None = None
        if self.gathers_keys and self.position_mesh_axes:
            exchange = KeyValueGather(self.position_mesh_axes)
            k_segments = None if k_segments is None else exchange.all_gather(k_segments, 1)
        layout = self.query_layout
        if layout.ulysses > 1:
            exchange = UlyssesExchange(layout.ulysses, q.shape[1], q.shape[2], self.position_mesh_axes, layout.ring)
            q_segments, max_key_position, k_segments = (
                None if x is None else exchange.all_gather(x, 1) for x in (q_segments, max_key_position, k_segments)
            )
            explicit = None if explicit is None else _exchange_explicit(explicit, exchange)
        device = jax.lax.axis_index(self.position_mesh_axes) if self.position_mesh_axes else jnp.int32(0)
        query_shard = device // layout.ulysses
        queries = MaskInputs(jnp.asarray(layout.positions_by_ring_index())[query_shard], q_segments, max_key_position)
        mask = DeviceMask(query_shard, queries, k_segments, explicit)
        out, lse = ring_attention(RingProgram(self.kernel, self.ring, exchange), q, k, v, mask)
        if sink is not None:
            # a query without keys has output 0 already; a finite value keeps gradients from becoming NaN
            finite = jnp.where(lse == NEG_INF, 0.0, lse)
            out *= jnp.exp(finite - jnp.logaddexp(finite, sink.astype(jnp.float32)[None, :, :, None]))[..., None]
        return out.reshape([value_sizes[axis.name] for axis in axes.output])


def _exchange_explicit(explicit: Array, exchange: UlyssesExchange) -> Array:
    """Reshard an explicit mask bool[B or 1, N or 1, G or 1, S, T] to the rows and heads of queries after Ulysses."""
    if explicit.shape[1:3] == (1, 1):
        return exchange.all_gather(explicit, 3)
    b, _, _, *rest = explicit.shape
    return exchange.reshard_queries(
        jnp.broadcast_to(explicit, (b, exchange.key_heads, exchange.queries_per_key_head, *rest))
    )
