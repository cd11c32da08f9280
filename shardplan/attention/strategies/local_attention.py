"""What one device does of an attention, inside `jax.shard_map`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from haliax import Axis
from jax import Array

from shardplan.attention.axes import Dims, flat
from shardplan.attention.kernels.kernel import EMPTY, Kernel, Tokens
from shardplan.attention.strategies.all_gather import Gather
from shardplan.attention.strategies.ring import Ring, ring_attention
from shardplan.attention.strategies.ulysses import Exchange
from shardplan.positions.sequence_layout import SequenceLayout


@dataclass(frozen=True, eq=False)
class Task:
    """An attention whose strategy is chosen."""

    kernel: Kernel
    dims: Dims
    along: tuple[str, ...]
    """Mesh axes that cut positions."""
    gathers: bool
    """Whether keys and values are all gathered first; else they go round."""
    ring: Ring
    q_order: SequenceLayout

    def run(self, inputs: Mapping[str, Array], axes: Mapping[str, tuple[Axis, ...]]) -> Array:
        """The output of this device's queries, with axes as `Dims.of_output`.

        Args:
            inputs: q, k, v, what there is of `shardplan.attention.masking.mask_arrays`, and sink; this device's parts.
            axes: of each input.
        """
        dims = self.dims
        here = {axis.name: n for axis, n in zip(dims.of_query, inputs["q"].shape, strict=True)}
        here[dims.keys.name] = inputs["k"].shape[-2]
        # its head size may be another, under the same name
        of_value = {**here, **{axis.name: axis.size for axis in dims.values}}

        def found(name: str, *groups: Sequence[Axis]) -> Array | None:
            sizes = of_value if name == "v" else here
            return flat(inputs[name], axes[name], groups, sizes) if name in inputs else None

        b, n, g, s, t = dims.batch, dims.key_heads, dims.groups, [dims.queries], [dims.keys]
        q, k, v = (
            found("q", b, n, g, s, [dims.size]),
            found("k", b, n, t, [dims.size]),
            found("v", b, n, t, dims.values),
        )
        assert q is not None and k is not None and v is not None
        q_segments, reach, k_segments = found("q_segments", b, s), found("reach", b, s), found("k_segments", b, t)
        explicit = None
        if "explicit" in inputs:
            every_key = {**here, dims.keys.name: self.ring.keys.size}
            explicit = flat(inputs["explicit"], axes["explicit"], (b, n, g, s, t), every_key)
        exchange: Gather | Exchange | None = None
        if self.gathers and self.along:
            exchange = Gather(self.along)
            k_segments = None if k_segments is None else exchange.gathered(k_segments, 1)
        if self.q_order.ulysses > 1:
            exchange = Exchange(self.q_order.ulysses, q.shape[1], q.shape[2], self.along, self.q_order.ring)
            q_segments, reach, k_segments = (
                None if x is None else exchange.gathered(x, 1) for x in (q_segments, reach, k_segments)
            )
            explicit = None if explicit is None else _exchanged(explicit, exchange)
        place = (jax.lax.axis_index(self.along) if self.along else jnp.int32(0)) // self.q_order.ulysses
        queries = Tokens(jnp.asarray(self.q_order.regions())[place], q_segments, reach)
        out, logsum = ring_attention(self.kernel, self.ring, exchange, q, k, v, place, queries, k_segments, explicit)
        sink = found("sink", n, g)
        if sink is not None:
            # where nothing is attended to, the output is zero already
            finite = jnp.where(logsum == EMPTY, 0.0, logsum)
            out *= jnp.exp(finite - jnp.logaddexp(finite, sink.astype(jnp.float32)[None, :, :, None]))[..., None]
        return out.reshape([of_value[axis.name] for axis in dims.of_output])


def _exchanged(explicit: Array, exchange: Exchange) -> Array:
    """bool[B or 1, N or 1, G or 1, S, T] of this device's rows and heads -> of its group's rows, its own heads."""
    if explicit.shape[1:3] == (1, 1):
        return exchange.gathered(explicit, 3)
    b, _, _, *rest = explicit.shape
    return exchange.queries(jnp.broadcast_to(explicit, (b, exchange.key_heads, exchange.per_key_head, *rest)))
