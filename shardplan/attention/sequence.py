"""Training examples in the order of a sequence layout: tokens, targets, positions, documents and masks together."""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.layers.attention import AttentionMask
from levanter.models.lm_model import LmExample

from shardplan.attention.levanter import accept_layout
from shardplan.errors import ConfigError
from shardplan.model.logits.logit_blocks import compute_target_losses
from shardplan.positions.pattern import PADDING
from shardplan.positions.sequence_layout import SequenceLayout, document_ids


class ShardedSequence(eqx.Module):
    """The inputs and targets of a model for sequences whose positions are in the order of a layout."""

    tokens: NamedArray
    """Tokens, int32[..., position]."""
    targets: NamedArray
    """The next token of each token in the sequence, even if another device holds it, int32[..., position]."""
    positions: NamedArray
    """Positions for rotary embeddings, int32[position]; 0 for padding."""
    loss_mask: NamedArray
    """Weight of the loss, [..., position]; 0 for padding, and for the last token, which has no target."""
    mask: AttentionMask
    layout: SequenceLayout = eqx.field(static=True)

    @property
    def position(self) -> str:
        """Name of the position axis, the last axis of the tokens."""
        return self.tokens.axes[-1].name


def shard_sequence(example: LmExample, layout: SequenceLayout) -> ShardedSequence:
    """Reorder `example` to the order of `layout`, padded to the layout's length.

    Positions are the last axis of the example's tokens. Key positions are the last axis of a mask that has their length
    and that tokens do not have.

    Targets are taken before reordering, because afterwards the next element may be another token, or on another device.

    >>> example = LmExample.causal(hax.arange(hax.Axis("position", 8)))
    >>> sharded = shard_sequence(example, SequenceLayout(8, ring=2, kind="zigzag"))
    >>> sharded.tokens.array.tolist()
    [0, 1, 6, 7, 2, 3, 4, 5]

    Raises:
        ConfigError: the example has another length than the layout, other documents than the layout, or documents that
            are traced although the layout has some.
    """
    tokens = example.tokens
    position, length = tokens.axes[-1].name, tokens.axes[-1].size
    if length != layout.length:
        raise ConfigError(
            f"shard_sequence: the layout is for {layout.length} positions, the example has {length}; make a "
            f"SequenceLayout({length}, ...)"
        )
    order = layout.positions()
    positions = hax.named(jnp.asarray(np.where(order == PADDING, 0, order), jnp.int32), position)
    has_target = hax.named(jnp.asarray((order != PADDING) & (order != length - 1)), position)

    def reorder(x: NamedArray) -> NamedArray:
        """Reorder every position axis of `x` (of tokens, queries or keys) to the order of the layout."""
        known = {axis.name for axis in tokens.axes}
        others = [axis.name for axis in x.axes if axis.name not in known and axis.size == length]
        for name in {position, *others[-1:]} & {axis.name for axis in x.axes}:
            x = x.take(name, hax.named(jnp.asarray(np.where(order == PADDING, 0, order)), name))
        return x

    mask = AttentionMask() if example.attn_mask is None else example.attn_mask
    if isinstance(mask, NamedArray):
        mask = AttentionMask.explicit(mask)
    segments, explicit = mask.segment_ids, mask.explicit_mask
    if segments is not None:
        is_known = _has_documents(layout, segments[0], position)
        reordered = None if is_known else tuple(map(reorder, segments))
        mask = eqx.tree_at(lambda m: m.segment_ids, mask, reordered)
    if explicit is not None:
        mask = eqx.tree_at(lambda m: m.explicit_mask, mask, reorder(explicit))
    return ShardedSequence(
        tokens=reorder(tokens),
        targets=reorder(hax.roll(tokens, -1, position)),
        positions=positions,
        loss_mask=reorder(example.loss_weight) * has_target,
        mask=mask,
        layout=layout,
    )


def restore_order(x: NamedArray, sequence: ShardedSequence) -> NamedArray:
    """Reorder an array [..., position, ...] from the layout of `sequence` to text order, and remove padding.

    >>> example = LmExample.causal(hax.arange(hax.Axis("position", 8)))
    >>> sequence = shard_sequence(example, SequenceLayout(8, ring=2, kind="zigzag"))
    >>> restore_order(sequence.tokens, sequence).array.tolist()
    [0, 1, 2, 3, 4, 5, 6, 7]
    """
    indices = hax.named(jnp.asarray(sequence.layout.array_indices()), sequence.position)
    return x.take(sequence.position, indices)


def sequence_activations(module: Any, sequence: ShardedSequence) -> NamedArray:
    """Return the residual stream [..., position, embed] after the last layer, in the order of the layout.

    Raises:
        ConfigError: the module's attention has another layout.
    """
    module = accept_layout(module, sequence.layout)
    result = module.activations(sequence.tokens, sequence.mask, pos_ids=sequence.positions)
    # mixture-of-experts models return the router's auxiliary loss as well
    return result[0] if isinstance(result, tuple) else result


def next_token_losses(
    module: Any, sequence: ShardedSequence, soft_cap: float | None = None, blocks: int = 1
) -> NamedArray:
    """Return float32[..., position]: nats of every next token, in the order of the layout; 0 where the loss is masked.

    The mean loss is their sum divided by the sum of `sequence.loss_mask`. A z-loss and a router's auxiliary loss are
    not included.

    Args:
        module: a Levanter model with sequence-parallel attention of the sequence's layout
            (`shardplan.attention.levanter.with_sequence_parallel`).
        soft_cap: soft cap of the logits.
        blocks: number of blocks of positions, which divides the number of positions; the logits of only one block are
            in memory at a time.

    Raises:
        ConfigError: the module's attention has another layout.
    """
    activations = sequence_activations(module, sequence)
    return compute_target_losses(module, activations, sequence.targets, sequence.loss_mask, soft_cap, blocks)


def _has_documents(layout: SequenceLayout, segments: NamedArray, position: str) -> bool:
    """Return whether the layout describes the documents of the segment ids, so that attention needs no ids.

    Raises:
        ConfigError: the layout has other documents, or cannot be compared because the ids are traced.
    """
    known_ids = document_ids(layout)
    if known_ids is None:
        return False
    if isinstance(segments.array, jax.core.Tracer):
        raise ConfigError(
            "shard_sequence: the layout has documents, but the example's segment ids are traced and cannot be "
            "compared with them; call it outside of jit, or leave out the ids"
        )
    is_boundary = np.diff(np.asarray(segments.rearrange((..., position)).array)) != 0
    if (is_boundary != (np.diff(known_ids) != 0)).any():
        raise ConfigError(
            f"shard_sequence: the layout has documents of {', '.join(map(str, layout.documents or ()))} positions, the "
            "example's segment ids have others; give the layout those documents, or none"
        )
    return True
