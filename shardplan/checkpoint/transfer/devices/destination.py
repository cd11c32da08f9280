"""The local shards of an array while they are filled: host memory that CPU devices adopt, or accelerator memory."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from shardplan.checkpoint.mapping.views import Shape

ALIGNMENT = 64
"""Alignment, in bytes, of host memory that XLA adopts as a CPU device's buffer without a copy."""


@dataclass(frozen=True)
class ArrayPlacement:
    """The shape, type and sharding that an array is loaded into."""

    shape: Shape
    dtype: np.dtype
    sharding: NamedSharding
    devices: Mapping[int, jax.Device]
    """Device index in the mesh -> device, for the devices of this process."""
    order: tuple[int, ...]
    """Dimension of the array for each dimension of the boxes that fill it."""

    @property
    def shard_shape(self) -> Shape:
        """Shape of a shard."""
        return self.sharding.shard_shape(self.shape)


class Destination(Protocol):
    """The local shards of an array while they are filled with boxes whose dimensions are in `ArrayPlacement.order`."""

    def put(self, device: int, start: Shape, part: np.ndarray | jax.Array) -> None:
        """Write `part` to the box of a device's shard that begins at `start`; `part` must not change afterwards."""

    def wait(self) -> None:
        """Wait until all parts are written and the memory that held them can be reused."""

    def finish(self) -> jax.Array:
        """Return the array."""


class HostDestination:
    """Shards of CPU devices: filled in place and adopted at the end; devices with equal shards share their memory."""

    def __init__(self, placement: ArrayPlacement) -> None:
        self._placement = placement
        indices = placement.sharding.devices_indices_map(placement.shape)
        self._keys = {index: str(indices[device]) for index, device in placement.devices.items()}
        shape, dtype = placement.shard_shape, placement.dtype
        self._buffers = {key: _allocate_aligned(shape, dtype) for key in set(self._keys.values())}

    def window(self, device: int, start: Shape, shape: Shape) -> np.ndarray:
        """Return the memory of a box of a device's shard, for the caller to write to."""
        box: Any = (slice(s, s + n) for s, n in zip(start, shape, strict=True))
        shard = self._buffers[self._keys[device]].transpose(self._placement.order)
        window: np.ndarray = shard[(..., *box)]  # the ellipsis makes a 0-d array give a view, not a scalar
        return window

    def put(self, device: int, start: Shape, part: np.ndarray | jax.Array) -> None:
        """See `Destination.put`."""
        np.copyto(self.window(device, start, part.shape), np.asarray(part), casting="unsafe")

    def wait(self) -> None:
        """See `Destination.wait`."""

    def finish(self) -> jax.Array:
        """See `Destination.finish`."""
        placement = self._placement
        shards = [
            jax.device_put(self._buffers[self._keys[index]], device) for index, device in placement.devices.items()
        ]
        return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, shards)


class DeviceDestination:
    """Writes shards on accelerators: each part is copied to its device and into the donated shard there."""

    def __init__(self, placement: ArrayPlacement) -> None:
        self._placement = placement
        shape, dtype = placement.shard_shape, placement.dtype
        self._shards = {
            index: jax.numpy.zeros(shape, dtype, device=device) for index, device in placement.devices.items()
        }

    def put(self, device: int, start: Shape, part: np.ndarray | jax.Array) -> None:
        """See `Destination.put`."""
        on_device = jax.device_put(part, self._placement.devices[device])
        self._shards[device] = _write_box(self._shards[device], on_device, start, self._placement.order)

    def wait(self) -> None:
        """See `Destination.wait`."""
        jax.block_until_ready(self._shards)

    def finish(self) -> jax.Array:
        """See `Destination.finish`."""
        placement = self._placement
        return jax.make_array_from_single_device_arrays(placement.shape, placement.sharding, [*self._shards.values()])


@partial(jax.jit, donate_argnums=0, static_argnames="order")
def _write_box(shard: jax.Array, part: jax.Array, start: Sequence[int], order: tuple[int, ...]) -> jax.Array:
    inverse = [order.index(d) for d in range(len(order))]
    return lax.dynamic_update_slice(shard, part.astype(shard.dtype).transpose(inverse), [start[d] for d in inverse])


def _allocate_aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Allocate uninitialised memory that JAX can adopt for a CPU device without copying."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
