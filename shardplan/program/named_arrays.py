"""Arrays with logical axes on their dimensions, and arithmetic of such dimensions. Pure."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

Factor = tuple[str | None, int]
"""A logical axis, or None where the name is not known, and its size."""
Dim = tuple[Factor, ...]
"""One dimension of an array: the axes that are merged into it, major to minor."""

SECOND = "'"
"""Ends the name of an axis that an array has twice, as scores have query and key positions."""
MINOR = "."
"""Ends the name of the minor part of an axis that is taken apart, as layers are into blocks; the major part keeps its
name, for it is what a mesh axis cuts first."""


@dataclass(frozen=True)
class Array:
    """A value of the program."""

    dims: tuple[Dim, ...]
    itemsize: int
    """Bytes per element."""
    weight: str | None = None
    """Path of the parameter that it is, or is a cast, a scaled copy or a slice of."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.dims, self.itemsize, self.weight))

    @cached_property
    def factors(self) -> Dim:
        """The axes of all dimensions, in order."""
        return tuple(factor for dim in self.dims for factor in dim)

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """The names among `factors`."""
        return tuple(name for name, _ in self.factors if name is not None)

    @cached_property
    def majors(self) -> tuple[str, ...]:
        """The names that each dimension begins with: of merged axes only the major one stays cut in place."""
        return tuple(dim[0][0] or "" if dim else "" for dim in self.dims)

    @cached_property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(size for _, size in self.factors)


def names_of(spec: Any, shape: Sequence[int]) -> tuple[Dim, ...]:
    """Dimensions as a PartitionSpec over a mesh of logical axes names them."""
    named = [*spec, *(None,) * (len(shape) - len(spec))]
    return tuple(((entry if isinstance(entry, str) else None, size),) for entry, size in zip(named, shape, strict=True))


def constrained(array: Array, spec: Any) -> Array:
    return replace(array, dims=tuple(map(best, zip(array.dims, names_of(spec, shape_of(array)), strict=True))))


def shape_of(array: Array) -> tuple[int, ...]:
    return tuple(size_of(dim) for dim in array.dims)


def size_of(dim: Dim) -> int:
    return math.prod(size for _, size in dim)


def best(dims: Sequence[Dim]) -> Dim:
    """The dimension with most names; of equals the first."""
    return max(dims, key=lambda dim: sum(name is not None for name, _ in dim) / len(dim) if dim else 0)


def named_after(start: Array, end: Array) -> Array:
    return replace(start, dims=tuple(map(best, zip(start.dims, end.dims, strict=True))))


def distinct(dims: Sequence[Dim]) -> tuple[Dim, ...]:
    """`dims`, where the second of the same name is marked, and nothing else is."""
    names = {name for dim in dims for name, _ in dim}
    seen: set[str] = set()
    result = []
    for dim in dims:
        factors = []
        for name, size in dim:
            if name is not None and name.removesuffix(SECOND) not in names:
                name = name.removesuffix(SECOND)
            while name is not None and name in seen:
                name += SECOND
            if name is not None:
                seen.add(name)
            factors.append((name, size))
        result.append(tuple(factors))
    return tuple(result)


def regroup(factors: Sequence[Factor], shape: Sequence[int], merged: dict[str, Dim]) -> tuple[Dim, ...] | None:
    """`factors` as dimensions of `shape`; None where they do not come out even."""
    left = [(name, size) for name, size in factors if size > 1]
    result: list[Dim] = []
    for size in shape:
        taken: list[Factor] = []
        missing = size
        while missing > 1:
            if not left:
                return None
            name, n = left.pop(0)
            if name in merged and len(merged[name]) == 1:
                name = merged[name][0][0]
            if missing % n == 0:
                taken[-1:] = _joined(taken[-1:], (name, n))
                missing //= n
            elif name in merged:
                left[:0] = merged[name]
            elif n % missing == 0:
                taken.append((name, missing))
                left.insert(0, (name and name + MINOR, n // missing))
                missing = 1
            else:
                return None
        result.append(tuple(taken) or ((None, 1),))
    return tuple(result) if not left else None


def _joined(before: Sequence[Factor], factor: Factor) -> list[Factor]:
    """`factor` after the one before it, if any; as one where it is the minor part of that axis."""
    (name, size), (major, count) = factor, before[0] if before else (None, 1)
    if name and major and name != major and name == major.ljust(len(name), MINOR):
        return [(major, count * size)]
    return [*before, factor]
