"""The exchange over the interconnect after devices have read rows of a box: all-to-all and all-gather, nothing else."""

import math
from collections.abc import Mapping
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.checkpoint.mapping.views import Shape
from shardplan.checkpoint.transfer.schedule import Sharing, Transfer

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
"""Bytes of an element -> what it travels as: no collective changes a bit, whatever the type."""


def exchange(mesh: Mesh, transfer: Transfer, rows: Mapping[int, np.ndarray], dtype: np.dtype) -> dict[int, jax.Array]:
    """What every local device has of a box after the exchange; every process of the mesh calls this at once.

    Args:
        rows: place on the mesh -> the rows that its device has read, of shape (rows each, *row).

    Returns:
        Place on the mesh -> its part of the box, of shape `placed_shape`, on its device.
    """
    everywhere = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    devices = list(mesh.devices.flat)
    words = WORDS[dtype.itemsize]
    parts = [jax.device_put(part.view(words)[None], devices[place]) for place, part in rows.items()]
    shape = (len(devices), *parts[0].shape[1:])
    read = jax.make_array_from_single_device_arrays(shape, everywhere, parts)
    placed = placed_shape(transfer, dict(mesh.shape))
    found = _program(mesh, transfer.sharing, transfer.rows, placed, dtype)(read)
    return {shard.index[0].start or 0: shard.data[0] for shard in found.addressable_shards}


def placed_shape(transfer: Transfer, sizes: Mapping[str, int]) -> Shape:
    """What one device has of the box once it is where it will rest."""
    parts = {d: math.prod(sizes[axis] for axis in axes) for d, axes in transfer.sharing.moved}
    return tuple(n // parts.get(d, 1) for d, n in enumerate(transfer.shape))


@lru_cache(maxsize=256)
def _program(mesh: Mesh, sharing: Sharing, rows: int, placed: Shape, dtype: np.dtype):  # type: ignore[no-untyped-def]
    """Array of (device, rows each, *row) -> (device, *placed)."""

    def exchanged(read: jax.Array) -> jax.Array:
        found = read[0]
        for axis, dimension in sharing.steps:
            if dimension is None:
                found = lax.all_gather(found, axis, axis=0, tiled=True)
            else:
                cut = dimension - sharing.first_moved + 1
                found = lax.all_to_all(found, axis, split_axis=cut, concat_axis=0, tiled=True)
        # rows that no device had to read are at the end
        return lax.bitcast_convert_type(found[:rows].reshape(1, *placed), dtype)

    everywhere = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(exchanged, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False))
