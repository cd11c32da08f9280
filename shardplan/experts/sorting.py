"""Sorts the rows of tokens by expert: row `t * k + i` is token `t` for its i-th expert."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class RowOrder(NamedTuple):
    """An order of rows, sorted by expert; rows for experts of other devices come last."""

    rows: Array
    """Index of each row, int32[tokens * k]."""
    sizes: Array
    """Number of rows of each expert, int32[experts]."""


class RowWindow(NamedTuple):
    """Consecutive rows of a `RowOrder`, of a fixed size."""

    rows: Array
    """Index of each row, int32[size]."""
    is_used: Array
    """Whether each row is for one of the experts, bool[size]."""
    sizes: Array
    """Number of rows of each expert within the window, int32[experts]."""


def sort_by_expert(chosen: Array, first: int | Array, experts: int) -> RowOrder:
    """Sort the rows of tokens by expert.

    >>> order = sort_by_expert(jnp.array([[1, 0], [0, 3]]), first=0, experts=2)
    >>> order.rows.tolist(), order.sizes.tolist()
    ([1, 2, 0, 3], [2, 1])

    Args:
        chosen: int32[tokens, k], the experts of each token.
        first: index of the device's first expert; rows for experts of other devices come last.
        experts: number of experts on the device.
    """
    local = chosen.reshape(-1).astype(jnp.int32) - first
    local = jnp.where((local >= 0) & (local < experts), local, experts)
    sorted_experts, rows = jax.lax.sort_key_val(local, jnp.arange(local.size, dtype=jnp.int32), is_stable=True)
    # a binary search is a loop of gathers, which takes a hundred times as long on a TPU
    ends = jnp.searchsorted(sorted_experts, jnp.arange(experts), side="right", method="compare_all")
    return RowOrder(rows, jnp.diff(ends.astype(jnp.int32), prepend=0))


def take_window(order: RowOrder, start: int | Array, size: int) -> RowWindow:
    """Return `size` rows of `order` from `start` on; unused rows may have the index of any row.

    >>> order = RowOrder(jnp.array([1, 2, 0, 3]), jnp.array([2, 1]))
    >>> window = take_window(order, start=1, size=2)
    >>> window.rows.tolist(), window.sizes.tolist()
    ([2, 0], [1, 1])
    """
    padded = jnp.pad(order.rows, (0, size))
    rows = jax.lax.dynamic_slice(padded, (start,), (size,))
    return RowWindow(rows, start + jnp.arange(size) < order.sizes.sum(), window_sizes(order.sizes, start, size))


def window_sizes(sizes: Array, start: int | Array, size: int) -> Array:
    """Return how many rows of each consecutive segment are in a window, int32 of the shape of `sizes`.

    >>> window_sizes(jnp.array([2, 3, 1]), start=1, size=3).tolist()
    [1, 2, 0]

    Args:
        sizes: int32[..., segments], whose segments follow each other along the last dimension.
        start: the first row of the window.
        size: the rows of the window.
    """
    ends = jnp.cumsum(sizes, axis=-1)
    return jnp.clip(jnp.minimum(ends, start + size) - jnp.maximum(ends - sizes, start), 0).astype(jnp.int32)
