"""The collectives of Native Sparse Attention between devices that share the positions of a sequence.

Every device computes for its own queries. It receives the tokens just before its parts (the halo of windows) and just
after them (the halo of compressed blocks), and gathers what queries may need of the whole sequence. The collectives run
inside `jax.shard_map`; one device that has the whole sequence needs none. Gradients flow back by their transposes.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.runtime.permute import permute


@dataclass(frozen=True)
class PositionShards:
    """The parts of a sequence that this device has, and the collectives that give it rows of other parts.

    With mesh axes, methods run inside `jax.shard_map`. Their arrays [b, t, ...] belong to one device, and t runs
    through its parts in order.
    """

    parts: PositionParts
    mesh_axes: tuple[str, ...] = ()
    """Mesh axes that shard positions, major to minor."""

    def firsts(self) -> jax.Array:
        """Return the first position of each part of this device, int32[part]."""
        return jnp.asarray(self.parts.by_device, jnp.int32)[self._device()] * self.parts.part_length

    def positions(self) -> jax.Array:
        """Return the positions of this device, int32[t]."""
        return (self.firsts()[:, None] + jnp.arange(self.parts.part_length)).reshape(-1)

    def split(self, x: jax.Array) -> list[jax.Array]:
        """Split an array of this device into its parts of the sequence."""
        return jnp.split(x, self.parts.parts_per_device, axis=1)

    def with_previous(self, x: jax.Array, rows: int) -> list[jax.Array]:
        """Return each part of `x` with the `rows` rows before it; zeros before the start of the sequence."""
        parts = self.split(x)
        extended = [[part] for part in parts]
        for distance, count in enumerate(self.parts.halo_hops(rows), start=1):
            sent = [part[:, part.shape[1] - count :] for part in parts]
            for pieces, received in zip(extended, self._receive(sent, distance), strict=True):
                pieces.insert(0, received)
        return [jnp.concatenate(pieces, axis=1) for pieces in extended]

    def with_next(self, x: jax.Array, rows: int) -> list[jax.Array]:
        """Return each part of `x` with `rows` rows of the next part; zeros after the end of the sequence."""
        parts = self.split(x)
        if rows == 0:
            return parts
        received = self._receive([part[:, :rows] for part in parts], -1)
        return [jnp.concatenate(pieces, axis=1) for pieces in zip(parts, received, strict=True)]

    def with_next_rows(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the positions int32[.] and rows [b, ., ...] of this device, each part extended by the row after it.

        The row after the end of the sequence has the position -1.
        """
        after = self.firsts() + self.parts.part_length
        after = jnp.where(after < self.parts.length, after, -1)
        own = self.positions().reshape(len(after), -1)
        positions = jnp.concatenate([own, after[:, None]], axis=1)
        return positions.reshape(-1), jnp.concatenate(self.with_next(x, 1), axis=1)

    def gather(self, x: jax.Array) -> jax.Array:
        """Return the rows of all devices in the order of the sequence, in float32.

        The all-gather is in the dtype of `x`, and the reduce-scatter of gradients in float32, because the error of a
        bfloat16 sum grows with the number of its terms.
        """
        if not self.mesh_axes:
            return x.astype(jnp.float32)
        gathered = _gather_float32(x, self.mesh_axes, x.dtype)
        if self.parts.parts_per_device == 1:
            return gathered
        # zigzag: the second parts of devices are in reverse order
        rows = x.shape[1] // 2
        by_part = gathered.reshape(x.shape[0], self.parts.devices, 2, rows, *x.shape[2:])
        in_order = jnp.concatenate([by_part[:, :, 0], jnp.flip(by_part[:, :, 1], axis=1)], axis=1)
        return in_order.reshape(gathered.shape)

    def _device(self) -> jax.Array:
        return jax.lax.axis_index(self.mesh_axes) if self.mesh_axes else jnp.int32(0)

    def _receive(self, parts: Sequence[jax.Array], distance: int) -> list[jax.Array]:
        """Receive the part `distance` parts before each part of this device; zeros before the start of the sequence."""
        received = [jnp.zeros_like(part) for part in parts]
        for transfer in self.parts.transfers(distance):
            sent = parts[transfer.source_part]
            if transfer.pairs:
                received[transfer.target_part] += permute(sent, self.mesh_axes, transfer.pairs)
            if transfer.local:
                is_local = jnp.isin(self._device(), jnp.array(transfer.local))
                received[transfer.target_part] += jnp.where(is_local, sent, jnp.zeros_like(sent))
        return received


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather_float32(x: jax.Array, axes: tuple[str, ...], dtype: Any) -> jax.Array:
    """Concatenate [b, t, ...] of all devices along t, converted to float32.

    Args:
        dtype: the dtype of `x`, to which its gradient is converted.
    """
    return jax.lax.all_gather(x, axes, axis=1, tiled=True).astype(jnp.float32)


def _gather_forward(x: jax.Array, axes: tuple[str, ...], dtype: Any) -> tuple[jax.Array, None]:
    return _gather_float32(x, axes, dtype), None


def _gather_backward(axes: tuple[str, ...], dtype: Any, _: None, gradient: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(gradient, axes, scatter_dimension=1, tiled=True).astype(dtype),)


_gather_float32.defvjp(_gather_forward, _gather_backward)
