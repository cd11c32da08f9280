"""The window branch by kernels: converts arrays to tiles and back, and chooses the kernels of the gradients.

They are kernels of their own, and not JAX's splash attention with a local mask, because of three properties of splash
(docs/log.md has figures): it computes each head of queries by itself, so that its blocks have to be 512 queries and
512 keys for speed, of which windows of 512 tokens leave half masked; it writes the log-sum-exp of rows 128 lanes wide,
which is more memory than its output; and it reads queries in another order than the other branches.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.window.backward import (
    window_key_value_gradients,
    window_query_gradients,
)
from shardplan.decoder.parts.attention.sparse.kernels.window.forward import attend_window_tiles
from shardplan.decoder.parts.attention.sparse.kernels.window.tiles import WindowTiles


class WindowResiduals(NamedTuple):
    """Values that the forward pass keeps for the backward pass."""

    first: jax.Array
    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    output: jax.Array
    """Output of the branch, [tile, row, d]."""
    log_sums: jax.Array
    """Log-sum-exp of each row's scores, float32[tile, 1, row]."""


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_to_windows_by_kernel(
    config: NativeSparseConfig, first: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> jax.Array:
    """Attend to the windows of neighbouring queries.

    Args:
        first: int[], the position of the first query.
        queries: [b, t, g, r, d], in order.
        keys: [b, halo + t, g, d]: first the halo, the tokens before the first query that windows reach, then the tokens
            of the queries. Tokens before the start of the sequence are padding.
        values: [b, halo + t, g, d].

    Returns:
        [b, t, g, r, d].
    """
    return _forward(config, first, queries, keys, values)[0]


def _forward(
    config: NativeSparseConfig, first: jax.Array, queries: jax.Array, keys: jax.Array, values: jax.Array
) -> tuple[jax.Array, WindowResiduals]:
    sizes = WindowTiles.of(config, queries.shape[1])
    padded = (sizes.pad_keys(x.astype(queries.dtype)) for x in (keys, values))
    output, log_sums = attend_window_tiles(sizes, _as_array(first), sizes.split(queries), *padded)
    return sizes.join(output, len(queries)), WindowResiduals(first, queries, keys, values, output, log_sums)


def _backward(
    config: NativeSparseConfig, residuals: WindowResiduals, gradient: jax.Array
) -> tuple[None, jax.Array, jax.Array, jax.Array]:
    first, queries, keys, values, output, log_sums = residuals
    sizes = WindowTiles.of(config, queries.shape[1])
    of_output = sizes.split(gradient.astype(queries.dtype))
    delta = (output.astype(jnp.float32) * of_output.astype(jnp.float32)).sum(axis=-1)[:, None]
    arrays = (
        _as_array(first),
        sizes.split(queries),
        *(sizes.pad_keys(x.astype(queries.dtype)) for x in (keys, values)),
        of_output,
        jnp.concatenate([log_sums, delta], axis=1),
    )
    dq = window_query_gradients(sizes, *arrays)
    dk, dv = window_key_value_gradients(sizes, *arrays)
    return None, sizes.join(dq, len(queries)), sizes.unpad_keys(dk, keys), sizes.unpad_keys(dv, values)


attend_to_windows_by_kernel.defvjp(_forward, _backward)


def _as_array(first: jax.Array) -> jax.Array:
    return jnp.asarray(first, jnp.int32)[None]
