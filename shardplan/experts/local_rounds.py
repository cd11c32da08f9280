"""Applies the experts of one device to tokens that are on it, in rounds of a bounded number of rows.

Runs inside `jax.shard_map`. Rows are sorted by expert, so that grouped matmuls compute each expert's rows with its
weights; a row's output is added to the sum of its token. The first round has room for as many rows as the device
gets if experts get about equally many.
"""

import math
from dataclasses import dataclass

import jax.numpy as jnp
from jax import Array

from shardplan.experts.expert_weights import ExpertFunction, LocalWeights, SortedRows, apply_experts
from shardplan.experts.rounds import sum_rounds
from shardplan.experts.sorting import RowOrder, sort_by_expert, take_window

ROW_TILE = 512
"""Rows of a tile of the kernels of grouped matmuls: buffers have a multiple of it."""
OVERFLOW_ROWS = 4 * ROW_TILE
"""Rows of the rounds after the first, which are empty while experts get about equally many rows."""


@dataclass(frozen=True)
class LocalRounds:
    """Computes the rows of one round, and adds them up by token."""

    experts_per_token: int
    first_rows: int
    """Rows of the first round."""
    function: ExpertFunction

    def __call__(self, index: int | Array, order: RowOrder, operands: tuple[Array, Array, LocalWeights]) -> Array:
        """Return [tokens, embed]: sums of the outputs of the round's rows.

        Args:
            index: of the round; the number 0 for the first one.
            order: the rows of all tokens, sorted by expert.
            operands: tokens [tokens, embed], their routing weights float32[tokens, k], and the weights of the experts.
        """
        tokens, routing_weights, weights = operands
        start: int | Array = 0
        size = self.first_rows
        if not isinstance(index, int):
            start, size = self.first_rows + (index - 1) * OVERFLOW_ROWS, OVERFLOW_ROWS
        window = take_window(order, start, size)
        token = window.rows // self.experts_per_token
        # unused rows are of some token: what their outputs and gradients are must not matter
        inputs = jnp.where(window.is_used[:, None], tokens[token], 0)
        factors = jnp.where(window.is_used, routing_weights.reshape(-1)[window.rows], 0)
        outputs = apply_experts(SortedRows(inputs, factors, window.sizes), weights, self.function)
        outputs = jnp.where(window.is_used[:, None], outputs, 0)
        return jnp.zeros_like(tokens).at[token].add(outputs)


def sum_local_experts(
    tokens: Array,
    chosen: Array,
    routing_weights: Array,
    weights: LocalWeights,
    function: ExpertFunction,
    first_expert: int | Array = 0,
    max_rows: int | None = None,
) -> Array:
    """Return [tokens, embed]: for each token the weighted sum of the outputs of its experts on this device.

    Args:
        tokens: [tokens, embed].
        chosen: int32[tokens, k], numbers of experts.
        routing_weights: float32[tokens, k].
        first_expert: the number of the first expert of `weights`.
        max_rows: rows of the first round; default: all that there can be.
    """
    per_token = chosen.shape[1]
    most = len(tokens) * min(per_token, len(weights.up))
    first_rows = most if max_rows is None else min(most, max_rows)
    order = sort_by_expert(chosen, first_expert, len(weights.up))
    count = jnp.int32(1)
    if first_rows < most:
        count += -(-jnp.maximum(order.sizes.sum() - first_rows, 0) // OVERFLOW_ROWS)
    rounds = LocalRounds(per_token, first_rows, function)
    summed: Array = sum_rounds(rounds, count, order, (tokens, routing_weights, weights))
    return summed


def buffer_rows(balanced_rows: float, factor: float) -> int:
    """Return the rows of a buffer: `factor` times those of balanced experts, as a multiple of `ROW_TILE`."""
    return math.ceil(balanced_rows * factor / ROW_TILE) * ROW_TILE
