"""Sequence-parallel attention in Levanter models: replaces their `Attention` modules; Levanter is not patched."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import Attention, AttentionMask

from shardplan.attention.dot_product import dot_product_attention
from shardplan.decoder.parts.attention.sparse_attention import SparseAttentionLayer
from shardplan.errors import ConfigError, check_argument
from shardplan.model.attention.attention_calls import REPLACEABLE_CALLS
from shardplan.model.attention.mask_pattern import pattern_of_mask
from shardplan.plan.attention_plan import AttentionPlan, KernelName, Strategy
from shardplan.plan.plan import Plan
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.marked.attention_kind import AttentionKind

POSITION, KEY_POSITION = "position", "key_position"
"""The names that Levanter's `Attention` hard-codes for the positions of queries and of keys."""


@dataclass(frozen=True)
class Method:
    """How a model computes attention: arguments of `shardplan.attention.dot_product.dot_product_attention`."""

    strategy: str
    ulysses: int | None = None
    kernel: str = KernelName.BLOCKWISE
    layout: SequenceLayout | None = None
    """The layout of the positions in the model's inputs; None for the order of the sequence."""
    hardware: str | None = None
    """Name of the slice that the strategy `auto` chooses for; default: the slice of JAX's devices."""
    kinds: tuple[tuple[str, "Method"], ...] = ()
    """The methods of single kinds of attention, by `shardplan.program.marked.attention_kind`, instead of this one."""

    def of(self, kind: AttentionKind) -> "Method":
        """Return how a kind of attention is computed."""
        return dict(self.kinds).get(kind.name, self)


def _method_of_plan(plan: Plan) -> Method:
    """Return how a plan computes attention."""
    kinds = tuple((name, _method_of(attention, plan)) for name, attention in plan.attention.kinds.items())
    return replace(_method_of(plan.attention, plan), kinds=kinds)


def _method_of(attention: AttentionPlan, plan: Plan) -> Method:
    """Return how a plan computes one kind of attention."""
    layout = None if attention.layout == SequenceOrder.CONTIGUOUS else attention.sequence_layout(plan.workload.position)
    return Method(attention.strategy, attention.ulysses, attention.kernel, layout)


class SequenceParallelAttention(Attention):
    """Levanter's attention, computed by `shardplan.attention.dot_product.dot_product_attention`."""

    method: Method = eqx.field(static=True, default=Method(Strategy.ALL_GATHER))
    accepts_layout: bool = eqx.field(static=True, default=False)
    """Whether the caller passes sequences in the order of the layout; see `accept_layout`."""

    def __call__(
        self,
        x: NamedArray,
        mask: NamedArray | AttentionMask | None,
        *,
        key: Any = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        """Attend within {..., position, embed} and return the same axes, as Levanter's attention without dropout.

        Raises:
            ConfigError: the layout reorders positions, and the caller has not called `accept_layout`.
        """
        del key  # for dropout and for noise in projections, which no supported model has
        layout = self.method.layout
        if layout is not None and layout.kind != SequenceOrder.CONTIGUOUS:
            if not self.accepts_layout:
                raise ConfigError(
                    f"attention expects sequences in {layout.kind} order, but the model was called without it; use "
                    "shardplan.attention: next_token_losses(model, shard_sequence(example, layout))"
                )
            if pos_ids is None:  # Levanter's Mixtral accepts position ids, but does not pass them on
                pos_ids = hax.named(jnp.asarray(np.maximum(layout.positions(), 0)), POSITION)
        q, k, v = self._compute_qkv(x, key=None, pos_ids=pos_ids)
        k, v = (each.rename({POSITION: KEY_POSITION}) for each in (k, v))
        config = self.config
        # the order of the kernels, so that neither queries nor outputs are transposed twice
        q = q.rearrange((..., config.KVHeads, config.QHeadsPerGroup, POSITION, config.HeadSize))
        window = config.sliding_window
        if window is not None and isinstance(mask, AttentionMask):
            mask = mask.with_sliding_window(window)
        head_size = config.HeadSize.size
        kind = AttentionKind(pattern_of_mask(mask), head_size, head_size, config.logits_soft_cap)
        method = self.method.of(kind)
        out = dot_product_attention(
            POSITION,
            KEY_POSITION,
            config.HeadSize,
            q,
            k,
            v,
            mask,
            heads=config.KVHeads,
            strategy=method.strategy,
            ulysses=method.ulysses,
            kernel=method.kernel,
            layout=layout or SequenceOrder.CONTIGUOUS,
            hardware=method.hardware,
            attention_dtype=jnp.float32 if config.upcast_attn else x.dtype,
            scaling_factor=config.scaling_factor,
            logits_soft_cap=config.logits_soft_cap,
        )
        return self.o_proj(out.flatten_axes((config.KVHeads, config.QHeadsPerGroup), config.Heads).astype(x.dtype))


def accept_layout(module: Any, layout: SequenceLayout) -> Any:
    """Return `module` such that its attention accepts sequences in the order of `layout`.

    >>> from levanter.layers.attention import AttentionConfig
    >>> config = AttentionConfig(hax.Axis("embed", 128), num_heads=2, num_kv_heads=2)
    >>> layout = SequenceLayout(8, ring=2, kind=SequenceOrder.ZIGZAG)
    >>> module = eqx.filter_eval_shape(Attention.init, config, key=jax.random.key(0))
    >>> module = with_sequence_parallel(module, Method("ring", layout=layout))
    >>> module.accepts_layout, accept_layout(module, layout).accepts_layout
    (False, True)

    Raises:
        ConfigError: the module's attention has a layout with another order or with other documents.
    """
    for layer in filter(_is_sparse, jax.tree.leaves(module, is_leaf=_is_sparse)):
        own = SequenceLayout(layout.length, layout.ring, layout.ulysses, layer.config.layout)
        if not np.array_equal(own.positions(), layout.positions()):
            raise ConfigError(
                f"the layout of the sequence is {layout.description}, and native sparse attention of the model takes "
                f"positions in {layer.config.layout} order; build the model for the plan of this layout: "
                "specialize(model, plan)"
            )
    for attention in filter(_is_attention, jax.tree.leaves(module, is_leaf=_is_attention)):
        expected = attention.method.layout if isinstance(attention, SequenceParallelAttention) else None
        expected = expected or SequenceLayout(layout.padded_length)
        if expected.documents != layout.documents or not np.array_equal(expected.positions(), layout.positions()):
            raise ConfigError(
                f"the layout of the sequence is {layout.description}, and the model's attention has the layout "
                f"{expected.description}; give both the same: "
                "with_sequence_parallel(model, Method(strategy, layout=layout))"
            )
    return _replace_attention(
        module,
        lambda each: replace(each, accepts_layout=True) if isinstance(each, SequenceParallelAttention) else each,
    )


def with_sequence_parallel(module: Any, method: Method | Plan) -> Any:
    """Return a Levanter model, with or without weights, whose attention is computed by `method`, or as a plan says.

    `Method("none", kernel="splash")` is for positions that are not sharded: every device attends by shardplan's kernel
    for its part of the batch and of the heads, with head sizes from 64 to 256.

    With a layout that is not contiguous the model takes sequences in its order: `shardplan.attention.sequence`. A plan
    that does not shard positions leaves the model unchanged.

    >>> from levanter.layers.attention import AttentionConfig
    >>> config = AttentionConfig(hax.Axis("embed", 128), num_heads=2, num_kv_heads=2)
    >>> module = eqx.filter_eval_shape(Attention.init, config, key=jax.random.key(0))
    >>> type(with_sequence_parallel(module, Method("ring"))).__name__
    'SequenceParallelAttention'

    Raises:
        ConfigError: the model has no `Attention` module of Levanter, or a subclass that does more.
    """
    check_argument("with_sequence_parallel", "method", method, (Method, Plan), "Method('ring'), or a plan")
    if not any(map(_is_attention, jax.tree.leaves(module, is_leaf=_is_attention))):
        raise ConfigError(f"{type(module).__name__} does not use Levanter's Attention; its positions cannot be sharded")
    if isinstance(method, Plan):
        if not method.attention.is_sequence_parallel:
            return module
        method = _method_of_plan(method)
    return _replace_attention(module, partial(_make_parallel, method=method))


def has_parallel_modules(module: Any) -> bool:
    """Return whether `with_sequence_parallel` has replaced attention modules of a model.

    >>> from levanter.layers.attention import AttentionConfig
    >>> config = AttentionConfig(hax.Axis("embed", 128), num_heads=2, num_kv_heads=2)
    >>> module = eqx.filter_eval_shape(Attention.init, config, key=jax.random.key(0))
    >>> has_parallel_modules(module), has_parallel_modules(with_sequence_parallel(module, Method("ring")))
    (False, True)
    """
    return any(isinstance(each, SequenceParallelAttention) for each in jax.tree.leaves(module, is_leaf=_is_attention))


def _replace_attention(module: Any, change: Callable[[Attention], Attention]) -> Any:
    """Return `module` with `change` applied to every attention module."""
    return jax.tree.map(lambda node: change(node) if _is_attention(node) else node, module, is_leaf=_is_attention)


def _is_attention(node: Any) -> bool:
    return isinstance(node, Attention)


def _is_sparse(node: Any) -> bool:
    return isinstance(node, SparseAttentionLayer)


def _make_parallel(attention: Attention, method: Method) -> Attention:
    """Return a sequence-parallel copy of an attention module; one that is already sequence-parallel gets `method`.

    Raises:
        ConfigError: a subclass that does more than Levanter's Attention, or attention with dropout.
    """
    if isinstance(attention, SequenceParallelAttention):
        return replace(attention, method=method)
    if type(attention).__call__ not in REPLACEABLE_CALLS:
        raise ConfigError(
            f"{type(attention).__name__} does more than Levanter's Attention; its positions cannot be sharded"
        )
    values: Mapping[str, Any] = {field.name: getattr(attention, field.name) for field in fields(attention)}
    if values.get("attention_dropout"):
        raise ConfigError("attention with dropout has no sequence-parallel form; set attention_dropout to 0")
    kind: Any = type(attention)
    parallel: Attention = _parallel_class(kind)(**{**values, "method": method})
    return parallel


@cache
def _parallel_class(original: Any) -> Any:
    """Return a sequence-parallel subclass of a Levanter class, with the same projections, norms and tensor names."""
    name, metaclass = f"SequenceParallel{original.__name__}", type(original)
    return metaclass(name, (SequenceParallelAttention, original), {"__module__": __name__})
