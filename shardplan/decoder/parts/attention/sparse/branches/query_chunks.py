"""Computes attention one chunk of queries at a time, which bounds the memory of scores and gathered keys."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

QUERIES_PER_CHUNK = 256
"""Default number of queries whose scores or gathered keys are in memory at a time."""


def map_query_chunks[Result](
    function: Callable[..., Result], queries_per_chunk: int, positions: jax.Array, *arrays: jax.Array
) -> Result:
    """Return `function(positions, *arrays)`, computed in chunks of queries.

    A chunk is computed again for gradients, so that its scores are not kept. If all queries are one chunk, the function
    is called once, with its scores kept.

    Args:
        function: computes each query on its own, from positions int[t] and arrays [b, t, ...]; its result is an array
            [b, t, ...], or a tree of them.
        positions: int[t].
        arrays: [b, t, ...].
    """
    count = len(positions)
    if count <= queries_per_chunk:
        return function(positions, *arrays)
    chunks = -(-count // queries_per_chunk)
    # padding is queries at position 0, whose results are dropped
    missing = chunks * queries_per_chunk - count

    def split(x: jax.Array) -> jax.Array:
        """Split into chunks: [b, t, ...] -> [chunk, b, t of the chunk, ...]."""
        padded = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return jnp.moveaxis(padded.reshape(x.shape[0], chunks, queries_per_chunk, *x.shape[2:]), 1, 0)

    def join(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x, 0, 1).reshape(x.shape[1], chunks * queries_per_chunk, *x.shape[3:])[:, :count]

    by_chunk = jnp.pad(positions, (0, missing)).reshape(chunks, queries_per_chunk)
    # common subexpressions of a loop's forward and backward pass cannot be merged, so that no barrier is needed
    compute = jax.checkpoint(lambda inputs: function(*inputs), prevent_cse=False)
    results: Result = jax.tree.map(join, jax.lax.map(compute, (by_chunk, *map(split, arrays))))
    return results
