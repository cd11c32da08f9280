"""Compresses each block of tokens to one key or value. Paper: section 3.3.1, equation 7.

A position encoding is added to the tokens of a block, then `Compression` makes one key or value of them.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.config import Compression, NativeSparseConfig


def compress(config: NativeSparseConfig, x: jax.Array, phi: Mapping[str, jax.Array]) -> jax.Array:
    """Return the compressed keys or values of a sequence, one per complete block.

    >>> import numpy as np
    >>> sizes = {"embed": 8, "groups": 1, "heads_per_group": 1, "key_size": 2, "value_size": 1, "window": 4}
    >>> config = NativeSparseConfig(**sizes, block=4, stride=2, selection_block=4, selected=3, compression="mean")
    >>> compress(config, np.arange(8.0).reshape(1, 8, 1, 1), {"pe": np.zeros((1, 4, 1))}).ravel().tolist()
    [1.5, 3.5, 5.5]

    Args:
        x: [b, s, g, d], keys or values of the compressed branch, not rotated.
        phi: the parameters of the compression, by the names of `parameter_table` without `phi_k_` or `phi_v_`.

    Returns:
        [b, c, g, d].
    """
    if config.compressed_blocks(x.shape[1]) == 0:
        return x[:, :0]
    blocks = blocks_of(config, x) + jnp.swapaxes(phi["pe"], 0, 1)
    match config.compression:
        case Compression.MEAN:
            return blocks.mean(axis=2)
        case Compression.LINEAR:
            return jnp.einsum("bclgd,gldo->bcgo", blocks, phi["w"])
        case Compression.MLP:
            hidden = jax.nn.relu(jnp.einsum("bclgd,gldh->bcgh", blocks, phi["w1"]) + phi["b1"])
            return jnp.einsum("bcgh,gho->bcgo", hidden, phi["w2"]) + phi["b2"]


def blocks_of(config: NativeSparseConfig, x: jax.Array) -> jax.Array:
    """Return the tokens of every complete block: [b, s, g, d] -> [b, c, l, g, d], where l is the position in the block.

    Strides are joined to blocks by slices, whose gradient needs no scatter.

    >>> sizes = {"embed": 8, "groups": 1, "heads_per_group": 1, "key_size": 2, "value_size": 2, "window": 4}
    >>> config = NativeSparseConfig(**sizes, block=4, stride=2, selection_block=4, selected=3)
    >>> blocks_of(config, jnp.arange(8.0).reshape(1, 8, 1, 1))[0, :, :, 0, 0].astype(int).tolist()
    [[0, 1, 2, 3], [2, 3, 4, 5], [4, 5, 6, 7]]
    """
    blocks, per_block = config.compressed_blocks(x.shape[1]), config.strides_per_block
    strides = blocks + per_block - 1
    batch, _, groups, size = x.shape
    by_stride = x[:, : strides * config.stride].reshape(batch, strides, config.stride, groups, size)
    return jnp.concatenate([by_stride[:, first : first + blocks] for first in range(per_block)], axis=2)
