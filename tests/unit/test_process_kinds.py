"""Processes of one kind read alike: what one of them reads stands for all, of any mesh, sharding and checkpoint."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.views import View, row_major_strides
from shardplan.checkpoint.transfer import schedule
from shardplan.checkpoint.transfer.reads import byte_ranges, process_kinds
from shardplan.checkpoint.transfer.reads.byte_ranges import TensorSource, find_byte_ranges, sum_ranges
from shardplan.checkpoint.transfer.reads.process_kinds import find_volumes
from shardplan.checkpoint.transfer.reads.view_grid import estimate_grid_volume, estimate_read_volume, find_grid
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.schedule import (
    Speeds,
    _cheapest,
    _cost,
    _lower_bound,
    _StoredArray,
    exchange_strategies,
    make_schedule,
)
from shardplan.checkpoint.transfer.transfer import DeviceMesh, ReadStrategy, TransferLimits, make_transfers

ITEMSIZE = 2
BFLOAT16 = np.dtype(bfloat16)
PIECES = st.sampled_from(["contiguous", "columns of a wider tensor", "two parts"])


@st.composite
def stored_arrays(draw, shape):
    """Draw a view of an array, whose leading dimensions number tensors, and the locations of these."""
    lead = draw(st.integers(0, len(shape) - 1))
    inner, kind = shape[lead:], draw(PIECES)
    strides = row_major_strides(inner)
    if kind == "columns of a wider tensor":
        wider = draw(st.sampled_from([2, 3, 40]))
        strides = (*(wider * stride for stride in strides[:-1]), 1)
    gap, ends, pieces, sources = draw(st.sampled_from([0, 6])), [0, 0], [], {}
    for cell in draw(st.permutations([*itertools.product(*map(range, shape[:lead]))])):
        name, file = str(cell), draw(st.integers(0, 1))
        sources[name] = TensorSource(str(file), ends[file] + gap, 8 * ITEMSIZE)
        span = 1 + sum((n - 1) * stride for n, stride in zip(inner, strides, strict=True))
        ends[file] = sources[name].offset + span * ITEMSIZE
        half = inner[0] // 2 if kind == "two parts" else 0
        for first, last in ((0, half), (half, inner[0])):
            if first < last:
                start = (*cell, first, *[0] * (len(inner) - 1))
                extent = (*[1] * lead, last - first, *inner[1:])
                pieces.append(StridedPiece(start, extent, name, first * strides[0], (*[0] * lead, *strides)))
    return View.of_pieces(shape, pieces), sources


@st.composite
def stored_loads(draw):
    """Draw a mesh whose processes have neighbouring devices or distant ones, an array, and its sharding."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 8, 16]), min_size=1, max_size=3))
    axes, count = tuple(zip("abc", sizes, strict=False)), math.prod(sizes)
    distance = draw(st.sampled_from([1, 2, 4, 8, count]))
    per_process = draw(st.sampled_from([1, 2, 4]))
    # devices that are `distance` apart, in groups of `distance` processes
    numbers = [i // (distance * per_process) * distance + i % distance for i in range(count)]
    mesh = DeviceMesh(axes, tuple(numbers))
    rank = draw(st.integers(1, 4))
    dimension = [draw(st.integers(-1, rank - 1)) for _ in axes]
    spec = tuple(tuple(n for (n, _), d in zip(axes, dimension, strict=True) if d == i) for i in range(rank))
    shape = tuple(mesh.count(sharded_by) * draw(st.sampled_from([1, 2, 3, 4])) for sharded_by in spec)
    return mesh, *draw(stored_arrays(shape)), spec


def check_volumes(transfer, view, sources, mesh):
    """What is found for all processes is what each reads, looked at by itself; returns how many differ."""

    def volume_of(process):
        return estimate_read_volume(transfer, view, sources, mesh, process)

    grid = find_grid(view, sources)
    found = find_volumes(transfer, grid, view.shape, mesh, volume_of)
    expected = [volume_of(process) for process in mesh.devices_by_process]
    for process, volume in zip(mesh.devices_by_process, expected, strict=True):
        assert volume == sum_ranges(find_byte_ranges(transfer, view, sources, mesh, process))
    if grid is not None:
        assert [estimate_grid_volume(transfer, grid, mesh, process) for process in mesh.devices_by_process] == expected
    assert [*zip(*(each.tolist() for each in found), strict=True)] == [(each.bytes, each.count) for each in expected]
    return len({*expected})


@pytest.mark.slow
@given(stored_loads(), st.sampled_from([40, 400, 10**6]), st.sampled_from([0, 16, 64 * 1024]))
@settings(max_examples=250)
def test_processes_of_one_kind_read_equally_much(load, max_bytes, gap_bytes):
    """For every strategy, and any length of gaps that are read rather than left out."""
    mesh, view, sources, spec = load
    assume(math.prod(view.shape) <= 4096)
    limits = TransferLimits(max_bytes, max_bytes)
    with pytest.MonkeyPatch.context() as patch:
        for module in (byte_ranges, process_kinds):
            patch.setattr(module, "GAP_BYTES", gap_bytes)
        byte_ranges.runs_of_box.cache_clear()
        for strategy in (ReadStrategy(spec), *exchange_strategies(view.shape, spec, mesh)):
            for transfer in make_transfers("x", view.shape, strategy, ITEMSIZE, mesh, limits):
                check_volumes(transfer, view, sources, mesh)
    byte_ranges.runs_of_box.cache_clear()


@pytest.mark.slow
@given(stored_loads(), st.sampled_from([40, 400, 10**6]))
@settings(max_examples=100)
def test_no_read_strategy_costs_less_than_its_bound(load, max_bytes):
    """So that the cheapest one is found, where bounds rule out others."""
    mesh, view, sources, spec = load
    assume(0 < math.prod(view.shape) <= 4096)
    limits = TransferLimits(max_bytes, max_bytes)
    strategies = (ReadStrategy(spec), *exchange_strategies(view.shape, spec, mesh))
    choices = [list(make_transfers("x", view.shape, each, ITEMSIZE, mesh, limits)) for each in strategies]
    array = _StoredArray(view, sources, find_grid(view, sources), float(math.prod(view.shape) * ITEMSIZE), False)
    arguments = (array, mesh, Speeds())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(schedule, "MAX_REREAD_BYTES", 8)  # or arrays as small as these would never exceed it
        costs = [_cost(transfers, *arguments) for transfers in choices]
        bounds = [_lower_bound(transfers, *arguments) for transfers in choices]
        assert all(bound <= cost for bound, cost in zip(bounds, costs, strict=True))
        assert _cheapest(choices, *arguments) is choices[costs.index(min(costs))]


def test_gaps_between_the_devices_of_a_process():
    """Rows of 16 KiB, two a device, with a gap of two between those of a process.

    The gap is read if both pairs of rows are boxes that touch. That does not follow from their distance in bytes: one
    pair may be the last of a dimension, and the other one the first after it.
    """
    mesh = DeviceMesh((("a", 32),), tuple((i + 2) % 32 // 4 * 2 + i % 2 for i in range(32)))
    shape, strides = (4, 4, 4, 4096), row_major_strides((4, 4, 4, 4096))
    view, sources = (
        View.of_pieces(shape, [StridedPiece((0,) * 4, shape, "x", 0, strides)]),
        {"x": TensorSource("file", 0, 32)},
    )
    strategy = ReadStrategy(((), (), (), ()), ((3, ("a",)),))
    (transfer,) = make_transfers("x", shape, strategy, 4, mesh, TransferLimits(2**30, 2**30))
    assert check_volumes(transfer, view, sources, mesh) > 1


def test_a_fleet_has_few_kinds(monkeypatch):
    """8,192 processes of 32,768 devices: the layers of a large model, whose rows the processes divide unevenly."""
    calls = []
    original = schedule.estimate_grid_volume
    monkeypatch.setattr(schedule, "estimate_grid_volume", lambda *args: calls.append(args) or original(*args))
    mesh = DeviceMesh((("data", 4096), ("model", 8)), tuple(device // 4 for device in range(32768)))
    shape, layer_bytes = (126, 53248, 16384), 53248 * 16384 * 2
    strides = (0, *row_major_strides(shape[1:]))
    pieces = tuple(StridedPiece((i, 0, 0), (1, *shape[1:]), str(i), 0, strides) for i in range(shape[0]))
    sources = {str(i): TensorSource(f"file {i // 3}", i % 3 * layer_bytes, 16) for i in range(shape[0])}
    spec = ((), ("model",), ("data",))
    limits = TransferLimits(64 * 2**20, 256 * 2**20)
    result = make_schedule({"x": ArrayRequest(View.of_pieces(shape, pieces), spec, BFLOAT16)}, sources, mesh, limits)
    assert result.transfers[0].strategy.all_to_all and len(calls) < 1000
    assert sum(math.prod(each.shape) for each in result.transfers) * 8 == math.prod(shape)
