"""Where meshes lie on tori, and what their collectives cost, against calculations by hand."""

import math
import time

import numpy as np
import pytest

from shardplan.errors import ConfigError
from shardplan.hardware import GENERATIONS, parse_slice, place_mesh
from shardplan.hardware.mesh_placement import _place_mesh

AXES = ("replica", "data", "model")
HOP = 1e-6
TPUS = [
    f"{generation.name}:{'x'.join(map(str, torus))}"
    for generation in GENERATIONS.values()
    for torus in generation.sizes
]
ODD = ["v4:2x10x2", "v4:2x2x14", "v5p:6x2x3", "v3:2x6", "v5e:4x6", "tpu7x:2x2x5", "2xv4:2x10x14", "4xtpu7x-128"]


def mesh(*sizes: int) -> dict[str, int]:
    return dict(zip(AXES, sizes, strict=True))


def lies(name: str, *sizes: int) -> dict[str, str]:
    """Mesh axis -> its factors: `y4` is all, or the first, of dimension y; `y4/2` is four places, two apart."""
    placement = place_mesh(parse_slice(name), mesh(*sizes))
    return {
        axis: " ".join(
            f"{placement.dimensions[f.dimension].name}{f.size}{f'/{f.stride}' if f.stride > 1 else ''}" for f in factors
        )
        for axis, factors in placement.factors.items()
        if factors
    }


def some_meshes(devices: int, slices: int) -> list[dict[str, int]]:
    """Every axis alone, and the most square ones that the slices divide."""
    divisors = [n for n in range(1, devices + 1) if devices % n == 0]
    model = min(
        divisors, key=lambda n: abs(n - math.sqrt(devices / slices)) if devices // n % slices == 0 else math.inf
    )
    data = max(n for n in divisors if devices // model % n == 0 and n <= devices // model // slices)
    shapes = {(1, devices // model, model), (devices // model // data, data, model), (devices, 1, 1), (1, devices, 1)}
    return [mesh(*shape) for shape in sorted(shapes | ({(1, 1, devices)} if slices == 1 else set()))]


@pytest.mark.parametrize("name", TPUS + ODD)
def test_every_device_has_one_place(name):
    """In tori with dimensions such as 10 and 14, and in several slices, too."""
    hardware = parse_slice(name)
    cores = [hardware.generation.devices_per_chip] if hardware.generation.devices_per_chip > 1 else []
    limits = (*hardware.torus, *cores)
    for sizes in some_meshes(hardware.devices, hardware.slices):
        places = place_mesh(hardware, sizes).places()
        assert len(set(places)) == len(places) == hardware.devices
        for number, place in places:
            assert 0 <= number < hardware.slices
            assert len(place) == len(limits)
            assert all(0 <= c < limit for c, limit in zip(place, limits, strict=True))


@pytest.mark.parametrize(
    ("name", "sizes", "expected"),
    [
        # whole dimensions: a ring of eight, two rings of four
        ("v4-256", (1, 16, 8), {"model": "z8", "data": "x4 y4"}),
        ("v4-256", (1, 32, 4), {"model": "y4", "data": "x4 z8"}),
        ("v4-256", (1, 1, 128), {"model": "x4 y4 z8"}),
        # `data` gets a whole ring and its part of the other before `replica`, whose places are two apart
        ("v4-256", (2, 16, 4), {"model": "y4", "data": "x2 z8", "replica": "x2/2"}),
        ("v5e-256", (1, 16, 16), {"model": "y16", "data": "x16"}),
        ("v5e-256", (1, 32, 8), {"model": "y8", "data": "x16 y2/8"}),
        # the dies of a chip are closer than chips
        ("tpu7x-128", (1, 16, 8), {"model": "z4 core2", "data": "x4 y4"}),
        ("tpu7x-128", (1, 64, 2), {"model": "core2", "data": "x4 y4 z4"}),
        ("v4:2x10x2", (1, 5, 8), {"model": "x2 y2 z2", "data": "y5/2"}),
        # slices are the outermost part of `replica`, then of `data`
        ("2xv4-256", (2, 16, 8), {"model": "z8", "data": "x4 y4"}),
        ("4xv4-256", (2, 32, 8), {"model": "z8", "data": "x4 y4"}),
        # virtual devices have no torus
        ("cpu-8", (1, 4, 2), {"replica": "replica1", "data": "data4", "model": "model2"}),
    ],
)
def test_where_axes_lie(name, sizes, expected):
    assert lies(name, *sizes) == expected


def test_no_other_embedding_is_better():
    """Of all 4x4x8 = 2 x 16 x 4, counted by hand: `model` on x or y is a ring, anywhere else a line or two halves.

    With `model` on y, `data` can have 2x8, 4x4, or 4x2 x 2 of x and z. Receiving 15 parts takes 1 + 2 * 7/2 units of a
    link (a pair, then a ring of pairs), or 3 * 1 + 4 * 3/2 (a line of four, then a ring).
    """
    placement = place_mesh(parse_slice("v4-256"), mesh(2, 16, 4))
    link = 4.5e10
    assert placement.collective("all-gather", ("model",)).seconds_per_byte == pytest.approx(1 / (2 * link))
    assert placement.collective("all-gather", ("data",)).seconds_per_byte == pytest.approx((1 + 7) / 15 / link)
    # two apart, so that two groups share a link
    assert placement.collective("all-gather", ("replica",)).seconds_per_byte == pytest.approx(2 / link)
    # together they are whole again
    both = placement.collective("all-gather", ("replica", "data"))
    assert both.seconds_per_byte == pytest.approx(1 / (4 * link))


@pytest.mark.parametrize(
    ("name", "sizes", "kind", "axes", "received", "seconds"),
    [
        # the ring of 8, the 2 rings of data, and all three dimensions
        ("v4-256", (1, 16, 8), "all-gather", ("model",), 8e9, 8e9 / 9e10 + 4 * HOP),
        ("v4-256", (1, 16, 8), "reduce-scatter", ("data",), 8e9, 8e9 / 18e10 + 4 * HOP),
        ("v4-256", (1, 16, 8), "all-gather", ("data", "model"), 8e9, 8e9 / 27e10 + 8 * HOP),
        # twice around
        ("v4-256", (1, 16, 8), "all-reduce", ("model",), 8e9, 8e9 / 9e10 + 8 * HOP),
        # of what all 8 have, 8 GB each, a quarter crosses the middle either way, over two links
        ("v4-256", (1, 16, 8), "all-to-all", ("model",), 7e9, 8 * 8e9 / 4 / 9e10 + 4 * HOP),
        ("v4-256", (1, 16, 8), "collective-permute", ("model",), 8e9, 8e9 / 4.5e10 + HOP),
        # lines: 8 of the 16 places of a ring, and all 8 where there is no wraparound
        ("v5e-256", (1, 32, 8), "all-gather", ("model",), 8e9, 8e9 / 4.5e10 + 7 * HOP),
        ("v5e-64", (1, 8, 8), "all-gather", ("model",), 8e9, 8e9 / 4.5e10 + 7 * HOP),
        # 1 part from 8 places on, with seven other groups on the links, then 15 times 2 around the ring
        ("v5e-256", (1, 32, 8), "all-gather", ("data",), 31e9, (8e9 + 30e9 / 2) / 4.5e10 + (8 + 8) * HOP),
        # the two dies of a chip share its links
        ("tpu7x-128", (1, 64, 2), "all-gather", ("model",), 1e9, 1e9 / 6e11 + HOP),
        ("tpu7x-128", (1, 16, 8), "all-gather", ("data",), 15e9, 15e9 / (4 * 1e11 / 2) + 4 * HOP),
        # around the ring each die of 4 chips receives 3 parts, the others meanwhile from its neighbour on the chip
        ("tpu7x-128", (1, 16, 8), "all-gather", ("model",), 7e9, 3e9 / (2 * 1e11 / 2) + 3 * HOP),
        ("cpu-8", (1, 4, 2), "all-gather", ("data",), 3e9, 3e9 / 5e9 + 2 * HOP),
        ("v4-256", (1, 16, 8), "all-gather", ("replica",), 0.0, 0.0),
    ],
)
def test_collectives_by_hand(name, sizes, kind, axes, received, seconds):
    assert place_mesh(parse_slice(name), mesh(*sizes)).seconds(kind, axes, received) == pytest.approx(seconds)


def test_executions_take_the_hops_each():
    placement = place_mesh(parse_slice("v4-256"), mesh(1, 16, 8))
    assert placement.seconds("all-gather", ("model",), 8e9, 1000) == pytest.approx(8e9 / 9e10 + 4000 * HOP)


@pytest.mark.parametrize(
    ("kind", "within", "across"),
    [
        # of 32 devices in two slices each receives 31 parts, 30 from its own slice
        ("all-gather", 30e9 / 18e10 + 4 * HOP, 1e9 / 6.25e9),
        ("all-reduce", 30e9 / 18e10 + 8 * HOP, 1e9 / 6.25e9),
        # 16 of its 32 parts are for the other slice; of the 16 of its own, a quarter of those of 4 cross a ring
        ("all-to-all", 16e9 * 4 / 4 / 9e10 + 4 * HOP, 16e9 / 6.25e9),
    ],
)
def test_slices_take_the_network(kind, within, across):
    placement = place_mesh(parse_slice("2xv4-256"), mesh(1, 32, 8))
    assert placement.seconds(kind, ("data",), 31e9) == pytest.approx(within + across)
    assert "network" in placement.collective(kind, ("data",)).links
    assert "network" not in placement.collective(kind, ("model",)).links


def test_permutes_between_slices():
    """Everybody sends 1 GB to the same place of the other slice; the dies of a chip share its network."""
    for name, sharing, bandwidth in (("2xv4-8", 1, 6.25e9), ("2xtpu7x-8", 2, 1.25e10)):
        hardware = parse_slice(name)
        half = hardware.devices // 2
        placement = place_mesh(hardware, mesh(2, half, 1))
        pairs = tuple((i, (i + half) % (2 * half)) for i in range(2 * half))
        assert placement.permute(pairs).seconds(1e9) == pytest.approx(sharing * 1e9 / bandwidth)
        assert placement.permute(pairs).links == {"network"}


def test_links_that_collectives_share():
    """`model` on z and `data` on x and y do not meet; a shift around a ring takes one direction."""
    placement = place_mesh(parse_slice("v4-256"), mesh(1, 16, 8))
    assert placement.collective("all-gather", ("model",)).links == {"z+", "z-"}
    assert placement.collective("all-gather", ("data",)).links == {"x+", "x-", "y+", "y-"}
    assert placement.collective("collective-permute", ("model",)).links == {"z+"}
    # around y, and from the end of a row on to the next
    assert placement.collective("collective-permute", ("data",)).links == {"x+", "y+"}


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


def test_slices_that_no_axis_can_cross():
    with pytest.raises(ConfigError, match="the 2 slices do not divide replica x data = 1"):
        place_mesh(parse_slice("2xv4-8"), mesh(1, 1, 8))


def test_the_search_is_quick():
    """The planner asks for about a hundred meshes."""
    hardware = parse_slice("v4:16x16x16")
    shapes = [mesh(2**r, 2**d, 2 ** (12 - r - d)) for r in range(13) for d in range(13 - r)]
    _place_mesh.cache_clear()
    started = time.process_time()
    for shape in shapes:
        place_mesh(hardware, shape)
    assert (time.process_time() - started) / len(shapes) < 0.005


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        ("v4-256", (4, 8, 4)), ("v5p-128", (2, 32, 1)), ("v5e-64", (8, 4, 2)), ("tpu7x-16", (4, 2, 2)),
        ("2xv5e-16", (4, 2, 4)), ("v5p-16", (1, 8, 1)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("axes", [("replica",), ("data",), ("replica", "data")])
def test_a_permute_along_mesh_axes_is_that_of_all_pairs(name, mesh, axes):
    """Counted on the devices that share links alone."""
    sizes = dict(zip(("replica", "data", "model"), mesh, strict=True))
    placement = place_mesh(parse_slice(name), sizes)
    numbers = np.arange(math.prod(mesh)).reshape(mesh)
    along = [list(sizes).index(axis) for axis in axes]
    rows = np.moveaxis(numbers, along, range(len(along))).reshape(math.prod(sizes[axis] for axis in axes), -1)
    pairs = tuple(zip(rows.reshape(-1).tolist(), np.roll(rows, -1, axis=0).reshape(-1).tolist(), strict=True))
    kind = "collective-permute"
    if len(rows) > 1:
        assert placement.collective(kind, axes).seconds(2**20, 1) == pytest.approx(
            placement.permute(pairs).seconds(2**20, 1)
        )
