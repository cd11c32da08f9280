"""Collectives and conversions on devices after a read: they exchange rows, and decode codes.

Rows are exchanged by all-to-all and all-gather, nothing else.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.checkpoint.format.header import HALF_BYTES
from shardplan.checkpoint.mapping.views import Shape
from shardplan.checkpoint.transfer.devices.decoding import BoxDecoder
from shardplan.checkpoint.transfer.transfer import ReadStrategy, Transfer

WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint64}
"""Bytes of an element -> integer type in which collectives send it, so that no bit changes, whatever the type."""


@dataclass(frozen=True)
class Decoding:
    """The decoder of an array's codes, and the scales of the codes."""

    decoder: BoxDecoder
    scales: jax.Array


def exchange_rows(
    mesh: Mesh,
    transfer: Transfer,
    rows: Mapping[int, np.ndarray],
    dtype: np.dtype,
    decoding: Decoding | None = None,
) -> dict[int, jax.Array]:
    """Run the collectives of a transfer, if it has any; every process of the mesh must call this at once.

    Args:
        rows: device index -> the rows that the device has read, of shape (rows per device, *row shape).
        dtype: type of the elements of rows; elements of four bits take one byte each.
        decoding: how to decode the elements, if they are codes.

    Returns:
        Device index -> the device's part of the box, on the device, for the devices of this process.
    """
    row_sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    devices = list(mesh.devices.flat)
    words = WORDS[dtype.itemsize]
    parts = [jax.device_put(part.view(words)[None], devices[device]) for device, part in rows.items()]
    shape = (len(devices), *parts[0].shape[1:])
    read = jax.make_array_from_single_device_arrays(shape, row_sharding, parts)
    # of two codes of four bits in a byte XLA would make one byte; each has a byte here
    sent_dtype = np.dtype(np.uint8) if dtype in HALF_BYTES else dtype
    program = (mesh, transfer.strategy, transfer.rows, transfer.placed_shape(mesh.shape), sent_dtype)
    if decoding is None:
        result = _program(*program)(read)
    else:
        start = np.array(transfer.start, np.int32)
        result = _program(*program, decoding.decoder)(read, decoding.scales, start)
    return {shard.index[0].start or 0: shard.data[0] for shard in result.addressable_shards}


@lru_cache(maxsize=256)
def _program(  # type: ignore[no-untyped-def]
    mesh: Mesh,
    strategy: ReadStrategy,
    rows: int,
    result_shape: Shape,
    dtype: np.dtype,
    decoder: BoxDecoder | None = None,
):
    """Build the jitted program: array of (device, rows per device, *row shape) -> (device, *result shape).

    With a decoder it also takes the scales, and the first index of the box in the shard of a device.
    """

    def exchange(read: jax.Array, *scales_and_start: jax.Array) -> jax.Array:
        """Run the collectives on one device's rows: array (1, rows per device, *row shape) -> (1, *result shape)."""
        part = read[0]
        for axis, dimension in strategy.collectives:
            if dimension is None:
                part = lax.all_gather(part, axis, axis=0, tiled=True)
            else:
                split_axis = dimension - strategy.row_rank + 1
                part = lax.all_to_all(part, axis, split_axis=split_axis, concat_axis=0, tiled=True)
        # rows of padding, where the rows do not divide among the devices, are at the end
        elements = lax.bitcast_convert_type(part[:rows].reshape(result_shape), dtype)
        if decoder is not None:
            elements = decoder.decode(elements, *scales_and_start)
        return elements[None]

    row_spec = PartitionSpec(mesh.axis_names)
    in_specs = (row_spec,) if decoder is None else (row_spec, decoder.scale_spec, PartitionSpec())
    return jax.jit(jax.shard_map(exchange, mesh=mesh, in_specs=in_specs, out_specs=row_spec, check_vma=False))
