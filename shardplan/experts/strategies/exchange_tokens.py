"""The exchange of tokens: every device sends its rows to the devices of their experts, and gets the outputs back.

Rows travel by ragged all-to-all, so that no more is sent than there is; they arrive sorted by expert, and within an
expert by the device that they come from. Their routing weights travel with them and are multiplied into hidden states,
so that the gradient of a weight does not need the output of its row, which would be computed and sent again. XLA has no
such collective for CPUs (https://github.com/jax-ml/jax/issues/34755): there, devices gather all rows
and take those that are theirs.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardplan.experts.expert_weights import ExpertFunction, LocalWeights, SortedRows, apply_experts
from shardplan.experts.rounds import sum_rounds
from shardplan.experts.sorting import sort_by_expert, window_sizes
from shardplan.experts.statistics.recording import record_rounds, records_rounds


class Slices(NamedTuple):
    """The slices of a ragged all-to-all, as `jax.lax.ragged_all_to_all` takes them, in the order of devices."""

    input_offsets: Array
    """Where each slice begins on this device, int32[slices]."""
    send_sizes: Array
    """Number of rows of each slice, int32[slices]."""
    output_offsets: Array
    """Where each slice begins at its receiver, int32[slices]."""
    recv_sizes: Array
    """Number of rows of each slice that this device receives, int32[slices]."""


class Exchange(NamedTuple):
    """The slices of one round of an all-to-all: one slice for every expert of every device."""

    there: Slices
    """Slices from a device's sorted rows to the buffers of their experts' devices."""
    back: Slices
    """Slices from the buffer of an expert's device to the sorted rows of each sender."""

    def reverse(self) -> "Exchange":
        """Return the exchange that sends the same slices back."""
        return Exchange(self.back, self.there)


@dataclass(frozen=True)
class ExchangeRounds:
    """Sends as many rows to each receiver in a round as fit there, and returns the outputs of these rows."""

    axes: tuple[str, ...]
    """Mesh axes that shard experts."""
    buffer_rows: int
    function: ExpertFunction

    def __call__(self, index: int | Array, sizes: Array, operands: tuple[Array, Array, LocalWeights]) -> Array:
        """Return the weighted outputs of the rows of round `index`, and 0 for all other rows: [rows, embed].

        Args:
            sizes: int32[devices, experts], the rows that each device has for each expert.
            operands: rows sorted by expert, [rows, embed], their routing weights float32[rows], and the weights of the
                experts of this device.
        """
        rows, factors, weights = operands
        slices = find_slices(sizes, jax.lax.axis_index(self.axes), index * self.buffer_rows, self.buffer_rows)
        buffer = jax.lax.empty((self.buffer_rows, rows.shape[1]), rows.dtype)
        inputs = _send_rows(rows, buffer, slices, self.axes)
        weights_of_rows = _send_rows(factors, _zeros((self.buffer_rows,), factors.dtype), slices, self.axes)
        expert_sizes = slices.there.recv_sizes.reshape(len(sizes), -1).sum(0)
        # what is computed of rows that hold nothing, and their gradients, are not sent
        outputs = apply_experts(SortedRows(inputs, weights_of_rows, expert_sizes), weights, self.function)
        return _send_rows(outputs, _zeros(rows.shape, rows.dtype), slices.reverse(), self.axes)


def exchange_tokens(
    tokens: Array,
    chosen: Array,
    routing_weights: Array,
    weights: LocalWeights,
    function: ExpertFunction,
    axes: tuple[str, ...],
    buffer_rows: int,
) -> Array:
    """Compute each token's weighted sum of expert outputs, on the devices of the experts: [tokens, embed].

    Args:
        tokens: [tokens, embed], tokens of this device.
        chosen: int32[tokens, k], numbers of experts.
        routing_weights: float32[tokens, k].
        axes: mesh axes that shard experts.
        buffer_rows: rows that a device receives in a round.
    """
    count, per_token = chosen.shape
    devices = jax.lax.axis_size(axes)
    order = sort_by_expert(chosen, 0, devices * len(weights.up))
    sizes = jax.lax.all_gather(order.sizes, axes)
    received = sizes.reshape(devices, devices, -1).sum((0, 2))
    buffer_rows = min(buffer_rows, count * devices * min(per_token, len(weights.up)))
    count_of_rounds = jnp.maximum(1, -(-received.max() // buffer_rows)).astype(jnp.int32)
    if records_rounds():
        record_rounds(received[jax.lax.axis_index(axes)], buffer_rows, count_of_rounds)
    compute = ExchangeRounds(axes, buffer_rows, function)
    operands = tokens[order.rows // per_token], routing_weights.reshape(-1)[order.rows], weights
    outputs = sum_rounds(compute, count_of_rounds, sizes, operands)
    place = jnp.zeros_like(order.rows).at[order.rows].set(jnp.arange(order.rows.size, dtype=jnp.int32))
    place = place.reshape(count, per_token)
    summed = jnp.zeros(tokens.shape, jnp.float32)
    for choice in range(per_token):  # an axis of choices would be one of the two that tiles are made of
        summed += outputs[place[:, choice]].astype(jnp.float32)
    return summed.astype(tokens.dtype)


def find_slices(sizes: Array, device: Array, start: int | Array, size: int) -> Exchange:
    """Compute the slices that a device sends and receives in one round.

    >>> sizes = jnp.array([[1, 2], [3, 0]])
    >>> there = find_slices(sizes, jnp.int32(0), start=0, size=8).there
    >>> there.send_sizes.tolist(), there.recv_sizes.tolist()
    ([1, 2], [1, 3])

    Args:
        sizes: int32[devices, experts], the rows that each device has for each expert; the experts of device 0 come
            first.
        device: index of this device.
        start: first row of the round, among all rows that a receiver gets in all rounds.
        size: number of rows that a receiver gets in the round.
    """
    devices = len(sizes)
    # a receiver has rows in the order of its experts, and for an expert in the order of senders
    arriving = sizes.reshape(devices, devices, -1).transpose(1, 2, 0).reshape(devices, -1)
    arrives_at = jnp.cumsum(arriving, axis=1) - arriving

    def by_sender(values: Array) -> Array:
        """Reorder [receiver, expert and sender] to [sender, receiver, expert]."""
        return values.reshape(devices, -1, devices).transpose(2, 0, 1).astype(jnp.int32)

    rows = by_sender(window_sizes(arriving, start, size))
    in_buffer = by_sender(jnp.maximum(arrives_at - start, 0))
    # the rows of a slice that are before the window were sent in earlier rounds
    earlier = by_sender(jnp.clip(start - arrives_at, 0, arriving))
    in_sorted_rows = (jnp.cumsum(sizes, axis=1) - sizes).reshape(rows.shape) + earlier
    # slices without rows may begin anywhere, but not beyond an array
    in_buffer, in_sorted_rows = (jnp.where(rows > 0, offsets, 0) for offsets in (in_buffer, in_sorted_rows))
    sent, received = rows[device].reshape(-1), rows[:, device].reshape(-1)
    there = Slices(in_sorted_rows[device].reshape(-1), sent, in_buffer[device].reshape(-1), received)
    back = Slices(in_buffer[:, device].reshape(-1), received, in_sorted_rows[:, device].reshape(-1), sent)
    return Exchange(there, back)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _send_rows(rows: Array, output: Array, exchange: Exchange, axes: tuple[str, ...]) -> Array:
    """Exchange slices of rows, and return `output` with the received slices written into it.

    Gradients of `rows` are sent back. JAX's own gradient of the collective would also compute the gradient of `output`.

    Args:
        rows: [rows, ...].
        output: [rows, ...], of any number of rows.
        axes: mesh axes of the devices.
    """
    return ragged_all_to_all(rows, output, exchange.there, axes)


def _send_forward(
    rows: Array, output: Array, exchange: Exchange, axes: tuple[str, ...]
) -> tuple[Array, tuple[Exchange, int]]:
    return _send_rows(rows, output, exchange, axes), (exchange, len(rows))


def _send_backward(axes: tuple[str, ...], residuals: tuple[Exchange, int], gradient: Array) -> tuple[Array, None, None]:
    exchange, count = residuals
    zeros = _zeros((count, *gradient.shape[1:]), gradient.dtype)
    return ragged_all_to_all(gradient, zeros, exchange.back, axes), None, None


_send_rows.defvjp(_send_forward, _send_backward)


def _zeros(shape: tuple[int, ...], dtype: Any) -> Array:
    """Make zeros in the usual layout; in the collective's layout, one row per tile, they take ten times as long."""
    zeros: Array = jax.lax.optimization_barrier(jnp.zeros(shape, dtype))
    return zeros


def ragged_all_to_all(operand: Array, output: Array, slices: Slices, axes: tuple[str, ...]) -> Array:
    """Send slices of the rows of `operand` to other devices; return `output` with the received slices.

    Args:
        operand: [rows, ...].
        output: [rows, ...], of any number of rows.
        axes: mesh axes of the devices.
    """

    def native(operand: Array, output: Array, slices: Slices) -> Array:
        received: Array = jax.lax.ragged_all_to_all(operand, output, *slices, axis_name=axes)
        return received

    def gathered(operand: Array, output: Array, slices: Slices) -> Array:
        return _gather_and_take(operand, output, slices, axes)

    result: Array = jax.lax.platform_dependent(operand, output, slices, default=native, cpu=gathered)
    return result


def _gather_and_take(operand: Array, output: Array, slices: Slices, axes: tuple[str, ...]) -> Array:
    """Compute `jax.lax.ragged_all_to_all` by collectives that XLA supports on CPUs."""
    operands = jax.lax.all_gather(operand, axes)
    devices, me = len(operands), jax.lax.axis_index(axes)

    def received(values: Array) -> Array:
        """Return the values of the slices that all senders have for this device."""
        return jax.lax.all_gather(values, axes).reshape(devices, devices, -1)[:, me].reshape(-1)

    begins, places = received(slices.input_offsets), received(slices.output_offsets)
    rows = jnp.arange(len(output))
    is_in = (rows >= places[:, None]) & (rows < (places + slices.recv_sizes)[:, None])  # [slice, row]
    found = is_in.argmax(0)
    sender = found // (len(begins) // devices)
    taken = operands[sender, jnp.clip(begins[found] + rows - places[found], 0, len(operand) - 1)]
    is_received = is_in.any(0).reshape(-1, *(1,) * (output.ndim - 1))
    return jnp.where(is_received, taken, output)
