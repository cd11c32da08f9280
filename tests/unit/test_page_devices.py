"""The devices of a page: drawn once each, on their torus, with the tiles that they hold."""

import math

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from report_plans import planned

from shardplan.report.page.panels.torus import draw_slice, make_tiling, mesh_coordinates, tilings_of


def test_tiles_are_those_of_jax():
    """Devices hold the same tile exactly where JAX gives them the same part of the array."""
    sizes = {"replica": 2, "data": 2, "model": 2}
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 2), tuple(sizes))
    shape = {"a": 8, "b": 16}
    for spec in ([None, None], [["data"], None], [["model", "data"], ["replica"]], [["data"], ["model", "replica"]]):
        tiling = make_tiling("array", shape, spec, sizes)
        tiles = [tiling.tile(at) for at in mesh_coordinates(sizes)]
        sharding = NamedSharding(mesh, PartitionSpec(*(tuple(axes) if axes else None for axes in spec)))
        parts = sharding.devices_indices_map(tuple(shape.values()))
        indices = [tuple((part.start or 0) for part in parts[device]) for device in mesh.devices.flat]
        order = sorted(set(indices))
        assert tiles == [order.index(index) for index in indices], spec  # in row-major order
        assert set(tiles) == set(range(tiling.tiles))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eval", "train"])
def test_every_replica_group_holds_each_tile_once(kind):
    plan = planned(kind)
    for tiling, parameter in zip(tilings_of(plan), plan.parameters, strict=False):
        tiles = [tiling.tile(at) for at in mesh_coordinates(plan.mesh)]
        copies = plan.hardware.devices // tiling.tiles
        assert all(tiles.count(tile) == copies for tile in range(tiling.tiles)), parameter.path
        assert parameter.bytes_per_device * tiling.tiles == 2 * math.prod(parameter.axes.values()) * (
            2 if plan.workload.param_dtype == "float32" else 1
        )


@pytest.mark.parametrize(
    ("name", "mesh", "layers"),
    [
        ("v4-256", {"replica": 4, "data": 8, "model": 4}, 8),
        ("v5e-8", {"replica": 1, "data": 8, "model": 1}, 1),
        ("v3-8", {"replica": 1, "data": 4, "model": 2}, 1),
        ("tpu7x-16", {"replica": 1, "data": 8, "model": 2}, 2),
        ("2xv5e-16", {"replica": 2, "data": 16, "model": 1}, 2),
        ("cpu-8", {"replica": 2, "data": 2, "model": 2}, 2),
    ],
)
def test_every_device_is_drawn_once(name, mesh, layers):
    drawing = draw_slice(name, mesh)
    cells = [(layer.title, cell) for layer in drawing.layers for cell in layer.cells]
    assert sorted(cell.device for _, cell in cells) == list(range(math.prod(mesh.values())))
    assert len({(title, cell.x, cell.y) for title, cell in cells}) == len(cells)
    assert len(drawing.layers) == layers and len(drawing.locations) == len(cells)
    for layer in drawing.layers:
        assert all(cell.x + cell.width <= layer.width and cell.y < layer.height for cell in layer.cells)


def test_of_a_large_slice_the_first_devices_are_drawn():
    drawing = draw_slice("v5p:16x16x24", {"replica": 1, "data": 1536, "model": 4})
    assert (drawing.drawn, drawing.devices) == (2048, 6144) and len(drawing.layers) == 8


def test_mesh_axes_on_the_torus():
    drawing = draw_slice("v4-256", {"replica": 4, "data": 8, "model": 4})
    assert drawing.axes == [
        ("replica", 4, "4 along x (the whole ring)"),
        ("data", 8, "8 along z (the whole ring)"),
        ("model", 4, "4 along y (the whole ring)"),
    ]
    assert drawing.dimensions[2] == "z (from block to block): a ring of 8, data 8"
    [_, (_, _, data), _] = draw_slice("2xv5e-16", {"replica": 2, "data": 16, "model": 1}).axes
    assert data == "4 along x (the whole line) x 4 along y (the whole line)"
