"""Grouped-query attention, in a form that traces and plans can replace.

`attend` calls `dot_product_attention` by its name in this module. A trace replaces this name to mark the call
(`shardplan.program.marked.marked_attention`), and a plan replaces it to compute attention as planned
(`shardplan.execution.planned_attention`). Otherwise Levanter's function computes attention
(`shardplan.decoder.parts.attention.levanter_attention`).
"""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from levanter.layers.attention import AttentionBackend, AttentionMask

from shardplan.decoder.parts.attention.levanter_attention import dot_product_attention
from shardplan.decoder.parts.attention.rotary import Positions, Rotary
from shardplan.decoder.parts.linear import INITIAL_SCALE, Linear
from shardplan.decoder.parts.norm import Norm, NormConfig
from shardplan.errors import ConfigError
from shardplan.model.attention.chunked_mask import with_chunks
from shardplan.model.gradient_checkpointing.activation_names import ActivationName

POSITION, KEY_POSITION = "position", "key_position"
"""Names of the position axes of queries and of keys, as in Levanter's models."""


@dataclass(frozen=True)
class Kernel:
    """Levanter's attention kernels, used without a plan."""

    backend: AttentionBackend | None = None
    block: int | None = None
    """Block size of flash attention, in positions."""


class HeadAxes(NamedTuple):
    """The axes of the heads of an attention layer."""

    KVHeads: Axis
    """The axis of key heads."""
    QHeadsPerGroup: Axis
    """The axis of query heads per key head."""
    Heads: Axis
    """The axis of all query heads, as the output projection's inputs."""
    HeadSize: Axis
    """The axis of a query or key head's channels."""


def attend(
    axes: HeadAxes,
    queries: NamedArray,
    keys: NamedArray,
    values: NamedArray,
    mask: AttentionMask,
    kernel: Kernel,
    **settings: Any,
) -> NamedArray:
    """Return, for every query, the mean of the values weighted by the softmax of the query's scores.

    Args:
        axes: the axes of the heads in the arrays.
        queries: {..., position, kv_head, q_heads_per_group, head_size}, in any order.
        keys: {..., position, kv_head, head_size}, in any order.
        values: the same axes as keys, or with another axis in place of head_size.
        mask: the keys that queries attend to.
        settings: changes of scores, arguments of Levanter's `dot_product_attention`.

    Returns:
        {..., position, heads, channels of values}, in any order.
    """
    # the order of the kernels, so that neither queries nor outputs are transposed twice
    queries = queries.rearrange((..., axes.KVHeads, axes.QHeadsPerGroup, POSITION, axes.HeadSize))
    attended = dot_product_attention(
        POSITION,
        KEY_POSITION,
        axes.HeadSize,
        queries,
        keys.rename({POSITION: KEY_POSITION}),
        values.rename({POSITION: KEY_POSITION}),
        mask,
        attn_backend=kernel.backend,
        flash_block_size=kernel.block,
        inference=True,  # no dropout
        **settings,
    )
    return attended.flatten_axes((axes.KVHeads, axes.QHeadsPerGroup), axes.Heads)


class NormExtent(Enum):
    """Which channels of queries or keys are normalised together, and which weights multiply them."""

    HEAD = "the channels of a head; all heads have the same weights"
    EACH_HEAD = "the channels of a head; every head has weights of its own"
    ALL_HEADS = "the channels of all heads"


@dataclass(frozen=True)
class HeadNorm:
    """The norms of queries and keys."""

    norm: NormConfig
    extent: NormExtent = NormExtent.HEAD
    is_after_rotary: bool = False
    """Whether queries and keys are normalised after rather than before they are rotated."""

    def init(self, heads: tuple[Axis, ...], head_size: Axis) -> Norm:
        """Make the norm of queries or of keys."""
        match self.extent:
            case NormExtent.HEAD:
                return self.norm.init(head_size)
            case NormExtent.EACH_HEAD:
                return self.norm.init(head_size, each=heads)
            case NormExtent.ALL_HEADS:
                return self.norm.init(*heads, head_size)


@dataclass(frozen=True)
class QueryTemperature:
    """Scales queries by `1 + beta * ln(1 + floor((position + first) / positions))`.

    Source: attention of Llama 4, which Ministral 3 has as well.
    """

    beta: float
    positions: int
    """Positions per step of the scale; queries in the first step are not scaled."""
    first: int = 0
    """Number added to every position before the division by `positions`."""

    def __call__(self, queries: NamedArray, positions: Positions) -> NamedArray:
        """Multiply each query {..., position, ...} by the factor of its position; the dtype stays."""
        steps = hax.floor((positions.indices + self.first).astype(jnp.float32) / self.positions)
        return (queries * (1.0 + self.beta * hax.log1p(steps))).astype(queries.dtype)


@dataclass(frozen=True)
class GroupedAttention:
    """Grouped-query attention: several heads of queries share one head of keys and values.

    Sources: https://arxiv.org/abs/1706.03762, https://arxiv.org/abs/2305.13245.
    """

    heads: int
    """Number of heads of queries."""
    kv_heads: int
    head_size: int
    rotary: Rotary | None = None
    """The rotary embeddings; None for layers without them."""
    has_bias: bool = False
    """Whether queries, keys and values have biases."""
    has_output_bias: bool = False
    head_norm: HeadNorm | None = None
    temperature: QueryTemperature | None = None
    scale: float | None = None
    """Factor of the scores; default: head_size ** -0.5."""
    soft_cap: float | None = None
    """Bound of the scores, applied as `cap * tanh(scores / cap)`."""
    window: int | None = None
    """Number of keys that a query attends to, counted back from its own position; None for all of them."""
    chunk: int | None = None
    """Positions per chunk, counted from the beginning of a text; a query attends only to its own chunk."""
    has_sinks: bool = False
    """Whether each head has a sink: a learned score that takes part in the softmax, but has no value."""
    value_head_size: int | None = None
    """Channels of a head of values; None for `head_size`."""

    def __post_init__(self) -> None:
        """Check that the settings are compatible.

        Raises:
            ConfigError: there are sinks and a soft cap, which Levanter's plain attention would apply to the sinks too.
        """
        if self.has_sinks and self.soft_cap is not None:
            raise ConfigError("attention has sinks and a soft cap; no model has both, and Levanter would cap the sinks")

    @property
    def KVHeads(self) -> Axis:
        """The axis of key heads."""
        return Axis("kv_head", self.kv_heads)

    @property
    def QHeadsPerGroup(self) -> Axis:
        """The axis of query heads per key head."""
        return Axis("q_heads_per_group", self.heads // self.kv_heads)

    @property
    def Heads(self) -> Axis:
        """The axis of all query heads, as an input axis of the output projection."""
        return Axis("heads", self.heads)

    @property
    def HeadSize(self) -> Axis:
        """The axis of a query or key head's channels."""
        return Axis("head_size", self.head_size)

    @property
    def ValueHeadSize(self) -> Axis:
        """The axis of a value head's channels, and of the head's output."""
        return self.HeadSize if self.value_head_size is None else Axis("value_head_size", self.value_head_size)

    def flops_per_token(self, embed: int, context_length: int) -> int:
        """Count the FLOPs of a token as Levanter's `lm_flops_per_token` does, with window, chunk and sizes of heads.

        FLOPs = 2 * embed * sizes * (heads + kv_heads) + keys * heads * (2 * sizes + 3), where sizes = head_size +
        value_head_size and keys = min(context_length, window, chunk). Kernels that skip later positions do not reduce
        this number.

        Args:
            embed: size of the residual stream.
            context_length: tokens of a text.
        """
        keys = min(filter(None, (context_length, self.window, self.chunk)))
        sizes = self.HeadSize.size + self.ValueHeadSize.size
        return 2 * embed * sizes * (self.heads + self.kv_heads) + keys * self.heads * (2 * sizes + 3)

    def init(self, Embed: Axis, key: jax.Array) -> "AttentionLayer":
        """Make the layer with random weights."""
        keys = jax.random.split(key, 5)
        of_queries, of_keys = (self.KVHeads, self.QHeadsPerGroup), (self.KVHeads,)
        size, value_size = self.HeadSize, self.ValueHeadSize
        return AttentionLayer(
            q_proj=Linear.init((*of_queries, size), (Embed,), self.has_bias, keys[0]),
            k_proj=Linear.init((*of_keys, size), (Embed,), self.has_bias, keys[1]),
            v_proj=Linear.init((*of_keys, value_size), (Embed,), self.has_bias, keys[2]),
            # a separate axis of heads, as in Levanter, so that this weight can have a storage sharding of its own
            o_proj=Linear.init((Embed,), (self.Heads, value_size), self.has_output_bias, keys[3]),
            q_norm=self.head_norm.init(of_queries, size) if self.head_norm else None,
            k_norm=self.head_norm.init(of_keys, size) if self.head_norm else None,
            sinks=hax.random.normal(keys[4], of_queries) * INITIAL_SCALE if self.has_sinks else None,
            config=self,
        )


class AttentionLayer(eqx.Module):
    """An attention layer: its projections and norms, and their use."""

    q_proj: Linear
    k_proj: Linear
    v_proj: Linear
    o_proj: Linear
    q_norm: Norm | None
    k_norm: Norm | None
    sinks: NamedArray | None
    """Score of each head's sink, {kv_head, q_heads_per_group}."""
    config: GroupedAttention = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray, mask: AttentionMask, positions: Positions, kernel: Kernel) -> NamedArray:
        """Compute the output {batch, position, embed} of attention from inputs with the same axes."""
        config = self.config
        queries = ActivationName.QUERIES(self.q_proj(x))
        keys, values = ActivationName.KEYS(self.k_proj(x)), ActivationName.VALUES(self.v_proj(x))
        is_rotated_first = config.head_norm is not None and config.head_norm.is_after_rotary
        if not is_rotated_first:
            queries, keys = self._normed(queries, keys)
        if config.rotary is not None:
            queries = config.rotary(queries, config.HeadSize, positions)
            keys = config.rotary(keys, config.HeadSize, positions)
        if is_rotated_first:
            queries, keys = self._normed(queries, keys)
        if config.temperature is not None:
            queries = config.temperature(queries, positions)
        attended = attend(
            HeadAxes(config.KVHeads, config.QHeadsPerGroup, config.Heads, config.HeadSize),
            queries,
            keys,
            values,
            self._narrowed(mask, positions, queries.resolve_axis(POSITION)),
            kernel,
            **self._changes_of_scores(),
        )
        context = ActivationName.CONTEXT(hax.auto_sharded(attended.astype(x.dtype)))
        return ActivationName.ATTENTION_OUT(self.o_proj(context))

    def _normed(self, queries: NamedArray, keys: NamedArray) -> tuple[NamedArray, NamedArray]:
        """Normalise queries and keys, if the layer does."""
        if self.q_norm is None or self.k_norm is None:
            return queries, keys
        return self.q_norm(queries), self.k_norm(keys)

    def _narrowed(self, mask: AttentionMask, positions: Positions, Pos: Axis) -> AttentionMask:
        """Return the mask restricted to the window and the chunks of the layer.

        A window or chunk as long as the sequence excludes nothing. It is left out, so that the layer has the same kind
        of attention as layers without a window or chunks.
        """
        window, chunk = self.config.window, self.config.chunk
        if window is not None and window < Pos.size:
            mask = mask.with_sliding_window(window)
        return mask if chunk is None or chunk >= Pos.size else with_chunks(mask, chunk, Pos, positions.indices)

    def _changes_of_scores(self) -> dict[str, Any]:
        """Return the arguments of `dot_product_attention` for the layer's score settings."""
        given = {
            "scaling_factor": self.config.scale, "logits_soft_cap": self.config.soft_cap, "attn_sink": self.sinks
        }  # fmt: skip
        return {name: value for name, value in given.items() if value is not None}
