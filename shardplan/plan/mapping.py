"""Mappings of logical axes to mesh axes: their types and arithmetic. Pure."""

import math
from collections.abc import Iterable, Mapping

MeshAxes = tuple[str, ...]
"""Mesh axes, major to minor."""
AxisMapping = Mapping[str, MeshAxes]
"""Logical axis -> mesh axes; an axis that is absent is replicated."""
MeshShape = Mapping[str, int]
"""Mesh axis -> size, major to minor."""


def mesh_size(mesh: MeshShape, axes: Iterable[str]) -> int:
    """Return the number of devices along all of the mesh axes `axes`.

    >>> mesh_size({"replica": 2, "data": 8, "model": 4}, ("data", "model"))
    32
    """
    return math.prod(map(mesh.__getitem__, axes))


def shard_count(mesh: MeshShape, spec: Iterable[Iterable[str] | None]) -> int:
    """Return the number of different shards of an array.

    >>> shard_count({"data": 8, "model": 4}, [("data",), None, ("model",)])
    32

    Args:
        spec: mesh axes of each dimension; None for a dimension that is not sharded.
    """
    return math.prod(mesh_size(mesh, mesh_axes or ()) for mesh_axes in spec)


def mesh_text(mesh: MeshShape) -> str:
    """Format a mesh as `replica 2 x data 16 x model 4`.

    >>> mesh_text({"replica": 1, "data": 8, "model": 4})
    'replica 1 x data 8 x model 4'
    """
    return " x ".join(f"{axis} {size}" for axis, size in mesh.items())


def axes_text(axes: Mapping[str, int]) -> str:
    """Format axes as `layer 126, mlp 53248, embed 16384`.

    >>> axes_text({"embed": 4096, "mlp": 14336})
    'embed 4096, mlp 14336'
    """
    return ", ".join(f"{axis} {size}" for axis, size in axes.items())


def mapping_text(mapping: Mapping[str, Iterable[str]]) -> str:
    """Format the sharded axes of a mapping as `embed -> data; mlp, heads -> model`; `all replicated` without any.

    >>> mapping_text({"batch": ["replica", "data"], "mlp": ["model"], "heads": ["model"], "embed": []})
    'batch -> replica x data; mlp, heads -> model'
    """
    return grouped_text({axis: mesh_axes for axis, mesh_axes in mapping.items() if mesh_axes}) or "all replicated"


def grouped_text(mapping: Mapping[str, Iterable[str]]) -> str:
    """Format a mapping as groups of logical axes with the same mesh axes; `none` for axes that are replicated.

    >>> grouped_text({"mlp": ["model"], "heads": ["model"], "embed": []})
    'mlp, heads -> model; embed -> none'
    """
    groups: dict[str, list[str]] = {}
    for axis, mesh_axes in mapping.items():
        groups.setdefault(" x ".join(mesh_axes) or "none", []).append(axis)
    return "; ".join(f"{', '.join(axes)} -> {target}" for target, axes in groups.items())


def as_tuples(mapping: Mapping[str, Iterable[str]]) -> dict[str, MeshAxes]:
    """Convert a mapping with lists, as Plans hold it, to one with tuples, as JAX and Haliax take it.

    >>> as_tuples({"batch": ["replica", "data"], "mlp": ["model"]})
    {'batch': ('replica', 'data'), 'mlp': ('model',)}
    """
    return {axis: tuple(mesh_axes) for axis, mesh_axes in mapping.items()}
