"""Attention to each query's window: the last tokens, its own included. Paper: section 3.3.3.

A chunk of queries attends to its own keys and to those of the window before it. Where positions are sharded, those are
the device's own keys and a halo of window - 1 tokens.
"""

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.branches.masked_softmax import masked_softmax
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import map_query_chunks
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig


def _attend_to_window(
    config: NativeSparseConfig,
    positions: jax.Array,
    queries: jax.Array,
    key_positions: jax.Array,
    keys: jax.Array,
    values: jax.Array,
) -> jax.Array:
    """Attend to the tokens t - window + 1 .. t for a query at t.

    Args:
        positions: int[t], of the queries.
        queries: [b, t, g, r, d].
        key_positions: int[s], of the keys; negative for padding.
        keys: [b, s, g, d], all that queries see, in any order.
        values: [b, s, g, d].

    Returns:
        [b, t, g, r, d].
    """
    is_before = key_positions <= positions[:, None]
    is_visible = is_before & (key_positions > positions[:, None] - config.window) & (key_positions >= 0)
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    scores = jnp.einsum("btgrd,bsgd->btgrs", queries, keys, preferred_element_type=jnp.float32) * config.scale
    weights = masked_softmax(scores, is_visible[:, None, None])
    return jnp.einsum("btgrs,bsgd->btgrd", weights.astype(values.dtype), values)


def attend_to_windows(
    config: NativeSparseConfig,
    first: jax.Array,
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    queries_per_chunk: int,
) -> jax.Array:
    """Attend to the windows of neighbouring queries, a chunk of queries at a time.

    Scores per chunk = queries_per_chunk * (queries_per_chunk + window - 1), whatever the length of the sequence is.

    Args:
        first: int[], the position of the first query.
        queries: [b, t, g, r, d], in order.
        keys: [b, halo + t, g, d]: first the halo, the tokens before the first query that windows reach, then the tokens
            of the queries. Tokens before the start of the sequence are padding.
        values: [b, halo + t, g, d].

    Returns:
        [b, t, g, r, d].
    """
    count = queries.shape[1]
    size, halo = min(queries_per_chunk, count), keys.shape[1] - count
    # a chunk of padding at the end, because the slice of the last chunk may begin late
    padding = [(0, 0), (0, size), (0, 0), (0, 0)]
    padded_keys, padded_values = jnp.pad(keys, padding), jnp.pad(values, padding)

    def attend_chunk(positions: jax.Array, chunk: jax.Array) -> jax.Array:
        start = positions[0] - first
        near = (jax.lax.dynamic_slice_in_dim(x, start, size + halo, 1) for x in (padded_keys, padded_values))
        return _attend_to_window(config, positions, chunk, positions[0] - halo + jnp.arange(size + halo), *near)

    return map_query_chunks(attend_chunk, queries_per_chunk, first + jnp.arange(count), queries)
