"""Attention to compressed blocks, and the importance of selection blocks. Paper: 3.3.1 and equations 8 to 10.

A compressed block is visible to a query at or after the block's last token. Each stride of tokens receives the weights
of the compressed blocks that contain it; the importance of a selection block is the sum over its strides and over the
heads of a group. This is the double sum of equation 9: weights are multiplied by the tokens that two blocks share.
"""

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.branches.masked_softmax import masked_softmax
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig


def attend_to_compressed(
    config: NativeSparseConfig,
    positions: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    selection_blocks: int,
) -> tuple[jax.Array, jax.Array]:
    """Attend to the compressed blocks that each query sees.

    Args:
        positions: int[t], of the queries.
        queries: [b, t, g, r, d].
        keys: [b, c, g, d], of all compressed blocks, in order.
        values: [b, c, g, d].
        selection_blocks: number J of selection blocks of the sequence.

    Returns:
        The output [b, t, g, r, d], zero for queries that see no block; and the importance float32[b, t, g, j], through
        which no gradient flows.
    """
    last_tokens = jnp.arange(keys.shape[1]) * config.stride + config.block - 1
    is_visible = last_tokens <= positions[:, None]
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    scores = jnp.einsum("btgrd,bcgd->btgrc", queries, keys, preferred_element_type=jnp.float32) * config.scale
    weights = masked_softmax(scores, is_visible[:, None, None])
    output = jnp.einsum("btgrc,bcgd->btgrd", weights.astype(values.dtype), values)
    return output, importance_of(config, jax.lax.stop_gradient(weights).sum(axis=3), selection_blocks)


def importance_of(config: NativeSparseConfig, weights: jax.Array, selection_blocks: int) -> jax.Array:
    """Return sum over c of weights[c] * (tokens that blocks c and j share) / stride, for every selection block j.

    >>> sizes = {"embed": 8, "groups": 1, "heads_per_group": 1, "key_size": 2, "value_size": 2, "window": 4}
    >>> config = NativeSparseConfig(**sizes, block=4, stride=2, selection_block=4, selected=3)
    >>> importance_of(config, jnp.array([1.0, 0.0, 0.0]), 2).tolist()
    [2.0, 0.0]
    >>> importance_of(config, jnp.array([0.0, 1.0, 0.0]), 2).tolist()
    [1.0, 1.0]

    Args:
        weights: float32[..., c].

    Returns:
        float32[..., j].
    """
    strides_per_selection = config.selection_block // config.stride
    strides = selection_blocks * strides_per_selection
    others = [(0, 0)] * (weights.ndim - 1)
    by_stride = jnp.zeros((*weights.shape[:-1], strides), weights.dtype)
    for first in range(config.strides_per_block):
        by_stride += jnp.pad(weights, [*others, (first, strides - weights.shape[-1] - first)])
    return by_stride.reshape(*weights.shape[:-1], selection_blocks, strides_per_selection).sum(axis=-1)
