"""Functions of logits, computed for one block of positions after the other, so that few logits are in memory at a time.

Blocks take turns in the positions: with two blocks, positions 0, 2, 4, ... are the first one. So devices that share the
positions of a sequence share the positions of every block.
"""

from collections.abc import Callable
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import auto_sharded
from levanter.models.loss import cross_entropy_and_logsumexp_penalty

BLOCK = "block"
"""Logical axis that numbers the blocks of positions."""


def map_blocks(function: Callable[..., Any], position: Axis, blocks: int, *arrays: NamedArray) -> Any:
    """Apply `function` to blocks of positions of `arrays`, one after the other.

    Args:
        function: takes arrays [..., position, ...] and returns a pytree of arrays [..., position].
        blocks: a divisor of the number of positions.

    Returns:
        The result of `function` for all positions, each array with the positions last.
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


def prepare_head(module: Any, blocks: int) -> NamedArray:
    """Return the output head [embed, vocab] of a Levanter model for `map_blocks`.

    For several blocks it gets its compute sharding here, so that stored shards are gathered once, before the loop.
    """
    head = module.get_lm_head()
    return head if blocks == 1 else auto_sharded(head)


def project_to_vocab(activations: NamedArray, head: NamedArray, embed: Axis, soft_cap: float | None) -> NamedArray:
    """Compute float32[..., vocab] logits from activations [..., embed], as `soft_cap * tanh(logits / soft_cap)`."""
    logits = hax.dot(activations, head, axis=embed).astype(jnp.float32)
    return logits if soft_cap is None else soft_cap * hax.tanh(logits / soft_cap)


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
        blocks: parts of the positions whose logits are in memory one after the other.
    """
    head = prepare_head(module, blocks)

    def compute(activations: NamedArray, targets: NamedArray, weights: NamedArray) -> NamedArray:
        logits = project_to_vocab(activations, head, module.Embed, soft_cap)
        target_y = hax.nn.one_hot(targets, module.Vocab, dtype=jnp.float32)
        return cross_entropy_and_logsumexp_penalty(
            Vocab=module.Vocab, pred_y=logits, target_y=target_y, reduction=None, weight=weights
        )

    return map_blocks(compute, targets.axes[-1], blocks, activations, targets, weights)
