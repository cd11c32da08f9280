"""Multi-head latent attention: keys and values of all heads come from one low-rank latent, queries from another.

A head has channels that are rotated and channels that are not. The rotated channels of keys are no part of the latent,
and all heads have the same. Here attention is expanded: keys and values of every head are computed from the latent, so
that every method and kernel computes it as other attention. In each head the rotated channels come first, as
`shardplan.decoder.parts.attention.rotary` has them; checkpoints, where they are last, are put in this order while they
are loaded. Source: https://arxiv.org/abs/2405.04434, section 2.1.
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from levanter.layers.attention import AttentionMask

from shardplan.decoder.parts.attention.grouped_attention import HeadAxes, Kernel, QueryTemperature, attend
from shardplan.decoder.parts.attention.rotary import Positions, Rotary
from shardplan.decoder.parts.linear import Linear
from shardplan.decoder.parts.norm import Norm, NormConfig
from shardplan.model.gradient_checkpointing.activation_names import ActivationName


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are made from one latent."""

    heads: int
    query_rank: int | None
    """Elements of the latent of queries; None if queries come from the residual stream."""
    kv_rank: int
    """Elements of the latent of keys and values."""
    unrotated_size: int
    """Channels of a head of queries and keys that are not rotated."""
    value_size: int
    """Channels of a head of values."""
    rotary: Rotary
    """Rotates the remaining channels of queries and keys."""
    norm: NormConfig
    """The norms of the latents."""
    has_bias: bool = False
    """Whether the projections to the latents have biases."""
    has_output_bias: bool = False
    temperature: QueryTemperature | None = None
    scale: float | None = None
    """Factor of the scores; default: head_size ** -0.5."""

    @property
    def rotated_size(self) -> int:
        """Number of rotated channels of a head."""
        return 2 * self.rotary.frequencies.pairs

    @property
    def head_size(self) -> int:
        """Number of channels of a query or key head."""
        return self.rotated_size + self.unrotated_size

    @property
    def head_axes(self) -> HeadAxes:
        """The axes of heads, under their names in grouped attention."""
        return HeadAxes(
            Axis("kv_head", self.heads),
            Axis("q_heads_per_group", 1),
            Axis("heads", self.heads),
            Axis("head_size", self.head_size),
        )

    @property
    def ValueHeadSize(self) -> Axis:
        """The axis of a value head's channels, and of the head's output."""
        name = "head_size" if self.value_size == self.head_size else "value_head_size"
        return Axis(name, self.value_size)

    @property
    def RotatedSize(self) -> Axis:
        """The axis of a head's first channels, which have rotary embeddings."""
        return Axis("rotated_head_size", self.rotated_size)

    @property
    def UnrotatedSize(self) -> Axis:
        """The axis of a head's channels that are not rotated."""
        return Axis("unrotated_head_size", self.unrotated_size)

    @property
    def QueryLatent(self) -> Axis | None:
        """The axis of the queries' latent."""
        return None if self.query_rank is None else Axis("q_lora", self.query_rank)

    @property
    def KVLatent(self) -> Axis:
        """The axis of the keys' and values' latent."""
        return Axis("kv_lora", self.kv_rank)

    def flops_per_token(self, embed: int, context_length: int) -> int:
        """Count the FLOPs of a token, as `GroupedAttention.flops_per_token` does.

        queries = 2 * (embed * query_rank + query_rank * heads * head_size), or 2 * embed * heads * head_size;
        keys and values = 2 * (embed * (kv_rank + rotated_size) + kv_rank * heads * (unrotated_size + value_size));
        output = 2 * heads * value_size * embed;
        scores = context_length * heads * (2 * (head_size + value_size) + 3).

        Args:
            embed: elements of the residual stream.
            context_length: tokens of a text.
        """
        inputs = embed if self.query_rank is None else self.query_rank
        queries = inputs * self.heads * self.head_size
        if self.query_rank is not None:
            queries += embed * self.query_rank
        latent = embed * (self.kv_rank + self.rotated_size)
        expanded = self.kv_rank * self.heads * (self.unrotated_size + self.value_size)
        output = self.heads * self.value_size * embed
        scores = context_length * self.heads * (2 * (self.head_size + self.value_size) + 3)
        return 2 * (queries + latent + expanded + output) + scores

    def init(self, Embed: Axis, key: jax.Array) -> "LatentAttentionLayer":
        """Make the layer with random weights."""
        keys = jax.random.split(key, 7)
        axes, latent, query_latent = self.head_axes, self.KVLatent, self.QueryLatent
        of_queries = (axes.KVHeads, axes.QHeadsPerGroup, axes.HeadSize)
        has_latent = query_latent is not None
        return LatentAttentionLayer(
            q_a_proj=Linear.init((query_latent,), (Embed,), self.has_bias, keys[0]) if has_latent else None,
            q_a_norm=self.norm.init(query_latent) if has_latent else None,
            q_proj=Linear.init(of_queries, (query_latent if has_latent else Embed,), False, keys[1]),
            kv_a_proj=Linear.init((latent,), (Embed,), self.has_bias, keys[2]),
            kv_a_norm=self.norm.init(latent),
            k_rotated_proj=Linear.init((self.RotatedSize,), (Embed,), self.has_bias, keys[3]),
            k_proj=Linear.init((axes.KVHeads, self.UnrotatedSize), (latent,), False, keys[4]),
            v_proj=Linear.init((axes.KVHeads, self.ValueHeadSize), (latent,), False, keys[5]),
            o_proj=Linear.init((Embed,), (axes.Heads, self.ValueHeadSize), self.has_output_bias, keys[6]),
            config=self,
        )


class LatentAttentionLayer(eqx.Module):
    """The projections of a layer with latent attention, and the norms of its latents."""

    q_a_proj: Linear | None
    """Projects the residual stream to the latent of queries; None if queries have none."""
    q_a_norm: Norm | None
    q_proj: Linear
    """Projects the latent of queries, or the residual stream, to queries."""
    kv_a_proj: Linear
    """Projects the residual stream to the latent of keys and values."""
    kv_a_norm: Norm
    k_rotated_proj: Linear
    """Projects the residual stream to the rotated channels of keys, which all heads share."""
    k_proj: Linear
    """Projects the latent to the channels of keys that are not rotated."""
    v_proj: Linear
    o_proj: Linear
    config: LatentAttention = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray, mask: AttentionMask, positions: Positions, kernel: Kernel) -> NamedArray:
        """Attend within {batch, position, embed}, and return the same axes."""
        config, axes = self.config, self.config.head_axes
        latent = self.kv_a_norm(self.kv_a_proj(x))
        keys, values = ActivationName.KEYS(self.k_proj(latent)), ActivationName.VALUES(self.v_proj(latent))
        rotated = config.rotary(self.k_rotated_proj(x), config.RotatedSize, positions)
        of_heads = rotated.broadcast_axis(axes.KVHeads)
        channels = axes.HeadSize.name
        keys = hax.concatenate(
            channels, [of_heads.rename({config.RotatedSize: channels}), keys.rename({config.UnrotatedSize: channels})]
        )
        queries = config.rotary(self._queries(x), axes.HeadSize, positions)
        if config.temperature is not None:
            queries = config.temperature(queries, positions)
        settings = {} if config.scale is None else {"scaling_factor": config.scale}
        attended = attend(axes, queries, keys, values, mask, kernel, **settings)
        context = ActivationName.CONTEXT(hax.auto_sharded(attended.astype(x.dtype)))
        return ActivationName.ATTENTION_OUT(self.o_proj(context))

    def _queries(self, x: NamedArray) -> NamedArray:
        """Return the queries of all heads, before they are rotated."""
        if self.q_a_proj is not None and self.q_a_norm is not None:
            x = self.q_a_norm(self.q_a_proj(x))
        return ActivationName.QUERIES(self.q_proj(x))
