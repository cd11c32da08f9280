"""`jax.lax.ppermute` between devices that are numbered along mesh axes in any order."""

import math
from collections.abc import Iterable

import jax
import numpy as np


def permute(x: jax.Array, axes: tuple[str, ...], pairs: Iterable[tuple[int, int]]) -> jax.Array:
    """Send an array between devices; the result is 0 on devices that receive nothing. Runs inside `jax.shard_map`.

    Args:
        axes: mesh axes, major to minor, by which devices are numbered as `jax.lax.axis_index(axes)` does.
        pairs: (sending device, receiving device) of each transfer.
    """
    # ppermute numbers devices in the mesh's order of axes, in whatever order its axes are named
    mesh = jax.sharding.get_abstract_mesh()
    mesh_order = sorted(axes, key=mesh.axis_names.index)
    sizes = [mesh.shape[axis] for axis in mesh_order]
    numbers = np.arange(math.prod(sizes)).reshape(sizes)
    devices = numbers.transpose([mesh_order.index(axis) for axis in axes]).reshape(-1).tolist()
    result: jax.Array = jax.lax.ppermute(x, tuple(mesh_order), [(devices[i], devices[j]) for i, j in pairs])
    return result
