"""Computes functions of logits one block of positions at a time, so that few logits are in memory.

Blocks interleave: with two blocks, the first one has positions 0, 2, 4, ... So if devices shard the positions of a
sequence, they shard the positions of every block as well.
"""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import auto_sharded
from levanter.models.loss import cross_entropy_and_logsumexp_penalty

BLOCK = "block"
"""Logical axis of the blocks of positions."""


def map_blocks(function: Callable[..., Any], position: Axis, blocks: int, *arrays: NamedArray) -> Any:
    """Apply `function` to one block of positions of `arrays` at a time.

    Args:
        function: takes arrays [..., position, ...] and returns a pytree of arrays [..., position].
        blocks: a divisor of the number of positions.

    Returns:
        The results of `function`, concatenated along the positions, which are the last axis.
    """
    if blocks == 1:
        return function(*arrays)
    block = Axis(BLOCK, blocks)
    parts = (position.resize(position.size // blocks), block)

    def join(result: NamedArray) -> NamedArray:
        batch = [axis for axis in result.axes if axis not in parts]
        return result.rearrange((*batch, *parts)).flatten_axes(parts, position)

    divided = tuple(array.unflatten_axis(position, parts) for array in arrays)
    results = hax.map(lambda block_arrays: function(*block_arrays), block)(divided)
    return jax.tree.map(join, results, is_leaf=lambda node: isinstance(node, NamedArray))


class OutputHead(eqx.Module):
    """The output head, which computes logits from the residual stream."""

    weight: NamedArray
    """Weight of the head, {vocab, embed}."""
    bias: NamedArray | None
    """Bias of the head, {vocab}; None for most models."""
    soft_cap: float | None = eqx.field(static=True)
    """Bound of the logits, applied as `soft_cap * tanh(logits / soft_cap)`."""

    def finish(self, products: NamedArray) -> NamedArray:
        """Add the bias to products of activations and weight, and apply the soft cap: logits float32[..., vocab]."""
        logits = products.astype(jnp.float32)
        if self.bias is not None:
            logits = logits + self.bias.astype(jnp.float32)
        return logits if self.soft_cap is None else self.soft_cap * hax.tanh(logits / self.soft_cap)


def prepare_head(module: Any, soft_cap: float | None, blocks: int = 1) -> OutputHead:
    """Return the output head of a Levanter model for `map_blocks`.

    For several blocks, the weight gets its compute sharding here, so that stored shards are gathered once, before the
    loop.
    """
    weight = module.get_lm_head()
    bias = getattr(module, "lm_head_bias", None)
    return OutputHead(weight if blocks == 1 else auto_sharded(weight), bias, soft_cap)


def project_to_vocab(activations: NamedArray, head: OutputHead, embed: Axis) -> NamedArray:
    """Compute float32[..., vocab] logits from activations [..., embed]."""
    return head.finish(hax.dot(activations, head.weight, axis=embed))


def compute_target_losses(
    module: Any,
    activations: NamedArray,
    targets: NamedArray,
    weights: NamedArray,
    soft_cap: float | None,
    blocks: int = 1,
) -> NamedArray:
    """Compute the loss, float32[..., position] in nats, of a target token at every position.

    Args:
        module: a Levanter model with its weights.
        activations: [..., position, embed] after the last layer.
        targets: int32[..., position].
        weights: [..., position], a factor of each loss.
        soft_cap: soft cap of the logits; None for none.
        blocks: number of blocks of positions; the logits of one block are live at a time.
    """
    head = prepare_head(module, soft_cap, blocks)

    def compute(activations: NamedArray, targets: NamedArray, weights: NamedArray) -> NamedArray:
        logits = project_to_vocab(activations, head, module.Embed)
        target_y = hax.nn.one_hot(targets, module.Vocab, dtype=jnp.float32)
        return cross_entropy_and_logsumexp_penalty(
            Vocab=module.Vocab, pred_y=logits, target_y=target_y, reduction=None, weight=weights
        )

    return map_blocks(compute, targets.axes[-1], blocks, activations, targets, weights)
