"""The Ulysses strategy: an all-to-all gives each device all positions of some heads; another one undoes it.

Runs inside `jax.shard_map`; DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509. `shardplan.positions.heads` says which
device gets which heads.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from shardplan.positions.heads import HeadSharding


@dataclass(frozen=True)
class UlyssesExchange(HeadSharding):
    """The all-to-alls between heads and positions within groups of `degree` neighbouring devices.

    Below, N' and G' are the key heads of a device after the exchange, and the query heads of each.
    """

    axes: tuple[str, ...]
    """Mesh axes that shard the sequence, major to minor."""
    groups: int
    """Number of groups of devices along `axes`."""

    def all_gather(self, x: Array, axis: int) -> Array:
        """Concatenate the shards of the devices of a group along `axis`."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True, axis_index_groups=self._group_members)

    def reshard_queries(self, q: Array) -> Array:
        """Exchange queries, with padding heads: q[B, N, G, S, ...] -> [B, N', G', degree x S, ...]."""
        b, n, g, *rest = q.shape
        heads = q.reshape(b, n * g, *rest)
        padding = self.degree * self.query_heads_per_device - n * g
        result = self._to_heads(jnp.pad(heads, [(0, 0), (0, padding), *[(0, 0)] * len(rest)]))
        return result.reshape(b, self.key_heads_after_duplication, -1, *result.shape[2:])

    def reshard_keys(self, k: Array) -> Array:
        """Exchange keys or values: k[B, N, S, ...] -> [B, N', degree x S, ...], with the N' of `reshard_queries`."""
        if self.is_even:
            return self._to_heads(k)
        result = self._to_heads(_take_heads(k, jnp.asarray(self.key_heads_received.reshape(-1))))
        if self.key_heads_after_duplication == 1:
            return result
        # a device's query heads do not form groups of one size: each gets a key head of its own
        heads = zip(self.key_heads_received, self.key_head_of_query, strict=True)
        index = np.stack([np.searchsorted(np.unique(received), used) for received, used in heads])
        return _take_heads(result, jnp.asarray(index)[self._index_in_group()])

    def reshard_keys_gradient(self, gradient: Array, dtype: Any) -> Array:
        """Transpose `reshard_keys` and cast to `dtype`; gradients of copies are added in the dtype of `gradient`."""
        b, _, s, *rest = gradient.shape
        gradient = gradient.astype(dtype) if self.is_even else gradient
        like = jnp.zeros((b, self.key_heads, s // self.degree, *rest), gradient.dtype)
        (result,) = jax.vjp(self.reshard_keys, like)[1](gradient)
        return result.astype(dtype)

    def reshard_outputs(self, out: Array, dtype: Any) -> Array:
        """Exchange outputs back, as `dtype`: out[B, N', G', degree x S, ...] -> [B, N, G, S, ...]."""
        b, n, g, *rest = out.shape
        result = self._to_positions(out.astype(dtype).reshape(b, n * g, *rest))
        result = result[:, : self.key_heads * self.queries_per_key_head]
        return result.reshape(b, self.key_heads, self.queries_per_key_head, *result.shape[2:])

    def _to_heads(self, x: Array) -> Array:
        """Exchange heads for positions: x[B, degree x heads, S, ...] -> [B, heads, degree x S, ...]."""
        return self._all_to_all(x, 1, 2)

    def _to_positions(self, x: Array) -> Array:
        """Exchange positions for heads, the inverse of `_to_heads`."""
        return self._all_to_all(x, 2, 1)

    def _all_to_all(self, x: Array, split: int, concat: int) -> Array:
        return jax.lax.all_to_all(x, self.axes, split, concat, tiled=True, axis_index_groups=self._group_members)

    def _index_in_group(self) -> Array:
        return jax.lax.axis_index(self.axes) % self.degree

    @cached_property
    def _group_members(self) -> list[list[int]] | None:
        """Return the device indices along `axes` of each group; None if all devices are one group."""
        if self.groups == 1:
            return None
        return np.arange(self.groups * self.degree).reshape(self.groups, -1).tolist()


@jax.custom_vjp
def _take_heads(x: Array, index: Array) -> Array:
    """Take heads: x[B, N, ...] -> [B, index, ...]; gradients of several copies of a head are added in float32."""
    return jnp.take(x, index, axis=1)


def _take_heads_forward(x: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return _take_heads(x, index), (x, index)


def _take_heads_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    x, index = residuals
    return jnp.zeros(x.shape, jnp.float32).at[:, index].add(gradient.astype(jnp.float32)).astype(x.dtype), None


_take_heads.defvjp(_take_heads_forward, _take_heads_backward)
