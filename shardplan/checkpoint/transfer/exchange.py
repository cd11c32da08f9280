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
from shardplan.checkpoint.transfer.transfer import ReadStrategy, Transfer

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
"""Bytes of an element -> the integer type that it is sent as: so no collective changes a bit, whatever the type."""


def exchange_rows(
    mesh: Mesh, transfer: Transfer, rows: Mapping[int, np.ndarray], dtype: np.dtype
) -> dict[int, jax.Array]:
    """Run the collectives of a transfer; every process of the mesh calls this at once.

    Args:
        rows: device index -> the rows that the device has read, of shape (rows per device, *row shape).

    Returns:
        Device index -> its part of the box, on the device; those of this process.
    """
    row_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    devices = list(mesh.devices.flat)
    words = WORDS[dtype.itemsize]
    parts = [jax.device_put(part.view(words)[None], devices[device]) for device, part in rows.items()]
    shape = (len(devices), *parts[0].shape[1:])
    read = jax.make_array_from_single_device_arrays(shape, row_sharding, parts)
    result = _program(mesh, transfer.strategy, transfer.rows, _result_shape(transfer, mesh), dtype)(read)
    return {shard.index[0].start or 0: shard.data[0] for shard in result.addressable_shards}


def _result_shape(transfer: Transfer, mesh: Mesh) -> Shape:
    """Return the shape of a device's part of the box after the exchange."""
    parts = {d: math.prod(mesh.shape[axis] for axis in axes) for d, axes in transfer.strategy.all_to_all}
    return tuple(n // parts.get(d, 1) for d, n in enumerate(transfer.shape))


@lru_cache(maxsize=256)
def _program(  # type: ignore[no-untyped-def]
    mesh: Mesh, strategy: ReadStrategy, rows: int, result_shape: Shape, dtype: np.dtype
):
    """Build the jitted exchange: array of (device, rows per device, *row shape) -> (device, *result shape)."""

    def exchange(read: jax.Array) -> jax.Array:
        """Run the collectives on one device's rows: array (1, rows per device, *row shape) -> (1, *result shape)."""
        part = read[0]
        for axis, dimension in strategy.collectives:
            if dimension is None:
                part = lax.all_gather(part, axis, axis=0, tiled=True)
            else:
                split_axis = dimension - strategy.row_rank + 1
                part = lax.all_to_all(part, axis, split_axis=split_axis, concat_axis=0, tiled=True)
        # rows of padding, where the rows do not divide among the devices, are at the end
        return lax.bitcast_convert_type(part[:rows].reshape(1, *result_shape), dtype)

    row_spec = PartitionSpec(mesh.axis_names)
    return jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=row_spec, out_specs=row_spec, check_vma=False))
