"""Ulysses: devices that have a part of the sequence of all heads exchange it for all of the sequence of some heads.

Inside `jax.shard_map`; DeepSpeed-Ulysses, https://arxiv.org/abs/2309.14509. Who gets which heads is in
`shardplan.positions.heads`.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from shardplan.positions.heads import HeadCut


@dataclass(frozen=True)
class Exchange(HeadCut):
    """An all-to-all between heads and positions, of groups of neighbours."""

    axes: tuple[str, ...]
    """Mesh axes that cut the sequence, major to minor."""
    groups: int
    """Groups along `axes`."""

    def place(self) -> Array:
        """Which of its group this device is."""
        return jax.lax.axis_index(self.axes) % self.degree

    def to_heads(self, x: Array) -> Array:
        """x[B, degree x heads, S, ...] -> [B, heads, degree x S, ...], of a device's heads."""
        return self._all_to_all(x, 1, 2)

    def to_positions(self, x: Array) -> Array:
        """The inverse of `to_heads`."""
        return self._all_to_all(x, 2, 1)

    def gathered(self, x: Array, axis: int) -> Array:
        """What the devices of a group have along `axis`, one after the other."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True, axis_index_groups=self._members)

    def queries(self, q: Array) -> Array:
        """q[B, N, G, S, ...] -> [B, N', G', degree x S, ...]."""
        b, n, g, *rest = q.shape
        heads = q.reshape(b, n * g, *rest)
        spare = self.degree * self.slots - n * g
        found = self.to_heads(jnp.pad(heads, [(0, 0), (0, spare), *[(0, 0)] * len(rest)]))
        return found.reshape(b, self.key_heads_there, -1, *found.shape[2:])

    def keys(self, k: Array) -> Array:
        """k[B, N, S, ...] -> [B, N', degree x S, ...], a key head for each N' of `queries`."""
        if self.is_even:
            return self.to_heads(k)
        found = self.to_heads(_copied(k, jnp.asarray(self.sent.reshape(-1))))
        if self.key_heads_there == 1:
            return found
        # several query heads that are not groups of one size: a key head for each
        index = np.stack([np.searchsorted(got, want) for got, want in zip(self._distinct, self.needed, strict=True)])
        return _copied(found, jnp.asarray(index)[self.place()])

    def keys_gradient(self, gradient: Array, dtype: Any) -> Array:
        """What `keys` gets of the gradient of its result; of several copies in that one's type, then as `dtype`."""
        b, _, s, *rest = gradient.shape
        gradient = gradient.astype(dtype) if self.is_even else gradient
        like = jnp.zeros((b, self.key_heads, s // self.degree, *rest), gradient.dtype)
        (found,) = jax.vjp(self.keys, like)[1](gradient)
        return found.astype(dtype)

    def outputs(self, out: Array, dtype: Any) -> Array:
        """out[B, N', G', degree x S, ...] -> [B, N, G, S, ...], sent as `dtype`."""
        b, n, g, *rest = out.shape
        found = self.to_positions(out.astype(dtype).reshape(b, n * g, *rest))[:, : self.key_heads * self.per_key_head]
        return found.reshape(b, self.key_heads, self.per_key_head, *found.shape[2:])

    @cached_property
    def _distinct(self) -> list[np.ndarray]:
        return [np.unique(row) for row in self.sent]

    @property
    def _members(self) -> list[list[int]] | None:
        if self.groups == 1:
            return None
        return np.arange(self.groups * self.degree).reshape(self.groups, -1).tolist()

    def _all_to_all(self, x: Array, split: int, concat: int) -> Array:
        return jax.lax.all_to_all(x, self.axes, split, concat, tiled=True, axis_index_groups=self._members)


@jax.custom_vjp
def _copied(x: Array, index: Array) -> Array:
    """x[B, N, ...] -> [B, index, ...]; what comes back for several copies of a head is added up in float32."""
    return jnp.take(x, index, axis=1)


def _copied_forward(x: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return _copied(x, index), (x, index)


def _copied_backward(kept: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    x, index = kept
    return jnp.zeros(x.shape, jnp.float32).at[:, index].add(gradient.astype(jnp.float32)).astype(x.dtype), None


_copied.defvjp(_copied_forward, _copied_backward)
