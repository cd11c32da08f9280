"""Where the shards of one array come to rest: memory that a CPU device adopts, or an accelerator's own."""

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
"""Bytes; XLA adopts host memory aligned like this as a CPU device's buffer without a copy."""


@dataclass(frozen=True)
class Rest:
    """How an array is to rest."""

    shape: Shape
    dtype: np.dtype
    sharding: NamedSharding
    places: Mapping[int, jax.Device]
    """Place on the mesh -> its device, of this process."""
    order: tuple[int, ...]
    """Which of the array's dimensions each dimension of a box is, while it is filled."""

    @property
    def local(self) -> Shape:
        """Shape of a shard."""
        return self.sharding.shard_shape(self.shape)


class Destination(Protocol):
    """The local shards of an array, while they are filled, in boxes with their dimensions in `Rest.order`."""

    def window(self, place: int, start: Shape, shape: Shape) -> np.ndarray | None:
        """The memory of a box of the shard at `place`, to be written to; None where it is not the host's."""

    def put(self, place: int, start: Shape, part: np.ndarray | jax.Array) -> None:
        """Set the box of the shard at `place` that begins at `start`; `part` is not changed afterwards."""

    def settle(self) -> None:
        """Wait until everything that was put is there, and the memory it came in is free."""

    def finish(self) -> jax.Array:
        """The array."""


class HostDestination:
    """Of CPU devices: filled in place, and adopted at the end. Places with the same part share their memory."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        indices = rest.sharding.devices_indices_map(rest.shape)
        self._keys = {place: str(indices[device]) for place, device in rest.places.items()}
        self._buffers = {key: _aligned(rest.local, rest.dtype) for key in set(self._keys.values())}

    def window(self, place: int, start: Shape, shape: Shape) -> np.ndarray:
        """See `Destination.window`."""
        box: Any = (slice(s, s + n) for s, n in zip(start, shape, strict=True))
        shard = self._buffers[self._keys[place]].transpose(self._rest.order)
        window: np.ndarray = shard[(..., *box)]  # with the ellipsis of 0-d arrays too
        return window

    def put(self, place: int, start: Shape, part: np.ndarray | jax.Array) -> None:
        """See `Destination.put`."""
        np.copyto(self.window(place, start, part.shape), np.asarray(part), casting="unsafe")

    def settle(self) -> None:
        """See `Destination.settle`."""

    def finish(self) -> jax.Array:
        """See `Destination.finish`."""
        parts = [
            jax.device_put(self._buffers[self._keys[place]], device) for place, device in self._rest.places.items()
        ]
        return jax.make_array_from_single_device_arrays(self._rest.shape, self._rest.sharding, parts)


class DeviceDestination:
    """Of accelerators: every part is put on its device, and written into the shard there, which is donated for it."""

    def __init__(self, rest: Rest) -> None:
        self._rest = rest
        places = rest.places.items()
        self._shards = {place: jax.numpy.zeros(rest.local, rest.dtype, device=device) for place, device in places}

    def window(self, place: int, start: Shape, shape: Shape) -> None:
        """See `Destination.window`."""

    def put(self, place: int, start: Shape, part: np.ndarray | jax.Array) -> None:
        """See `Destination.put`."""
        moved = jax.device_put(part, self._rest.places[place])
        self._shards[place] = _written(self._shards[place], moved, start, self._rest.order)

    def settle(self) -> None:
        """See `Destination.settle`."""
        jax.block_until_ready(self._shards)

    def finish(self) -> jax.Array:
        """See `Destination.finish`."""
        return jax.make_array_from_single_device_arrays(self._rest.shape, self._rest.sharding, [*self._shards.values()])


@partial(jax.jit, donate_argnums=0, static_argnames="order")
def _written(shard: jax.Array, part: jax.Array, start: Sequence[int], order: tuple[int, ...]) -> jax.Array:
    back = [order.index(d) for d in range(len(order))]
    return lax.dynamic_update_slice(shard, part.astype(shard.dtype).transpose(back), [start[d] for d in back])


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that JAX can adopt for a CPU device without copying."""
    nbytes = math.prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
