"""The mesh axes that shard an axis of a model while a program is traced."""

import jax
from haliax import Axis
from haliax.partitioning import physical_axis_name
from haliax.util import ensure_tuple


def mesh_axes_of(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes that shard an axis under the active axis mapping, without mesh axes of size 1.

    >>> import haliax as hax
    >>> mesh = jax.sharding.AbstractMesh((1, 2, 4), ("replica", "data", "model"))
    >>> with jax.sharding.use_abstract_mesh(mesh), hax.axis_mapping({"batch": ("replica", "data")}):
    ...     mesh_axes_of(Axis("batch", 8))
    ('data',)
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in ensure_tuple(physical_axis_name(axis) or ()) if shape.get(name, 1) > 1)
