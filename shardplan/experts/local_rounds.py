"""Applies a device's experts to the tokens on the device, in rounds of a bounded number of rows.

Runs inside `jax.shard_map`. Rows are sorted by expert, so that grouped matmuls compute each expert's rows with its
weights; a row's output is added to the sum of its token. The first round has room for as many rows as the device
gets if experts get about equally many.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import Array

from shardplan.experts.expert_weights import ExpertFunction, LocalWeights, SortedRows, apply_experts
from shardplan.experts.rounds import sum_rounds
from shardplan.experts.sorting import RowOrder, sort_by_expert, take_window
from shardplan.experts.statistics.recording import record_rounds, records_rounds
from shardplan.experts.tiles import BUFFER_MULTIPLE

OVERFLOW_ROWS = 4 * BUFFER_MULTIPLE
"""Number of rows in each round after the first; these rounds are empty while experts get about equally many rows."""


@dataclass(frozen=True)
class LocalRounds:
    """Computes one round of expert rows on a device, and adds up the outputs by token."""

    experts_per_token: int
    first_rows: int
    """Number of rows in the first round."""
    function: ExpertFunction

    def __call__(self, index: int | Array, order: RowOrder, operands: tuple[Array, Array, LocalWeights]) -> Array:
        """Compute the rows of one round, and sum their outputs by token: [tokens, embed].

        Args:
            index: index of the round; the Python number 0 for the first round.
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
        # unused rows are of some token; what is computed of them, and their gradients, go nowhere
        receiver = jnp.where(window.is_used, token, len(tokens))
        inputs = take_rows(tokens, token, receiver)
        factors = jnp.where(window.is_used, routing_weights.reshape(-1)[window.rows], 0)
        outputs = apply_experts(SortedRows(inputs, factors, window.sizes), weights, self.function)
        return add_rows(outputs, receiver, len(tokens))


@jax.custom_vjp
def take_rows(tokens: Array, index: Array, receiver: Array) -> Array:
    """Return the rows `tokens[index]`, [rows, embed].

    >>> take_rows(jnp.array([[1.0], [2.0]]), jnp.array([1, 0, 1]), jnp.array([1, 0, 1])).tolist()
    [[2.0], [1.0], [2.0]]

    Args:
        index: int32[rows].
        receiver: int32[rows], the token that the gradient of each row is added to; an index out of bounds drops the
            gradient.
    """
    del receiver  # of gradients
    return tokens.at[index].get(mode="promise_in_bounds")


def _take_rows_forward(tokens: Array, index: Array, receiver: Array) -> tuple[Array, tuple[Array, int]]:
    return take_rows(tokens, index, receiver), (receiver, len(tokens))


def _take_rows_backward(residuals: tuple[Array, int], gradient: Array) -> tuple[Array, None, None]:
    receiver, count = residuals
    return add_rows(gradient, receiver, count), None, None


take_rows.defvjp(_take_rows_forward, _take_rows_backward)


def add_rows(rows: Array, receiver: Array, count: int) -> Array:
    """Add up rows by receiver, [count, embed]; rows without a receiver are ignored, whatever their values.

    >>> add_rows(jnp.array([[1.0], [2.0], [5.0]]), jnp.array([0, 0, 2]), count=2).tolist()
    [[3.0], [0.0]]
    """
    return jnp.zeros((count, rows.shape[1]), rows.dtype).at[receiver].add(rows, mode="drop")


def sum_local_experts(
    tokens: Array,
    chosen: Array,
    routing_weights: Array,
    weights: LocalWeights,
    function: ExpertFunction,
    first_expert: int | Array = 0,
    max_rows: int | None = None,
) -> Array:
    """Return, for each token, the weighted sum of the outputs of its experts on this device, [tokens, embed].

    >>> from shardplan.experts.expert_weights import ExpertWeights
    >>> weights = ExpertWeights(gate=None, up=jnp.array([[[1.0]], [[10.0]]]), down=jnp.ones((2, 1, 1)))
    >>> tokens, chosen, function = jnp.array([[3.0]]), jnp.array([[0, 1]]), ExpertFunction(lambda gate, up: up)
    >>> sum_local_experts(tokens, chosen, jnp.array([[0.5, 0.5]]), weights, function).tolist()
    [[16.5]]

    Args:
        tokens: [tokens, embed].
        chosen: int32[tokens, k], numbers of experts.
        routing_weights: float32[tokens, k].
        first_expert: the number of the first expert of `weights`.
        max_rows: rows of the first round; default: enough for all rows.
    """
    per_token = chosen.shape[1]
    most = len(tokens) * min(per_token, len(weights.up))
    first_rows = most if max_rows is None else min(most, max_rows)
    order = sort_by_expert(chosen, first_expert, len(weights.up))
    count = jnp.int32(1)
    if first_rows < most:
        count += -(-jnp.maximum(order.sizes.sum() - first_rows, 0) // OVERFLOW_ROWS)
    if records_rounds():
        record_rounds(order.sizes.sum(), first_rows, count)
    rounds = LocalRounds(per_token, first_rows, function)
    summed: Array = sum_rounds(rounds, count, order, (tokens, routing_weights, weights))
    return summed
