"""Which devices take part in a collective: every notation of the compiler is read."""

import math

import numpy as np
import pytest
from hlo_modules import read_module
from hypothesis import given
from hypothesis import strategies as st

from shardplan.verify.hlo.replica_groups import parse_replica_groups, parse_source_target_pairs


@pytest.mark.parametrize(
    ("name", "instruction", "first", "count"),
    [
        # [4,16]<=[16,4]T(1,0)
        ("async_gather", "all-gather.22", tuple(range(0, 64, 4)), 4),
        # [16,4]<=[64]
        ("async_gather", "all-reduce.2", (0, 1, 2, 3), 16),
        # {{0,4,8, ...}, ...}
        ("reduce_scatter", "all-reduce.1", tuple(range(0, 64, 4)), 4),
        # mesh['axis_0'=4,'axis_1'=1,'axis_2'=4], device_ids=([2,2,4]T(1,0,2)) {'axis_0'}
        ("groups", "all-gather", (0, 8, 4, 12), 4),
        # mesh['axis_0'=2,'axis_1'=1,'axis_2'=8] {'axis_0'}
        ("groups", "all-gather.1", (0, 8), 8),
        # mesh['axis_0'=4,'axis_1'=1] {'axis_0','axis_1'}
        ("too_large", "all-reduce", (0, 1, 2, 3), 1),
        # {{0,2,4,6},{1,3,5,7}}: the 8 partitions of one of two slices
        ("two_slices", "all-gather.2", (0, 2, 4, 6), 2),
    ],
)
def test_replica_groups_of_real_collectives(name, instruction, first, count):
    """Every notation of the compiler is read; `device_ids` after a comma is a part of the groups."""
    groups = parse_replica_groups(read_module(name).instructions[instruction].attributes["replica_groups"], 64)
    assert groups is not None
    assert groups[0] == first and len(groups) == count
    assert sorted(member for group in groups for member in group) == list(range(len(first) * count))


@st.composite
def grids(draw):
    dims = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    return dims, draw(st.permutations(range(len(dims))))


@given(grids(), st.data())
def test_groups_from_iota_agree_with_numpy(grid, data):
    dims, order = grid
    n = math.prod(dims)
    size = data.draw(st.sampled_from([k for k in range(1, n + 1) if n % k == 0]))
    text = f"[{n // size},{size}]<=[{','.join(map(str, dims))}]T({','.join(map(str, order))})"
    expected = np.arange(n).reshape(dims).transpose(order).reshape(-1, size)
    assert parse_replica_groups(text, n) == [tuple(row) for row in expected.tolist()]


@given(grids(), grids(), st.data())
def test_groups_from_a_mesh_agree_with_numpy(grid, tile, data):
    """A group extends along the chosen axes, in the order in which they are named."""
    sizes, chosen = grid
    chosen = chosen[: data.draw(st.integers(1, len(sizes)))]
    n = math.prod(sizes)
    devices = np.arange(n)
    declared = ",".join(f"'axis_{i}'={size}" for i, size in enumerate(sizes))
    text = f"mesh[{declared}]"
    if data.draw(st.booleans()):
        dims, order = tile if math.prod(tile[0]) == n else (list(sizes), list(reversed(range(len(sizes)))))
        devices = devices.reshape(dims).transpose(order).reshape(-1)
        text += f", device_ids=([{','.join(map(str, dims))}]T({','.join(map(str, order))}))"
    text += " {" + ",".join(f"'axis_{i}'" for i in chosen) + "}"
    others = [i for i in range(len(sizes)) if i not in chosen]
    expected = devices.reshape(sizes).transpose([*others, *chosen]).reshape(-1, math.prod(sizes[i] for i in chosen))
    assert parse_replica_groups(text, n) == [tuple(row) for row in expected.tolist()]


def test_other_groups():
    assert parse_replica_groups("{}", 3) == parse_replica_groups("", 3) == [(0, 1, 2)]
    assert parse_replica_groups("{{0,2},{1}}", 3) == [(0, 2), (1,)]
    # a part of an axis is reported as not understood, instead of read wrongly
    assert parse_replica_groups("mesh['a'=4] {'a':(1)2}", 4) is None
    assert parse_replica_groups("@mesh", 4) is None


def test_source_target_pairs():
    assert parse_source_target_pairs("{{0,14},{2,0}}") == [(0, 14), (2, 0)]
