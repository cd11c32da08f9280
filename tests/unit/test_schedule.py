"""Read schedules: the devices that share an element read it once between them, in long ranges, and evenly."""

import itertools
import math

import haliax as hax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from shardplan.checkpoint.format.header import bytes_of
from shardplan.checkpoint.mapping.pieces import StridedPiece
from shardplan.checkpoint.mapping.state_dict_program import trace_program
from shardplan.checkpoint.mapping.views import View, row_major_strides, tensor_view
from shardplan.checkpoint.transfer.reads.byte_ranges import (
    GAP_BYTES,
    ReadVolume,
    TensorSource,
    find_byte_ranges,
    find_runs,
    merge_boxes,
    sum_ranges,
)
from shardplan.checkpoint.transfer.request import ArrayRequest
from shardplan.checkpoint.transfer.schedule import (
    Schedule,
    exchange_strategies,
    exchanged_bytes,
    make_schedule,
    read_by_process,
)
from shardplan.checkpoint.transfer.transfer import DeviceMesh, ReadStrategy, TransferLimits, make_transfers
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.inspect import named_leaves
from shardplan.model.registry import build_model

MIB = 2**20
BFLOAT16 = np.dtype(bfloat16)
LIMITS = TransferLimits(64 * MIB, 256 * MIB)


@st.composite
def loads(draw):
    """Draw a mesh with its processes, and a shape and sharding that it divides."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    axes = tuple(zip("abc", sizes, strict=False))
    per_process = draw(st.integers(1, 4))
    mesh = DeviceMesh(axes, tuple(device // per_process for device in range(math.prod(sizes))))
    rank = draw(st.integers(1, 3))
    dimension = [draw(st.integers(-1, rank - 1)) for _ in axes]
    spec = tuple(tuple(n for (n, _), d in zip(axes, dimension, strict=True) if d == i) for i in range(rank))
    shape = tuple(mesh.count(sharded_by) * draw(st.integers(1, 5)) for sharded_by in spec)
    return mesh, shape, spec


@given(loads(), st.integers(1, 400))
@settings(max_examples=150)
def test_devices_read_everything_once_between_them(load, max_bytes):
    """For any mesh, sharding and transfer size, one of the devices that share a box reads each of its elements.

    All boxes together make up what every device reads.
    """
    mesh, shape, spec = load
    for strategy in (ReadStrategy(spec), *exchange_strategies(shape, spec, mesh)):
        transfers = list(make_transfers("x", shape, strategy, 2, mesh, TransferLimits(max_bytes, max_bytes)))
        local = [d for d, axes in enumerate(strategy.local) if mesh.count(axes) > 1]
        assert sum(math.prod(t.shape) for t in transfers) == math.prod(transfers[0].local_shape)
        assert all(d < strategy.row_rank for d in local)
        read = np.zeros(shape, int)
        for transfer, device in itertools.product(transfers, range(len(mesh.processes))):
            elements = 0
            for (start, stop), position in transfer.boxes(mesh, device):
                read[tuple(map(slice, start, stop))] += 1
                assert position == elements
                elements += math.prod(b - a for a, b in zip(start, stop, strict=True))
            assert elements <= transfer.rows_per_device(mesh) * math.prod(transfer.row_shape)
        copies = math.prod(n for _, n in mesh.axes) // mesh.count(strategy.row_axes)
        copies //= math.prod(mesh.count(axes) for axes in strategy.local)
        assert (read == copies).all()


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
@settings(max_examples=100)
def test_merged_boxes_contain_the_same_elements(extents, data):
    cells = list(itertools.product(*map(range, extents)))
    chosen = data.draw(st.lists(st.sampled_from(cells), unique=True))
    merged = merge_boxes((cell, tuple(i + 1 for i in cell)) for cell in chosen)
    inside = [cell for start, stop in merged for cell in itertools.product(*map(range, start, stop))]
    assert sorted(inside) == sorted(chosen)
    assert len(merged) <= len(chosen)
    if len(chosen) == len(cells):
        assert merged == [((0,) * len(extents), tuple(extents))]


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.sampled_from([4, 8, 16_000, 320_000]), st.data())
@settings(max_examples=100)
def test_runs_against_counting(extents, bits, data):
    """Neighbouring elements of a box are in one run exactly if the gap between them is short."""
    start = tuple(data.draw(st.integers(0, n - 1)) for n in extents)
    stop = tuple(data.draw(st.integers(s + 1, n)) for s, n in zip(start, extents, strict=True))
    strides = row_major_strides(tuple(extents))
    (piece,) = tensor_view("x", tuple(extents)).pieces_in(start, stop)
    indices = itertools.product(*map(range, start, stop))
    elements = sorted(sum(i * k for i, k in zip(index, strides, strict=True)) for index in indices)
    gaps = [(b - a - 1) * bits > 8 * GAP_BYTES for a, b in itertools.pairwise(elements)]
    runs = find_runs(piece, bits)
    assert runs.count == 1 + sum(gaps)
    assert runs.count * runs.elements >= len(elements)


@pytest.mark.slow
@given(loads(), st.integers(1, 3), st.sampled_from([16, 4]), st.data())
@settings(max_examples=100)
def test_volumes_are_those_of_the_ranges(load, layers, bits, data):
    """What processes read of equal layers is computed once, and equals the ranges of each transfer.

    A transfer is of one to three layers, which follow one another in their files at once or after a gap, in any order.
    """
    mesh, shape, spec = load
    shape = (4 * shape[0], *shape[1:])
    size, strides = math.prod(shape[1:]), (0, *row_major_strides(shape[1:]))
    pieces = tuple(
        StridedPiece((i, *[0] * (len(shape) - 1)), (1, *shape[1:]), str(i), 0, strides) for i in range(shape[0])
    )
    view, ends, sources = View.of_pieces(shape, pieces), [0, 0], {}
    for i in data.draw(st.permutations(range(shape[0]))):
        file = data.draw(st.integers(0, 1))
        sources[str(i)] = TensorSource(str(file), ends[file] + data.draw(st.sampled_from([0, 0, 6])), bits)
        ends[file] = sources[str(i)].offset + bytes_of(bits * size)
    for strategy in (ReadStrategy(spec), *exchange_strategies(shape, spec, mesh)):
        max_bytes = 2 * layers * size * max(map(len, mesh.devices_by_process.values()))
        transfers = tuple(make_transfers("x", shape, strategy, 2, mesh, TransferLimits(max_bytes, max_bytes)))
        volumes = read_by_process(Schedule(mesh, transfers), {"x": ArrayRequest(view, spec, BFLOAT16)}, sources)
        for process, volume in volumes.items():
            ranges = (find_byte_ranges(transfer, view, sources, mesh, process) for transfer in transfers)
            assert volume == sum(map(sum_ranges, ranges), ReadVolume())


def test_halves_of_bytes_that_processes_share():
    """Of rows of three half bytes, the devices of one process read the first two, those of another the last two."""
    mesh = DeviceMesh((("b", 2), ("c", 3)), (0, 0, 1, 1, 2, 2))
    shape, spec = (4, 3), ((), ("c",))
    view = View.of_pieces(shape, [StridedPiece((i, 0), (1, 3), "w", 4 * i, (0, 1)) for i in range(4)])
    sources = {"w": TensorSource("f", 0, 4)}
    (transfer,) = make_transfers("w", shape, ReadStrategy(spec), 2, mesh, LIMITS)
    volumes = read_by_process(Schedule(mesh, (transfer,)), {"w": ArrayRequest(view, spec, BFLOAT16)}, sources)
    assert [volumes[process].bytes for process in range(3)] == [4, 8, 8]


def test_each_process_reads_its_own_contiguous_shard():
    """Rows sharded over processes and replicated within one need no exchange."""
    mesh = DeviceMesh((("data", 2), ("model", 2)), (0, 0, 1, 1))
    view, sources = tensor_view("w", (4096, 1024)), {"w": TensorSource("f", 100, 16)}
    (transfer,) = make_schedule({"w": ArrayRequest(view, (("data",), ()), BFLOAT16)}, sources, mesh, LIMITS).transfers
    assert not transfer.strategy.collectives and exchanged_bytes(transfer, mesh) == 0
    assert find_byte_ranges(transfer, view, sources, mesh, 1) == [("f", 100 + 4 * MIB, 100 + 8 * MIB)]


@pytest.mark.parametrize(
    ("spec", "collectives"),
    [(((), ("data",)), [("data", 1), ("model", None)]), (((), ()), [("data", None), ("model", None)])],
)
def test_columns_and_copies_are_read_once_and_exchanged(spec, collectives):
    """Each of four processes reads a quarter in one range; 3/4 of what a device keeps comes from the others.

    With columns sharded, a device receives an eighth of the array in an all-to-all and a quarter in an all-gather; with
    the array replicated, a quarter and a half in two all-gathers.
    """
    mesh = DeviceMesh((("data", 2), ("model", 2)), (0, 1, 2, 3))
    view, sources = tensor_view("w", (4096, 1024)), {"w": TensorSource("f", 0, 16)}
    (transfer,) = make_schedule({"w": ArrayRequest(view, spec, BFLOAT16)}, sources, mesh, LIMITS).transfers
    assert transfer.strategy.collectives == collectives
    ranges = sorted(find_byte_ranges(transfer, view, sources, mesh, process)[0] for process in range(4))
    assert ranges == [("f", 2 * MIB * i, 2 * MIB * (i + 1)) for i in range(4)]
    held = 2 * MIB
    expected = held / 2 + held if spec[1] else held + 2 * held
    assert exchanged_bytes(transfer, mesh) == expected


def test_one_process_exchanges_nothing():
    mesh = DeviceMesh((("data", 2), ("model", 2)), (0,) * 4)
    view, sources = tensor_view("w", (4096, 1024)), {"w": TensorSource("f", 0, 16)}
    request, limits = ArrayRequest(view, ((), ("data",)), BFLOAT16), TransferLimits(MIB, MIB)
    transfers = make_schedule({"w": request}, sources, mesh, limits).transfers
    assert not any(transfer.strategy.collectives for transfer in transfers)
    read = [run for transfer in transfers for run in find_byte_ranges(transfer, view, sources, mesh, 0)]
    assert sum(high - low for _, low, high in read) == 8 * MIB and len(read) == len(transfers)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "mapping"),
    [
        ("llama-3.1-405b", {"mlp": "model", "vocab": "model", "kv_head": "model", "heads": "model", "embed": "data"}),
        pytest.param("llama-3.1-405b", {"embed": "model"}, marks=pytest.mark.whole),
        ("mixtral-8x7b", {"experts": "data", "mlp": "model"}),
        ("gemma-7b", {}),
    ],
)
def test_all_processes_together_read_every_byte_once(model, mapping):
    """32 processes of 128 devices read at most 1.02 times all bytes, and none reads 10% more than another.

    The mappings shard inner dimensions and experts, and replicate tensors.
    """
    mesh = DeviceMesh((("replica", 1), ("data", 16), ("model", 8)), tuple(device // 4 for device in range(128)))
    template = build_model(read_config(model, None), 1024).template
    program = trace_program(template)
    offsets = itertools.accumulate((2 * math.prod(s) for s in program.tensors.values()), initial=0)
    sources = {name: TensorSource("f", offset, 16) for name, offset in zip(program.tensors, offsets, strict=False)}
    specs = {
        path: tuple((mapping[axis.name],) if axis.name in mapping and axis.size % mesh.sizes[mapping[axis.name]] == 0
                    else () for axis in leaf.axes)
        for path, leaf in named_leaves(template) if isinstance(leaf, hax.NamedArray)
    }  # fmt: skip
    stored_dtypes = dict.fromkeys(program.tensors, BFLOAT16)
    requests = {}
    for path, view in program.views.items():
        requests[path] = ArrayRequest(view, specs[path], BFLOAT16).in_transit(stored_dtypes)
    schedule = make_schedule(requests, sources, mesh, LIMITS)
    read = read_by_process(schedule, requests, sources)
    total = sum(2 * math.prod(shape) for shape in program.tensors.values())
    assert 1 <= sum(ranges.bytes for ranges in read.values()) / total <= 1.02
    sizes = [ranges.bytes for ranges in read.values()]
    assert max(sizes) <= 1.1 * min(sizes)
    # ranges are long on average
    assert total / sum(ranges.count for ranges in read.values()) >= MIB / 4


def test_a_piece_with_a_repeated_element():
    """A dimension of stride 0 adds nothing to what is read."""
    assert find_runs(StridedPiece((0, 0), (5, 3), "w", 7, (0, 1)), 2).elements == 3
