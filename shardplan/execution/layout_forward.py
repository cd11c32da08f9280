"""The forward pass under a plan: tokens are reordered to the plan's sequence layout, results back to sequence order."""

from dataclasses import dataclass
from typing import Any

import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray
from levanter.models.lm_model import LmExample

from shardplan.attention.sequence import (
    ShardedSequence,
    next_token_losses,
    restore_order,
    sequence_activations,
    shard_sequence,
)
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.positions.pattern import PADDING
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.steps.forward import Forward, SequenceForward


def planned_forward(plan: Plan) -> Forward:
    """Return the forward pass with positions in the plan's order."""
    if plan.attention.layout == SequenceOrder.CONTIGUOUS:
        return SequenceForward()
    return LayoutForward(plan.attention.sequence_layout(plan.workload.position))


@dataclass(frozen=True)
class LayoutForward:
    """The forward pass on positions in the order of a layout, for sequences of one window."""

    layout: SequenceLayout

    def in_layer_order(self, is_token: NamedArray) -> NamedArray:
        """Reorder bool[batch, position] to the order of the layout; False for its padding."""
        position, order = is_token.axes[-1].name, self.layout.positions()
        taken = is_token.take(position, hax.named(jnp.asarray(np.where(order == PADDING, 0, order)), position))
        return taken & hax.named(jnp.asarray(order != PADDING), position)

    def activations(
        self, model: Model, module: Any, tokens: NamedArray, window_starts: NamedArray | None
    ) -> NamedArray:
        """Compute the residual stream [batch, position, embed], in the order of the sequence."""
        assert window_starts is None  # plans shard no positions of packed windows
        sequence = self._sequence(model, tokens, None)
        return restore_order(sequence_activations(module, sequence), sequence)

    def last_activations(self, model: Model, module: Any, tokens: NamedArray) -> NamedArray:
        """Compute the residual stream [batch, embed] of the last position of the sequence."""
        stream = sequence_activations(module, self._sequence(model, tokens, None))
        return stream[model.template.Pos.name, int(self.layout.array_indices()[-1])]

    def losses(
        self,
        model: Model,
        module: Any,
        tokens: NamedArray,
        predicted: NamedArray,
        window_starts: NamedArray | None,
        blocks: int,
    ) -> NamedArray:
        """Compute the loss of the token after each position; see `shardplan.steps.forward.Forward`."""
        assert window_starts is None  # plans shard no positions of packed windows
        sequence = self._sequence(model, tokens, predicted)
        length = sequence.tokens.axes[-1].size  # with padding, which the number of blocks need not divide
        blocks = next(n for n in range(blocks, length + 1) if length % n == 0)
        return restore_order(next_token_losses(module, sequence, model.logit_soft_cap, blocks), sequence)

    def _sequence(self, model: Model, tokens: NamedArray, predicted: NamedArray | None) -> ShardedSequence:
        loss_mask = hax.ones_like(tokens) if predicted is None else predicted
        return shard_sequence(LmExample(tokens, loss_mask.astype(jnp.float32), model.mask), self.layout)
