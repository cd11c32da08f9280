"""Chooses a sharding for an array from its shape alone."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from shardplan.errors import ConfigError, check_argument


def best_effort_sharding(shape: Sequence[int], mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Shard an array of `shape` over as many devices of `mesh` as its dimensions allow.

    Every mesh axis is used if some dimension is divisible by it. Among the assignments that use the most devices, it
    chooses the one whose shards are the fewest contiguous pieces on disk (row-major), and among these the one on the
    leftmost dimensions. There are no size thresholds.

    >>> mesh = AbstractMesh((2, 4), ("data", "model"))
    >>> best_effort_sharding((4096, 128), mesh).spec
    P(('data', 'model'), None)
    >>> best_effort_sharding((2, 3, 4), mesh).spec
    P('data', None, 'model')

    Args:
        shape: the array's dimensions, or an array.
        mesh: any axis names and sizes.

    Raises:
        ConfigError: an argument of another type.
    """
    shape = getattr(shape, "shape", shape)
    check_argument(
        "best_effort_sharding", "shape", shape, Sequence, "the sizes of dimensions, such as (8, 4), or an array"
    )
    check_argument("best_effort_sharding", "mesh", mesh, (Mesh, AbstractMesh), "a jax.sharding.Mesh")
    dimensions = tuple(shape)
    for size in dimensions:
        if not isinstance(size, int | np.integer) or size < 0:
            raise ConfigError(
                f"best_effort_sharding: shape is {shape!r}; it must be the sizes of dimensions, such as (8, 4), or an "
                "array"
            )
    axes = [(name, size) for name, size in mesh.shape.items() if size > 1]
    # dimension len(dimensions) stands for "not used"
    choices = itertools.product(range(len(dimensions) + 1), repeat=len(axes))
    best = min(filter(None, (_rank(dimensions, axes, choice) for choice in choices)))
    spec: list[Any] = [
        tuple(name for (name, _), dimension in zip(axes, best[-1], strict=True) if dimension == d) or None
        for d in range(len(dimensions))
    ]
    return NamedSharding(mesh, PartitionSpec(*spec))


def _rank(
    dimensions: tuple[int, ...], axes: list[tuple[str, int]], choice: tuple[int, ...]
) -> tuple[int, int, tuple[int, ...]] | None:
    """Return the sort key of a choice (mesh axis i on dimension `choice[i]`); None if a dimension is not divisible."""
    parts = [1] * (len(dimensions) + 1)
    for (_, size), dimension in zip(axes, choice, strict=True):
        parts[dimension] *= size
    if any(n % k for n, k in zip(dimensions, parts, strict=False)):
        return None
    devices_used = math.prod(parts[: len(dimensions)])
    last_sharded = max((d for d in range(len(dimensions)) if parts[d] > 1), default=0)
    runs = math.prod(n // k for n, k in zip(dimensions[:last_sharded], parts, strict=False))
    return -devices_used, runs, choice
