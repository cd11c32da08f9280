"""`best_effort_sharding` uses as many devices as divide the shape, and makes the fewest contiguous pieces on disk."""

import itertools
import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, PartitionSpec

from shardplan import best_effort_sharding


def mesh_of(*sizes: int) -> Mesh:
    devices = np.array(jax.devices()[: math.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("replica", "data", "model")[-len(sizes) :])


def max_devices(shape, sizes) -> int:
    """Find the most devices that any assignment of mesh axes to dimensions can use, by brute force."""
    best = 1
    for choice in itertools.product([None, *range(len(shape))], repeat=len(sizes)):
        parts = [math.prod(s for s, c in zip(sizes, choice, strict=True) if c == d) for d in range(len(shape))]
        if all(n % p == 0 for n, p in zip(shape, parts, strict=True)):
            best = max(best, math.prod(parts))
    return best


@settings(max_examples=150)
@given(
    st.lists(st.integers(1, 48), max_size=4),
    st.sampled_from([(1, 4, 2), (2, 2, 2), (1, 1, 8), (3,), (5,), (2, 3), (1, 6, 1), (1, 7, 1)]),
)
def test_uses_as_many_devices_as_divide(shape, sizes):
    sharding = best_effort_sharding(shape, mesh_of(*sizes))
    local = sharding.shard_shape(tuple(shape))  # raises where a dimension is not divisible
    assert math.prod(shape) // math.prod(local) == max_devices(shape, sizes)


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((4096, 1024), PartitionSpec(("data", "model"), None)),  # rows: one contiguous piece per shard
        ((2, 1024), PartitionSpec("model", "data")),  # 2 rows are not divisible by both axes
        ((7, 1024), PartitionSpec(None, ("data", "model"))),  # 7 rows are divisible by neither axis
        ((1024,), PartitionSpec(("data", "model"))),
        ((4,), PartitionSpec("data")),  # data 4 uses more devices than model 2
        ((7, 5), PartitionSpec(None, None)),
        ((), PartitionSpec()),
    ],
)
def test_prefers_contiguous_shards(shape, expected):
    assert best_effort_sharding(shape, mesh_of(1, 4, 2)).spec == expected


def test_no_size_threshold():
    assert best_effort_sharding((8,), mesh_of(1, 4, 2)).spec == PartitionSpec(("data", "model"))


def test_accepts_an_array_instead_of_a_shape():
    assert best_effort_sharding(np.zeros((8, 3)), mesh_of(8)).spec == PartitionSpec("model", None)
