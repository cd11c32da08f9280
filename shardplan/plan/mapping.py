"""Arithmetic of mappings: logical axes to tuples of mesh axes, and the shards that follow. Pure."""

import math
from collections.abc import Iterable, Mapping

MeshAxes = tuple[str, ...]
"""Mesh axes, major to minor."""
AxisMapping = Mapping[str, MeshAxes]
"""Logical axis -> mesh axes; an axis that is absent is replicated."""
MeshShape = Mapping[str, int]
"""Mesh axis -> size, major to minor."""


def mesh_size(mesh: MeshShape, axes: Iterable[str]) -> int:
    """Number of devices along `axes` together."""
    return math.prod(mesh[axis] for axis in axes)


def shard_count(axes: Iterable[str], mapping: AxisMapping, mesh: MeshShape) -> int:
    """Into how many shards an array with logical axes `axes` is cut."""
    return math.prod(mesh_size(mesh, mapping.get(axis, ())) for axis in axes)


def mesh_axes_of(axes: Iterable[str], mapping: AxisMapping) -> MeshAxes:
    """Every mesh axis that an array with logical axes `axes` is cut along, in the order of its dimensions."""
    return tuple(mesh_axis for axis in axes for mesh_axis in mapping.get(axis, ()))


def independent_sets(axes: Iterable[str], arrays: Iterable[Iterable[str]]) -> list[frozenset[str]]:
    """Every set of `axes` of which no array has two, so that all of them can share one mesh axis; the empty set too."""
    together = [set(array) for array in arrays]
    sets = [frozenset[str]()]
    for axis in axes:
        conflicts = set().union(*(array for array in together if axis in array)) - {axis}
        sets += [chosen | {axis} for chosen in sets if not chosen & conflicts]
    return sets
