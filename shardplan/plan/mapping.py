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
    return math.prod(map(mesh.__getitem__, axes))


def mesh_text(mesh: MeshShape) -> str:
    """`replica 2 x data 16 x model 4`."""
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def mapping_text(mapping: Mapping[str, Iterable[str]]) -> str:
    """`mlp -> model x data, embed -> data`."""
    cut = [f"{axis} -> {' x '.join(mesh_axes)}" for axis, mesh_axes in mapping.items() if mesh_axes]
    return ", ".join(cut) or "all whole"


def as_tuples(mapping: Mapping[str, Iterable[str]]) -> dict[str, MeshAxes]:
    """A mapping as JAX and Haliax take it; in plans it holds lists."""
    return {axis: tuple(mesh_axes) for axis, mesh_axes in mapping.items()}
