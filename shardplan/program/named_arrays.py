"""Shapes of traced arrays with logical axes on every dimension, and arithmetic of such dimensions. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from shardplan.plan.mapping import AxisMapping, MeshAxes


@dataclass(frozen=True)
class AxisCopy:
    """A repetition of a logical axis in one array, such as query and key positions in scores; no mapping shards it."""

    of: "AxisName"

    def __str__(self) -> str:
        return f"{self.of}'"


@dataclass(frozen=True)
class AxisPart:
    """The minor part of a split logical axis, such as layers split into blocks; no mapping shards it.

    The major part keeps the axis' name, because a mesh axis shards the major part first.
    """

    of: "AxisName"

    def __str__(self) -> str:
        return f"{self.of}."


@dataclass(frozen=True)
class UnshardedAxis:
    """A logical axis that no mapping shards in one particular array, such as the experts' axis in a Levanter router."""

    of: "AxisName"

    def __str__(self) -> str:
        return f"{self.of}*"


AxisName = str | AxisCopy | AxisPart | UnshardedAxis
Factor = tuple[AxisName | None, int]
"""A logical axis (None if its name is not known), and its size."""
Dim = tuple[Factor, ...]
"""One dimension of an array: the logical axes that are flattened into it, major to minor."""
MajorAxes = tuple[AxisName | None, ...]
"""The major logical axis of each dimension of an array; None for a dimension without a name."""
TRACED_PREFIX = "logical axis "
"""Prefix of the mesh axes that stand for logical axes while a program is traced."""


@dataclass(frozen=True)
class TracedArray:
    """Shape, logical axes and element size of one value of a traced program."""

    dims: tuple[Dim, ...]
    itemsize: int
    """Bytes per element."""
    weight: str | None = None
    """Path of the parameter, if the value is its array, or a cast, scaled copy or slice of it; else None."""
    is_local: bool = False
    """Whether the value is one device's part of an array in a `shard_map`, and so has the compute sharding."""
    is_on_host: bool = False
    """Whether the value is in the memory of the device's host."""

    def __hash__(self) -> int:
        return self._hash  # computed once, because arrays are keys of caches throughout the search

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.itemsize, self.weight, self.is_local, self.is_on_host))

    @cached_property
    def factors(self) -> Dim:
        """The logical axes of all dimensions with their sizes, in order."""
        return tuple(factor for dim in self.dims for factor in dim)

    @cached_property
    def axes(self) -> tuple[AxisName, ...]:
        """The names among `factors`, without unnamed axes."""
        return tuple(name for name, _ in self.factors if name is not None)

    @cached_property
    def logical_axes(self) -> tuple[str, ...]:
        """Names in `axes` that a mapping may have, without `AxisCopy` and similar names."""
        return tuple(name for name in self.axes if isinstance(name, str))

    @cached_property
    def majors(self) -> MajorAxes:
        """The major logical axis of each dimension, the only axis of a flattened dimension that can be sharded."""
        return tuple(dim[0][0] if dim else None for dim in self.dims)

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(size for _, size in self.factors)


def base_axis(name: AxisName) -> str:
    """Return the logical axis that `name` is or stands for."""
    while not isinstance(name, str):
        name = name.of
    return name


def mapped(name: AxisName | None, mapping: AxisMapping) -> MeshAxes:
    """Return the mesh axes that shard a logical axis; none for an `AxisCopy` or similar, which no mapping shards."""
    return mapping.get(name, ()) if isinstance(name, str) else ()


def is_parameter_like(array: TracedArray, activation_axes: tuple[str, ...]) -> bool:
    """Return whether an array is a parameter, its copy or its gradient: its axes have names, and no token axes.

    Args:
        activation_axes: the logical axes that number tokens.
    """
    if array.is_local:
        return False
    if array.weight is not None:
        return True
    return all(name is not None and base_axis(name) not in activation_axes for name, n in array.factors if n > 1)


def shape_of(array: TracedArray) -> tuple[int, ...]:
    """Return the size of each dimension."""
    return tuple(size_of(dim) for dim in array.dims)


def size_of(dim: Dim) -> int:
    """Return the number of elements along one dimension."""
    return math.prod(size for _, size in dim)


def traced_mesh_axis(axis: str) -> str:
    """Return the mesh axis for a logical axis while a program is traced: a name that no model or mesh has."""
    return f"{TRACED_PREFIX}{axis}"


def dims_of_spec(spec: Any, shape: Sequence[int]) -> tuple[Dim, ...]:
    """Read the logical axes of an array's dimensions from its PartitionSpec in a traced program.

    Logical axes are the mesh axes that `traced_mesh_axis` returns; a dimension with any other has no name.
    """
    entries = [*spec, *(None,) * (len(shape) - len(spec))]  # a spec may be shorter than the shape
    dims: list[Dim] = []
    for entry, size in zip(entries, shape, strict=True):
        is_traced = isinstance(entry, str) and entry.startswith(TRACED_PREFIX)
        dims.append(((entry.removeprefix(TRACED_PREFIX) if is_traced else None, size),))
    return tuple(dims)


def most_named(dims: Sequence[Dim]) -> Dim:
    """Return the dimension with the largest fraction of its axes named; the first one if several are equal."""
    return max(dims, key=lambda dim: sum(name is not None for name, _ in dim) / len(dim) if dim else 0)


def adopt_names(array: TracedArray, dims: Sequence[Dim]) -> TracedArray:
    """Return `array` with the names of `dims` where these are more complete; both have the same shape."""
    return replace(array, dims=tuple(map(most_named, zip(array.dims, dims, strict=True))))


def mark_repeated_axes(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return `dims` with an `AxisCopy` for every repetition of a name, and no other copies."""
    names = {name for dim in dims for name, _ in dim}
    seen: set[AxisName] = set()
    result = []
    for dim in dims:
        factors = []
        for name, size in dim:
            if isinstance(name, AxisCopy) and name.of not in names:
                name = name.of  # the axis itself was summed over: what is left is no repetition
            while name is not None and name in seen:
                name = AxisCopy(name)
            if name is not None:
                seen.add(name)
            factors.append((name, size))
        result.append(tuple(factors))
    return tuple(result)


@lru_cache(maxsize=4096)
def score_positions(array: TracedArray) -> frozenset[AxisName]:
    """Return the position axes of attention scores: names that occur twice, for queries and for keys; else empty."""
    names = set(array.axes)
    return frozenset(name for name in names if isinstance(name, AxisCopy) or AxisCopy(name) in names)


def score_length(scores: TracedArray) -> int:
    """Return the number of query or key positions of attention scores, whichever is larger."""
    positions = score_positions(scores)
    return max(size for name, size in scores.factors if name in positions)


@lru_cache(maxsize=4096)
def is_scores(array: TracedArray) -> bool:
    """Return whether `array` has both query and key positions; attention kernels never write such scores to memory."""
    names = set(array.axes)
    return any(AxisCopy(name) in names for name in names)


def reshape_factors(
    factors: Sequence[Factor], shape: Sequence[int], merged_axes: dict[str, Dim]
) -> tuple[Dim, ...] | None:
    """Divide `factors` into dimensions of `shape`; None if the sizes do not divide.

    Args:
        merged_axes: logical axis -> the axes that it can be split into.
    """
    left = [(name, size) for name, size in factors if size > 1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        missing = size
        while missing > 1:
            if not left:
                return None
            name, n = left.pop(0)
            # an axis that consists of one other axis is this axis, under another name
            if isinstance(name, str) and len(merged_axes.get(name, ())) == 1:
                name = merged_axes[name][0][0]
            if missing % n == 0:
                taken[-1:] = _join_minor_part(taken[-1:], (name, n))
                missing //= n
            elif isinstance(name, str) and name in merged_axes:
                left[:0] = merged_axes[name]
            elif n % missing == 0:
                taken.append((name, missing))
                left.insert(0, (name and AxisPart(name), n // missing))
                missing = 1
            else:
                return None
        result.append(tuple(taken) or ((None, 1),))
    return tuple(result) if not left else None


def _join_minor_part(before: Sequence[Factor], factor: Factor) -> list[Factor]:
    """Append `factor` to a list of at most one factor; if it is the minor part of that factor, join the two."""
    (name, size), (major, count) = factor, before[0] if before else (None, 1)
    part = name
    while isinstance(part, AxisPart):
        part = part.of
        if part == major:
            return [(major, count * size)]
    return [*before, factor]
