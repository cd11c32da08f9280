"""Mesh placement on tori and the cost of collectives, compared with calculations by hand."""

import math
import re

import numpy as np
import pytest
from conftest import work_of

from shardplan.errors import ConfigError
from shardplan.hardware import GENERATIONS, CollectiveKind, Slice, place_mesh
from shardplan.hardware import parse_slice as parse_named_slice
from shardplan.hardware.mesh_placement import _place_mesh

AXES = ("replica", "data", "model")
HOP = 1e-6
TPUS = [
    f"{generation.name}:{'x'.join(map(str, torus))}"
    for generation in GENERATIONS.values()
    for torus in generation.sizes
]
ODD = ["v4:2x10x2", "v4:2x2x14", "v5p:6x2x3", "v3:2x6", "v5e:4x6", "tpu7x:2x2x5", "2xv4:2x10x14", "4xtpu7x-128"]


def parse_slice(name: str) -> Slice:
    """The slice of a name; also one whose torus Google Cloud does not have, for which the arithmetic is the same."""
    if name not in (*ODD, "v4:4x4x6") or "-" in name:
        return parse_named_slice(name)
    copies, generation, torus = re.fullmatch(r"(?:(\d+)x)?([a-z0-9]+):([0-9x]+)", name).groups()
    return Slice(name, GENERATIONS[generation], tuple(map(int, torus.split("x"))), int(copies or 1))


def mesh(*sizes: int) -> dict[str, int]:
    return dict(zip(AXES, sizes, strict=True))


def describe_placement(name: str, *sizes: int) -> dict[str, str]:
    """Mesh axis -> its factors: `y4` is 4 neighbours along dimension y; `y4/2` is 4 devices with stride 2."""
    placement = place_mesh(parse_slice(name), mesh(*sizes))
    return {
        axis: " ".join(
            f"{placement.dimensions[f.dimension].name}{f.size}{f'/{f.stride}' if f.stride > 1 else ''}" for f in factors
        )
        for axis, factors in placement.factors.items()
        if factors
    }


def some_meshes(devices: int, slices: int) -> list[dict[str, int]]:
    """Meshes with a single axis, and the squarest ones that the slices divide."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    model = min(
        divisors, key=lambda n: abs(n - math.sqrt(devices / slices)) if devices // n % slices == 0 else math.inf
    )
    data = max(n for n in divisors if devices // model % n == 0 and n <= devices // model // slices)
    shapes = {(1, devices // model, model), (devices // model // data, data, model), (devices, 1, 1), (1, devices, 1)}
    return [mesh(*shape) for shape in sorted(shapes | ({(1, 1, devices)} if slices == 1 else set()))]


@pytest.mark.parametrize("name", TPUS + ODD)
def test_every_device_has_unique_coordinates(name):
    """Covers tori with dimensions such as 10 and 14, and several slices."""
    hardware = parse_slice(name)
    cores = [hardware.generation.devices_per_chip] if hardware.generation.devices_per_chip > 1 else []
    limits = (*hardware.torus, *cores)
    for sizes in some_meshes(hardware.devices, hardware.slices):
        devices = place_mesh(hardware, sizes).coordinates()
        assert len(set(devices)) == len(devices) == hardware.devices
        for slice_index, coordinates in devices:
            assert 0 <= slice_index < hardware.slices
            assert len(coordinates) == len(limits)
            assert all(0 <= c < limit for c, limit in zip(coordinates, limits, strict=True))


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        # complete dimensions: a ring of eight, two rings of four
        ("v4-256", (1, 16, 8), {"model": "z8", "data": "x4 y4"}),
        ("v4-256", (1, 32, 4), {"model": "y4", "data": "x4 z8"}),
        ("v4-256", (1, 1, 128), {"model": "x4 y4 z8"}),
        # `data` gets a complete ring and its part of the other before `replica`, whose stride is two
        ("v4-256", (2, 16, 4), {"model": "y4", "data": "x2 z8", "replica": "x2/2"}),
        ("v5e-256", (1, 16, 16), {"model": "y16", "data": "x16"}),
        ("v5e-256", (1, 32, 8), {"model": "y8", "data": "x16 y2/8"}),
        # the dies of a chip are closer than chips
        ("tpu7x-128", (1, 16, 8), {"model": "z4 core2", "data": "x4 y4"}),
        ("tpu7x-128", (1, 64, 2), {"model": "core2", "data": "x4 y4 z4"}),
        ("v4:2x10x2", (1, 5, 8), {"model": "x2 y2 z2", "data": "y5/2"}),
        # slices are the major part of `replica`, then of `data`
        ("2xv4-256", (2, 16, 8), {"model": "z8", "data": "x4 y4"}),
        ("4xv4-256", (2, 32, 8), {"model": "z8", "data": "x4 y4"}),
        # virtual devices have no torus
        ("cpu-8", (1, 4, 2), {"replica": "replica1", "data": "data4", "model": "model2"}),
    ],
)
def test_placement_of_axes(name, sizes, expected):
    assert describe_placement(name, *sizes) == expected


def test_no_other_placement_is_better():
    """Of all placements of 2 x 16 x 4 on 4x4x8, `model` is a ring only on x or y; elsewhere it is a line or two halves.

    With `model` on y, `data` can have 2x8, 4x4, or 4x2 x 2 of x and z. Receiving 15 parts takes 1 + 2 * 7/2 units of a
    link (a pair, then a ring of pairs), or 3 * 1 + 4 * 3/2 (a line of four, then a ring).
    """
    placement = place_mesh(parse_slice("v4-256"), mesh(2, 16, 4))
    link = 4.5e10
    assert placement.collective_cost(CollectiveKind.ALL_GATHER, ("model",)).seconds_per_byte == pytest.approx(
        1 / (2 * link)
    )
    assert placement.collective_cost(CollectiveKind.ALL_GATHER, ("data",)).seconds_per_byte == pytest.approx(
        (1 + 7) / 15 / link
    )
    # with stride 2, two groups share a link
    assert placement.collective_cost(CollectiveKind.ALL_GATHER, ("replica",)).seconds_per_byte == pytest.approx(
        2 / link
    )
    # together they cover complete dimensions
    both = placement.collective_cost(CollectiveKind.ALL_GATHER, ("replica", "data"))
    assert both.seconds_per_byte == pytest.approx(1 / (4 * link))


@pytest.mark.parametrize(
    ("name", "sizes", "kind", "axes", "received", "seconds"),
    [
        # the ring of 8, the 2 rings of data, and all three dimensions
        ("v4-256", (1, 16, 8), "all-gather", ("model",), 8e9, 8e9 / 9e10 + 4 * HOP),
        ("v4-256", (1, 16, 8), "reduce-scatter", ("data",), 8e9, 8e9 / 18e10 + 4 * HOP),
        ("v4-256", (1, 16, 8), "all-gather", ("data", "model"), 8e9, 8e9 / 27e10 + 8 * HOP),
        # two rounds
        ("v4-256", (1, 16, 8), "all-reduce", ("model",), 8e9, 8e9 / 9e10 + 8 * HOP),
        # a quarter of the 8 x 8 GB crosses the middle in each direction, over two links
        ("v4-256", (1, 16, 8), "all-to-all", ("model",), 7e9, 8 * 8e9 / 4 / 9e10 + 4 * HOP),
        ("v4-256", (1, 16, 8), "collective-permute", ("model",), 8e9, 8e9 / 4.5e10 + HOP),
        # lines: 8 of the 16 devices of a ring, and all 8 without wraparound
        ("v5e-256", (1, 32, 8), "all-gather", ("model",), 8e9, 8e9 / 4.5e10 + 7 * HOP),
        ("v5e-64", (1, 8, 8), "all-gather", ("model",), 8e9, 8e9 / 4.5e10 + 7 * HOP),
        # 1 part over a distance of 8, with seven other groups on the links, then 15 times 2 around the ring
        ("v5e-256", (1, 32, 8), "all-gather", ("data",), 31e9, (8e9 + 30e9 / 2) / 4.5e10 + (8 + 8) * HOP),
        # the two dies of a chip share its links
        ("tpu7x-128", (1, 64, 2), "all-gather", ("model",), 1e9, 1e9 / 6e11 + HOP),
        ("tpu7x-128", (1, 16, 8), "all-gather", ("data",), 15e9, 15e9 / (4 * 1e11 / 2) + 4 * HOP),
        # each die of 4 chips receives 3 parts around the ring, and the others meanwhile from the other die of its chip
        ("tpu7x-128", (1, 16, 8), "all-gather", ("model",), 7e9, 3e9 / (2 * 1e11 / 2) + 3 * HOP),
        ("cpu-8", (1, 4, 2), "all-gather", ("data",), 3e9, 3e9 / 5e9 + 2 * HOP),
        ("v4-256", (1, 16, 8), "all-gather", ("replica",), 0.0, 0.0),
    ],
)
def test_collectives_by_hand(name, sizes, kind, axes, received, seconds):
    assert place_mesh(parse_slice(name), mesh(*sizes)).seconds(CollectiveKind(kind), axes, received) == pytest.approx(
        seconds
    )


def test_every_execution_has_the_latency_of_its_hops():
    placement = place_mesh(parse_slice("v4-256"), mesh(1, 16, 8))
    assert placement.seconds(CollectiveKind.ALL_GATHER, ("model",), 8e9, 1000) == pytest.approx(8e9 / 9e10 + 4000 * HOP)


@pytest.mark.parametrize(
    ("kind", "within", "across"),
    [
        # each of 32 devices in two slices receives 31 parts, 30 of them from its own slice
        ("all-gather", 30e9 / 18e10 + 4 * HOP, 1e9 / 6.25e9),
        ("all-reduce", 30e9 / 18e10 + 8 * HOP, 1e9 / 6.25e9),
        # 16 of 32 parts go to the other slice; of the other 16, a quarter of those of 4 devices cross the ring
        ("all-to-all", 16e9 * 4 / 4 / 9e10 + 4 * HOP, 16e9 / 6.25e9),
    ],
)
def test_slices_communicate_over_the_network(kind, within, across):
    placement = place_mesh(parse_slice("2xv4-256"), mesh(1, 32, 8))
    assert placement.seconds(CollectiveKind(kind), ("data",), 31e9) == pytest.approx(within + across)
    assert "network" in placement.collective_cost(CollectiveKind(kind), ("data",)).links
    assert "network" not in placement.collective_cost(CollectiveKind(kind), ("model",)).links


def test_permutes_between_slices():
    """Every device sends 1 GB to the same coordinates of the other slice; the dies of a chip share its network."""
    for name, sharing, bandwidth in (("2xv4-8", 1, 6.25e9), ("2xtpu7x-8", 2, 1.25e10)):
        hardware = parse_slice(name)
        half = hardware.devices // 2
        placement = place_mesh(hardware, mesh(2, half, 1))
        pairs = tuple((i, (i + half) % (2 * half)) for i in range(2 * half))
        assert placement.permute_cost(pairs).seconds(1e9) == pytest.approx(sharing * 1e9 / bandwidth)
        assert placement.permute_cost(pairs).links == {"network"}


def test_links_of_collectives():
    """`model` on z and `data` on x and y share no link; a shift around a ring uses one direction."""
    placement = place_mesh(parse_slice("v4-256"), mesh(1, 16, 8))
    assert placement.collective_cost(CollectiveKind.ALL_GATHER, ("model",)).links == {"z+", "z-"}
    assert placement.collective_cost(CollectiveKind.ALL_GATHER, ("data",)).links == {"x+", "x-", "y+", "y-"}
    assert placement.collective_cost(CollectiveKind.COLLECTIVE_PERMUTE, ("model",)).links == {"z+"}
    # around y, and from the end of one row to the next
    assert placement.collective_cost(CollectiveKind.COLLECTIVE_PERMUTE, ("data",)).links == {"x+", "y+"}


@pytest.mark.parametrize(
    ("name", "wraps"),
    [
        ("v4:2x2x4", (False, False, False)),
        ("v4-128", (True, True, True)),
        ("v5p:4x4x12", (True, True, True)),
        ("v4:4x4x6", (False, False, False)),
        ("v5e-128", (False, True)),
        ("v6e-256", (True, True)),
        ("v3:16x32", (False, False)),
        ("v3:32x32", (True, True)),
        ("tpu7x-16", (False, False, False)),
    ],
)
def test_wraparound(name, wraps):
    assert parse_slice(name).wraps == wraps


def test_slices_that_no_mesh_axis_can_cross(raises_message):
    with raises_message(ConfigError):
        place_mesh(parse_slice("2xv4-8"), mesh(1, 1, 8))


def test_placement_takes_little_work():
    """The planner places about a hundred meshes, each with a few thousand calls."""
    hardware = parse_slice("v4:16x16x16")
    shapes = [mesh(2**r, 2**d, 2 ** (12 - r - d)) for r in range(13) for d in range(13 - r)]
    _place_mesh.cache_clear()
    assert work_of(lambda: [place_mesh(hardware, shape) for shape in shapes]) / len(shapes) < 20_000


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v4-256", (4, 8, 4)), ("v5p-128", (2, 32, 1)), ("v5e-64", (8, 4, 2)), ("tpu7x-16", (4, 2, 2)),
        ("2xv5e-16", (4, 2, 4)), ("v5p-16", (1, 8, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("axes", [("replica",), ("data",), ("replica", "data")])
@pytest.mark.parametrize("distance", [1, 3])
def test_permute_along_mesh_axes_costs_the_same_as_all_pairs(name, mesh, axes, distance):
    """A collective permute is computed from only those devices that share links."""
    sizes = dict(zip(("replica", "data", "model"), mesh, strict=True))
    placement = place_mesh(parse_slice(name), sizes)
    numbers = np.arange(math.prod(mesh)).reshape(mesh)
    along = [list(sizes).index(axis) for axis in axes]
    rows = np.moveaxis(numbers, along, range(len(along))).reshape(math.prod(sizes[axis] for axis in axes), -1)
    pairs = tuple(zip(rows.reshape(-1).tolist(), np.roll(rows, -distance, axis=0).reshape(-1).tolist(), strict=True))
    if len(rows) > 1:
        assert placement.shift_cost(axes, distance).seconds(2**20, 1) == pytest.approx(
            placement.permute_cost(pairs).seconds(2**20, 1)
        )


@pytest.mark.parametrize(
    ("name", "sizes", "minor"),
    [("v5p-128", (1, 64, 1), 8), ("v5p-128", (2, 8, 4), 4), ("v4:4x4x6", (1, 96, 1), 12), ("2xv5e-16", (4, 4, 2), 2),
     ("tpu7x-16", (1, 16, 1), 2)],
)  # fmt: skip
def test_an_axis_that_is_split_has_the_same_devices_in_the_same_order(name, sizes, minor):
    placement = place_mesh(parse_slice(name), mesh(*sizes))
    split = placement.split_axis("data", minor, "minor")
    assert list(split.mesh.items()) == [
        ("replica", sizes[0]), ("data", sizes[1] // minor), ("minor", minor), ("model", sizes[2])
    ]  # fmt: skip
    assert split.coordinates() == placement.coordinates()
    both = ("data", "minor")
    for kind in (CollectiveKind.ALL_GATHER, CollectiveKind.ALL_TO_ALL):
        assert split.seconds(kind, both, 1e9) == pytest.approx(placement.seconds(kind, ("data",), 1e9))


def test_an_axis_that_cannot_be_split():
    """Groups of 4 neighbours of a 6 x 6 torus are no part of its dimensions."""
    assert place_mesh(parse_slice("cpu-36"), {"data": 36}).split_axis("data", 8, "minor") is None
