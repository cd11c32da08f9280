"""The weights of experts, and the MLP of one device for rows sorted by expert."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from shardplan.experts.grouped_matmul import grouped_matmul
from shardplan.hardware.generations import Generation


@dataclass(frozen=True)
class ExpertFunction:
    """The activation and the options of an expert's MLP."""

    activation: Callable[[Array | None, Array], Array]
    """Computes the hidden states float32[rows, mlp] from the gate (None if there is none) and the up projection."""
    weighs_inputs: bool = False
    """Whether the routing weight multiplies the expert's input rather than its output."""
    generation: Generation | None = None
    """TPU generation, which determines the tiles of kernels; None for other devices."""


class ExpertWeights[Leaf](eqx.Module):
    """The weights of experts: named arrays of all experts, plain arrays of one device's experts, or their specs.

    In each matrix, inputs come before outputs, as grouped matmuls require. The class is not a named tuple, because
    Levanter's checkpoints would treat a generic named tuple as a plain tuple.
    """

    gate: Leaf | None
    """Gate projections {experts, embed, mlp}; None for experts without a gate."""
    up: Leaf
    """Up projections {experts, embed, mlp}."""
    down: Leaf
    """Down projections {experts, mlp, embed}."""
    gate_bias: Leaf | None = None
    """Biases of the gate projections, {experts, mlp}; None without biases."""
    up_bias: Leaf | None = None
    """Biases of the up projections, {experts, mlp}; None without biases."""
    down_bias: Leaf | None = None
    """Biases of the down projections, {experts, embed}; None without biases."""

    def map[Other](self, change: Callable[[Leaf], Other]) -> "ExpertWeights[Other]":
        """Apply a function to each array that is not None."""
        gate, gate_bias, up_bias, down_bias = (
            None if each is None else change(each) for each in (self.gate, self.gate_bias, self.up_bias, self.down_bias)
        )
        return ExpertWeights(gate, change(self.up), change(self.down), gate_bias, up_bias, down_bias)


LocalWeights = ExpertWeights[Array]
"""The weights of the experts of one device."""


class SortedRows(NamedTuple):
    """Rows for the experts of one device, sorted by expert."""

    tokens: Array
    """Token of each row, [rows, embed]; unused rows, at the end, may have any values."""
    weights: Array
    """Factor of each row in the sum of its token, float32[rows]; 0 for unused rows."""
    expert_sizes: Array
    """Number of rows of each expert, int32[experts]."""


def apply_experts(rows: SortedRows, weights: LocalWeights, function: ExpertFunction) -> Array:
    """Return the output of each row's expert, multiplied by the row's routing weight, [rows, embed].

    The routing weight multiplies the hidden state, which is in float32, or with `weighs_inputs` the token. Grouped
    matmuls skip unused rows, whose results have arbitrary values.

    >>> rows = SortedRows(jnp.array([[1.0], [2.0]]), weights=jnp.array([1.0, 0.5]), expert_sizes=jnp.array([1, 1]))
    >>> weights = ExpertWeights(gate=None, up=jnp.array([[[1.0]], [[10.0]]]), down=jnp.ones((2, 1, 1)))
    >>> apply_experts(rows, weights, ExpertFunction(lambda gate, up: up)).tolist()
    [[1.0], [10.0]]
    """
    if function.weighs_inputs:
        weighted = (rows.tokens * rows.weights[:, None]).astype(rows.tokens.dtype)
        rows = rows._replace(tokens=weighted, weights=jnp.ones_like(rows.weights))
    experts = _expert_of_row(rows) if weights.up_bias is not None or weights.down_bias is not None else None

    def project(inputs: Array, matrices: Array, bias: Array | None) -> Array:
        products = grouped_matmul(inputs, matrices, rows.expert_sizes, function.generation).astype(jnp.float32)
        return products if bias is None else products + bias[experts].astype(jnp.float32)

    up = project(rows.tokens, weights.up, weights.up_bias)
    gate = None if weights.gate is None else project(rows.tokens, weights.gate, weights.gate_bias)
    hidden = function.activation(gate, up) * rows.weights[:, None]
    hidden = hidden.astype(rows.tokens.dtype)
    outputs = grouped_matmul(hidden, weights.down, rows.expert_sizes, function.generation)
    if weights.down_bias is None:
        return outputs
    bias = weights.down_bias[experts].astype(jnp.float32) * rows.weights[:, None]
    return (outputs.astype(jnp.float32) + bias).astype(outputs.dtype)


def _expert_of_row(rows: SortedRows) -> Array:
    """Return the index of each row's expert, int32[rows]; for unused rows, the index of the last expert."""
    ends = jnp.cumsum(rows.expert_sizes)
    indices = jnp.searchsorted(ends, jnp.arange(rows.tokens.shape[0]), side="right", method="compare_all")
    return jnp.minimum(indices, len(rows.expert_sizes) - 1)


def gather_weights(weights: LocalWeights, expert_axes: tuple[str, ...], mlp_axes: tuple[str, ...]) -> LocalWeights:
    """All-gather the weights of all experts along the mesh axes that shard experts or their hidden states."""

    def gather(array: Array | None, mlp_dimension: int | None) -> Array | None:
        if array is not None and expert_axes:
            array = jax.lax.all_gather(array, expert_axes, axis=0, tiled=True)
        if array is not None and mlp_axes and mlp_dimension is not None:
            array = jax.lax.all_gather(array, mlp_axes, axis=mlp_dimension, tiled=True)
        return array

    up, down = gather(weights.up, 2), gather(weights.down, 1)
    assert up is not None and down is not None
    biases = gather(weights.gate_bias, 1), gather(weights.up_bias, 1), gather(weights.down_bias, None)
    return ExpertWeights(gather(weights.gate, 2), up, down, *biases)
