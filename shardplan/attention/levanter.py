"""Levanter models with sequence-parallel attention in place of their own; nothing of Levanter is patched."""

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
from levanter.models.olmo import Olmo2Attention

from shardplan.attention.dot_product import dot_product_attention
from shardplan.errors import ConfigError
from shardplan.plan.plan import BLOCKWISE, UNCUT, Plan
from shardplan.positions.sequence_layout import CONTIGUOUS, SequenceLayout

KNOWN = (Attention.__call__, Olmo2Attention.__call__)
"""What `SequenceParallel` does in place of; other subclasses do more, as with sinks."""


@dataclass(frozen=True)
class Method:
    """How attention is done."""

    strategy: str
    ulysses: int | None = None
    kernel: str = BLOCKWISE
    layout: SequenceLayout | None = None
    """The order that positions are in; None where it is the sequence's."""
    hardware: str | None = None
    """Name of the slice, that the strategy `auto` needs."""


def method_of(plan: Plan) -> Method:
    """How a plan does attention."""
    method = plan.attention
    order = None if method.layout == CONTIGUOUS else method.order(plan.workload.position)
    return Method(method.strategy, method.ulysses, method.kernel, order)


class SequenceParallel(Attention):
    """Levanter's attention, by `shardplan.attention.dot_product.dot_product_attention`."""

    method: Method = eqx.field(static=True, default=Method("all_gather"))
    takes_ordered: bool = eqx.field(static=True, default=False)
    """Whether sequences are known to be in the order of the layout: see `ordered`."""

    def __call__(
        self,
        x: NamedArray,
        mask: NamedArray | AttentionMask | None,
        *,
        key: Any = None,
        pos_ids: NamedArray | None = None,
    ) -> NamedArray:
        """{..., position, embed} -> the same, as Levanter's; without dropout.

        Raises:
            ConfigError: the layout reorders positions, and nothing says that the sequence has been.
        """
        del key  # of dropout and of noise in projections, which no supported model has
        order = self.method.layout
        if order is not None and order.kind != CONTIGUOUS:
            if not self.takes_ordered:
                raise ConfigError(
                    f"attention takes sequences in {order.kind} order, and nothing says that these are; use "
                    "shardplan.attention.sequence: next_token_losses(model, shard_sequence(example, layout))"
                )
            if pos_ids is None:  # Levanter's Mixtral takes positions, and drops them
                pos_ids = hax.named(jnp.asarray(np.maximum(order.order(), 0)), "position")
        q, k, v = self._compute_qkv(x, key=None, pos_ids=pos_ids)
        k, v = (each.rename({"position": "key_position"}) for each in (k, v))
        out = dot_product_attention(
            "position",
            "key_position",
            "head_size",
            q,
            k,
            v,
            mask,
            strategy=self.method.strategy,
            ulysses=self.method.ulysses,
            kernel=self.method.kernel,
            layout=order or CONTIGUOUS,
            hardware=self.method.hardware,
            attention_dtype=jnp.float32 if self.config.upcast_attn else x.dtype,
            scaling_factor=self.config.scaling_factor,
            logits_soft_cap=self.config.logits_soft_cap,
        )
        return self.o_proj(out.flatten_axes(("kv_head", "q_heads_per_group"), "heads").astype(x.dtype))


def ordered(module: Any, layout: SequenceLayout) -> Any:
    """`module` for sequences that are in the order of `layout`, whatever it makes of their positions.

    Raises:
        ConfigError: its attention takes another order, or other documents.
    """
    for node in filter(_is_attention, jax.tree.leaves(module, is_leaf=_is_attention)):
        taken = (node.method.layout if isinstance(node, SequenceParallel) else None) or SequenceLayout(layout.padded)
        if taken.documents != layout.documents or not np.array_equal(taken.order(), layout.order()):
            raise ConfigError(
                f"the sequence is for {layout.described}, and attention of the model for {taken.described}; give both "
                "one: with_sequence_parallel(model, Method(strategy, layout=layout))"
            )
    return _changed(
        module, lambda node: replace(node, takes_ordered=True) if isinstance(node, SequenceParallel) else node
    )


def with_sequence_parallel(module: Any, method: Method | Plan) -> Any:
    """`module`, a Levanter model with or without weights, with every attention done by `method`, or as planned.

    Where the layout is not contiguous the model takes sequences in its order: `shardplan.attention.sequence`. A plan
    that does not cut positions leaves the model as it is.

    Raises:
        ConfigError: the model has no attention of the class that Levanter's models share, or it does more than that.
    """
    if not any(map(_is_attention, jax.tree.leaves(module, is_leaf=_is_attention))):
        raise ConfigError(
            f"{type(module).__name__} has attention of its own; only Levanter's Attention can have its positions cut"
        )
    if isinstance(method, Plan):
        if method.attention.strategy == UNCUT:
            return module
        method = method_of(method)
    return _changed(module, partial(_parallel, method=method))


def _changed(module: Any, change: Callable[[Attention], Attention]) -> Any:
    """`module` with every attention changed."""
    return jax.tree.map(lambda node: change(node) if _is_attention(node) else node, module, is_leaf=_is_attention)


def _is_attention(node: Any) -> bool:
    return isinstance(node, Attention)


def _parallel(attention: Attention, method: Method) -> Attention:
    if isinstance(attention, SequenceParallel):
        return replace(attention, method=method)
    if type(attention).__call__ not in KNOWN:
        raise ConfigError(f"{type(attention).__name__} is more than Levanter's Attention; its positions cannot be cut")
    values: Mapping[str, Any] = {field.name: getattr(attention, field.name) for field in fields(attention)}
    if values.get("attention_dropout"):
        raise ConfigError("attention with dropout has no sequence-parallel form; set attention_dropout to 0")
    kind: Any = type(attention)
    found: Attention = _class(kind)(**{**values, "method": method})
    return found


@cache
def _class(original: Any) -> Any:
    """A subclass of a Levanter class, so that its projections, norms and names in a checkpoint stay as they are."""
    name, kind = f"SequenceParallel{original.__name__}", type(original)
    return kind(name, (SequenceParallel, original), {"__module__": __name__})
