"""Who reads what: every element once between the devices that share it, by long ranges, evenly, and never twice."""

import itertools
import math

import haliax as hax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.checkpoint.mapping.program import trace_program
from shardplan.checkpoint.mapping.views import Piece, row_major_strides, tensor_view
from shardplan.checkpoint.transfer.schedule import (
    GAP_BYTES,
    Fleet,
    Limits,
    Sharing,
    Source,
    exchanged_bytes,
    make_schedule,
    merged,
    process_ranges,
    read_by_process,
    runs_of,
    sharings,
    transfers_of,
)
from shardplan.model import build_model, read_config
from shardplan.model.axes import named_leaves

MIB = 2**20
LIMITS = Limits(64 * MIB, 256 * MIB)


@st.composite
def loads(draw):
    """A mesh with its processes, and an array that it divides."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    mesh = tuple(zip("abc", sizes, strict=False))
    per_process = draw(st.integers(1, 4))
    fleet = Fleet(mesh, tuple(place // per_process for place in range(math.prod(sizes))))
    rank = draw(st.integers(1, 3))
    dimension = [draw(st.integers(-1, rank - 1)) for _ in mesh]
    spec = tuple(tuple(n for (n, _), d in zip(mesh, dimension, strict=True) if d == i) for i in range(rank))
    shape = tuple(fleet.count(axes) * draw(st.integers(1, 5)) for axes in spec)
    return fleet, shape, spec


@given(loads(), st.integers(1, 400))
@settings(max_examples=150, deadline=None)
def test_devices_read_everything_once_between_them(load, most_bytes):
    """Whatever the mesh, the cuts and the size of a transfer: of a box that devices share each element is read by one
    of them, and by all boxes together every device gets what it keeps."""
    fleet, shape, spec = load
    for sharing in (Sharing(spec), *sharings(shape, spec, fleet)):
        transfers = list(transfers_of("x", shape, sharing, 2, fleet, Limits(most_bytes, most_bytes)))
        kept = [d for d, axes in enumerate(sharing.kept) if fleet.count(axes) > 1]
        assert sum(math.prod(t.shape) for t in transfers) == math.prod(transfers[0].extents)
        assert all(d < sharing.first_moved for d in kept)
        read = np.zeros(shape, int)
        for transfer, place in itertools.product(transfers, range(len(fleet.processes))):
            taken = 0
            for (start, stop), position in transfer.boxes(fleet, place):
                read[tuple(map(slice, start, stop))] += 1
                assert position == taken
                taken += math.prod(b - a for a, b in zip(start, stop, strict=True))
            assert taken <= transfer.rows_each(fleet) * math.prod(transfer.row)
        copies = math.prod(n for _, n in fleet.mesh) // fleet.count(sharing.shared)
        copies //= math.prod(fleet.count(axes) for axes in sharing.kept)
        assert (read == copies).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
@settings(max_examples=100, deadline=None)
def test_merged_boxes_hold_the_same(extents, data):
    cells = list(itertools.product(*map(range, extents)))
    chosen = data.draw(st.lists(st.sampled_from(cells), unique=True))
    found = merged((cell, tuple(i + 1 for i in cell)) for cell in chosen)
    inside = [cell for start, stop in found for cell in itertools.product(*map(range, start, stop))]
    assert sorted(inside) == sorted(chosen)
    assert len(found) <= len(chosen)
    if len(chosen) == len(cells):
        assert found == [((0,) * len(extents), tuple(extents))]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([1, 2000, 40_000]), st.data())
@settings(max_examples=100, deadline=None)
def test_runs_against_counting(extents, itemsize, data):
    """Elements of a box one by one: they are in one run as long as the gap between them is short."""
    start = tuple(data.draw(st.integers(0, n - 1)) for n in extents)
    stop = tuple(data.draw(st.integers(s + 1, n)) for s, n in zip(start, extents, strict=True))
    strides = row_major_strides(tuple(extents))
    (piece,) = tensor_view("x", tuple(extents)).inside(start, stop)
    indices = itertools.product(*map(range, start, stop))
    elements = sorted(sum(i * k for i, k in zip(index, strides, strict=True)) for index in indices)
    gaps = [(b - a - 1) * itemsize > GAP_BYTES for a, b in itertools.pairwise(elements)]
    runs = runs_of(piece, itemsize)
    assert runs.count == 1 + sum(gaps)
    assert runs.count * runs.elements >= len(elements)


def test_each_process_its_own_where_that_is_contiguous():
    """Rows over processes, and copies within one: no exchange."""
    fleet = Fleet((("data", 2), ("model", 2)), (0, 0, 1, 1))
    view, sources = tensor_view("w", (4096, 1024)), {"w": Source("f", 100, 2)}
    (transfer,) = make_schedule({"w": view}, sources, {"w": (("data",), ())}, {"w": 2}, fleet, LIMITS).transfers
    assert not transfer.sharing.steps and exchanged_bytes(transfer, fleet) == 0
    assert process_ranges(transfer, view, sources, fleet, 1) == [("f", 100 + 4 * MIB, 100 + 8 * MIB)]


@pytest.mark.parametrize(
    ("spec", "steps"),
    [(((), ("data",)), [("data", 1), ("model", None)]), (((), ()), [("data", None), ("model", None)])],
)
def test_columns_and_copies_are_read_once_and_exchanged(spec, steps):
    """Each of four processes reads a quarter, one range. 3/4 of what a device keeps comes from others: of a half by an
    all-to-all, and the other halves by an all-gather."""
    fleet = Fleet((("data", 2), ("model", 2)), (0, 1, 2, 3))
    view, sources = tensor_view("w", (4096, 1024)), {"w": Source("f", 0, 2)}
    (transfer,) = make_schedule({"w": view}, sources, {"w": spec}, {"w": 2}, fleet, LIMITS).transfers
    assert transfer.sharing.steps == steps
    ranges = sorted(process_ranges(transfer, view, sources, fleet, process)[0] for process in range(4))
    assert ranges == [("f", 2 * MIB * i, 2 * MIB * (i + 1)) for i in range(4)]
    held = 2 * MIB
    expected = held / 2 + held if spec[1] else held + 2 * held
    assert exchanged_bytes(transfer, fleet) == expected


def test_one_process_exchanges_nothing():
    fleet = Fleet((("data", 2), ("model", 2)), (0,) * 4)
    view, sources = tensor_view("w", (4096, 1024)), {"w": Source("f", 0, 2)}
    transfers = make_schedule({"w": view}, sources, {"w": ((), ("data",))}, {"w": 2}, fleet, Limits(MIB, MIB)).transfers
    assert not any(transfer.sharing.steps for transfer in transfers)
    read = [run for transfer in transfers for run in process_ranges(transfer, view, sources, fleet, 0)]
    assert sum(high - low for _, low, high in read) == 8 * MIB and len(read) == len(transfers)


@pytest.mark.parametrize(
    ("model", "mapping"),
    [
        ("llama-3.1-405b", {"mlp": "model", "vocab": "model", "kv_head": "model", "heads": "model", "embed": "data"}),
        pytest.param("llama-3.1-405b", {"embed": "model"}, marks=pytest.mark.whole),
        ("mixtral-8x7b", {"experts": "data", "mlp": "model"}),
        ("gemma-7b", {}),
    ],
)
def test_a_fleet_reads_every_byte_once(model, mapping):
    """128 devices of 32 processes: inner dimensions, replicated tensors, experts; no more than 1.02 times all bytes,
    and none reads 10% more than another."""
    fleet = Fleet((("replica", 1), ("data", 16), ("model", 8)), tuple(place // 4 for place in range(128)))
    template = build_model(read_config(f"configs/models/{model}.json", None), 1024).template
    program = trace_program(template)
    offsets = itertools.accumulate((2 * math.prod(s) for s in program.tensors.values()), initial=0)
    sources = {name: Source("f", offset, 2) for name, offset in zip(program.tensors, offsets, strict=False)}
    specs = {
        path: tuple((mapping[axis.name],) if axis.name in mapping and axis.size % fleet.sizes[mapping[axis.name]] == 0
                    else () for axis in leaf.axes)
        for path, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray)
    }  # fmt: skip
    orders = {path: view.stored_order for path, view in program.views.items()}
    views = {path: view.transposed(orders[path]) for path, view in program.views.items()}
    specs = {path: [specs[path][d] for d in order] for path, order in orders.items()}
    schedule = make_schedule(views, sources, specs, dict.fromkeys(specs, 2), fleet, LIMITS)
    read = read_by_process(schedule, views, sources)
    total = sum(2 * math.prod(shape) for shape in program.tensors.values())
    assert 1 <= sum(ranges.bytes for ranges in read.values()) / total <= 1.02
    sizes = [ranges.bytes for ranges in read.values()]
    assert max(sizes) <= 1.1 * min(sizes)
    # ranges are long on the whole
    assert total / sum(ranges.count for ranges in read.values()) >= MIB / 4


def test_a_piece_with_a_repeated_element():
    """A stride of 0 reads nothing more."""
    assert runs_of(Piece((0, 0), (5, 3), "w", 7, (0, 1)), 2).elements == 3
