"""Chooses the blocks that each query attends to, by their importance. Paper: section 3.3.2, equations 11 and 12.

The initial and local blocks are forced; the rest are those with the largest importance, exactly, and of equal ones the
first. The choice is discrete: no gradient flows through it, and the compressed branch trains the scores.
"""

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig

UNUSED = -1
"""Index in place of a block, if a query has fewer earlier blocks than it may select."""


def select(config: NativeSparseConfig, importance: jax.Array, positions: jax.Array) -> jax.Array:
    """Return the blocks that each query selects: the forced blocks, then the blocks of greatest importance.

    >>> config = NativeSparseConfig(8, 1, 1, 2, 2, block=4, stride=4, selection_block=4, selected=3, window=4, local=1)
    >>> select(config, jnp.array([[[[0.0, 0.5, 0.5, 0.0]], [[9.0, 9.0, 9.0, 9.0]]]]), jnp.array([15, 4])).tolist()
    [[[[0, 1, 3]], [[0, 1, -1]]]]

    Args:
        importance: float32[b, t, g, j].
        positions: int[t], of the queries.

    Returns:
        int32[b, t, g, n], ascending, with `UNUSED` at the end where a query has fewer than n blocks up to its own.
    """
    count = importance.shape[-1]
    blocks, of_queries = jnp.arange(count), positions[:, None]
    is_after = blocks > of_queries // config.selection_block
    is_forced = config.selection.is_forced(blocks, of_queries)
    ranked = jnp.where(is_forced[:, None], jnp.inf, jax.lax.stop_gradient(importance))
    ranked = jnp.where(is_after[:, None], -jnp.inf, ranked)
    scores, chosen = jax.lax.top_k(ranked, min(config.selected, count))
    ascending = jnp.sort(jnp.where(scores == -jnp.inf, count, chosen), axis=-1)
    used = jnp.where(ascending == count, UNUSED, ascending).astype(jnp.int32)
    # a short sequence has fewer blocks than queries may select
    missing = config.selected - used.shape[-1]
    return jnp.pad(used, [(0, 0), (0, 0), (0, 0), (0, missing)], constant_values=UNUSED)
