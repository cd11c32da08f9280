"""Examples in the order of a layout: tokens, what they are followed by, positions, documents and masks together."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample
from levanter.models.loss import cross_entropy_and_logsumexp_penalty

from shardplan.attention.levanter import ordered
from shardplan.errors import ConfigError
from shardplan.model.forward import capped_logits
from shardplan.positions.pattern import PADDING
from shardplan.positions.sequence_layout import SequenceLayout, labels_of

POSITION, KEYS = "position", "key_position"


class CutSequence(eqx.Module):
    """What a model takes of sequences whose positions are in the order of a layout."""

    tokens: NamedArray
    """int32[..., position]."""
    targets: NamedArray
    """int32[..., position]: the token that follows each in the sequence, whichever device has it."""
    positions: NamedArray
    """int32[position], for rotary embeddings; 0 of padding."""
    loss_mask: NamedArray
    """[..., position]: the loss counts; 0 of padding, and of the last, which nothing follows."""
    mask: AttentionMask
    layout: SequenceLayout = eqx.field(static=True)


def shard_sequence(example: LmExample, layout: SequenceLayout) -> CutSequence:
    """`example` in the order of `layout`, filled up to its padded length.

    Targets are taken before the sequence is cut: afterwards the next element is another token's, or another device's.

    Raises:
        ConfigError: the example's sequence is not as long as the layout's, or has other documents than that knows, or
            documents that are known at run time only.
    """
    tokens = example.tokens
    length = tokens.axis_size(POSITION)
    if length != layout.length:
        raise ConfigError(f"shard_sequence: the layout is for {layout.length} positions, the example has {length}")
    order = layout.order()
    places = hax.named(jnp.asarray(np.where(order == PADDING, 0, order), jnp.int32), POSITION)
    is_kept = hax.named(jnp.asarray((order != PADDING) & (order != length - 1)), POSITION)
    mask = AttentionMask() if example.attn_mask is None else example.attn_mask
    if isinstance(mask, NamedArray):
        mask = AttentionMask.explicit(mask)
    segments, explicit = mask.segment_ids, mask.explicit_mask
    if segments is not None:
        found = None if _known(layout, segments[0]) else tuple(_placed(x, order) for x in segments)
        mask = eqx.tree_at(lambda m: m.segment_ids, mask, found)
    if explicit is not None:
        mask = eqx.tree_at(lambda m: m.explicit_mask, mask, _placed(explicit, order))
    return CutSequence(
        tokens=_placed(tokens, order),
        targets=_placed(hax.roll(tokens, -1, POSITION), order),
        positions=places,
        loss_mask=_placed(example.loss_mask, order) * is_kept,
        mask=mask,
        layout=layout,
    )


def in_order(x: NamedArray, layout: SequenceLayout) -> NamedArray:
    """The inverse for one array [..., position, ...]: in the sequence's order, without padding."""
    return x.take(POSITION, hax.named(jnp.asarray(layout.places()), POSITION))


def activations(module: Any, sequence: CutSequence) -> NamedArray:
    """The residual stream [..., position, embed] behind the last layer, in the order of the layout.

    Raises:
        ConfigError: the module's attention takes another order.
    """
    found = ordered(module, sequence.layout).activations(sequence.tokens, sequence.mask, pos_ids=sequence.positions)
    # mixture-of-experts models return the router's auxiliary loss as well
    return found[0] if isinstance(found, tuple) else found


def next_token_losses(module: Any, sequence: CutSequence, soft_cap: float | None = None) -> NamedArray:
    """float32[..., position]: nats of the token after each, in the order of the layout; 0 where the loss is masked.

    Their mean is their sum by that of `sequence.loss_mask`. Without a z-loss, and a router's auxiliary loss.

    Args:
        module: a Levanter model with sequence-parallel attention of the sequence's layout
            (`shardplan.attention.levanter.with_sequence_parallel`).
        soft_cap: of logits.

    Raises:
        ConfigError: the module's attention takes another order.
    """
    logits = capped_logits(module, activations(module, sequence), soft_cap)
    targets = hax.nn.one_hot(sequence.targets, module.Vocab, dtype=jnp.float32)
    return cross_entropy_and_logsumexp_penalty(
        Vocab=module.Vocab, pred_y=logits, target_y=targets, reduction=None, where=sequence.loss_mask
    )


def _known(layout: SequenceLayout, segments: NamedArray) -> bool:
    """Whether the layout knows the documents, so that attention needs no ids for them."""
    labels = labels_of(layout)
    if labels is None:
        return False
    if isinstance(segments.array, jax.core.Tracer):
        raise ConfigError(
            "shard_sequence: the layout has documents, and the example's segment ids are traced, so that they cannot "
            "be compared; call it outside of jit, or leave the ids out"
        )
    ends = np.diff(np.asarray(segments.rearrange((..., POSITION)).array)) != 0
    if (ends != (np.diff(labels) != 0)).any():
        raise ConfigError(
            f"shard_sequence: the layout has documents of {', '.join(map(str, layout.documents or ()))} positions, the "
            "example's segment ids have others; make the layout of these, or of none"
        )
    return True


def _placed(x: NamedArray, order: np.ndarray) -> NamedArray:
    """Every axis of positions, of queries and of keys, in that order."""
    for name in {POSITION, KEYS} & {axis.name for axis in x.axes}:
        x = x.take(name, hax.named(jnp.asarray(np.where(order == PADDING, 0, order)), name))
    return x
