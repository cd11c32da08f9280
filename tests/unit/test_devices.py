"""Arrangement of devices as a mesh: TPUs by their torus coordinates, other devices by id."""

import contextlib
import random
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace

import jax
import pytest

from shardplan.errors import ConfigError
from shardplan.hardware import GENERATIONS, parse_slice, place_mesh
from shardplan.runtime.devices import arrange, slice_from
from shardplan.runtime.generation import check_generation


@dataclass(frozen=True)
class Tpu:
    """A TPU device with the attributes that JAX gives it; z is 0 on a torus with two dimensions."""

    id: int
    coords: list[int]
    core_on_chip: int
    slice_index: int

    def __hash__(self) -> int:
        return self.id


@dataclass(frozen=True)
class Cpu:
    id: int


def tpus(name: str, origin: tuple[int, int, int] = (0, 0, 0)) -> list[Tpu]:
    """The devices of a slice whose first chip is at `origin` in the pod, shuffled."""
    hardware = parse_slice(name)
    sides = [hardware.slices, *hardware.torus, *[1] * (3 - len(hardware.torus)), hardware.generation.devices_per_chip]
    devices = [
        Tpu(i, [c + o for c, o in zip(index[1:4], origin, strict=True)], index[4], index[0])
        for i, index in enumerate(product(*map(range, sides)))
    ]
    random.Random(0).shuffle(devices)
    return devices


def sizes(replica: int, data: int, model: int) -> dict[str, int]:
    return {"replica": replica, "data": data, "model": model}


NAMES = [f"{g.name}:{'x'.join(map(str, torus))}" for g in GENERATIONS.values() for torus in g.sizes]


@pytest.mark.parametrize(
    "name", [n for n in NAMES if parse_slice(n).devices <= 512] + ["v4:12x4x4", "v4:4x4x20", "2xv5e:8x4", "2xtpu7x-16"]
)
def test_devices_are_arranged_by_the_mesh_placement(name):
    hardware = parse_slice(name)
    half = max(n for n in (1, 2, 4, 8) if hardware.devices // hardware.slices % n == 0)
    for shape in (
        sizes(hardware.slices, hardware.devices // hardware.slices // half, half),
        sizes(hardware.devices, 1, 1),
    ):
        mesh = arrange(tpus(name), hardware, shape)
        assert mesh.devices.shape == tuple(shape.values())
        assert mesh.axis_names == tuple(shape)
        assert {device.id for device in mesh.devices.flat} == set(range(hardware.devices))
        rank, cores = len(hardware.torus), hardware.generation.devices_per_chip
        coordinates = [
            (d.slice_index, (*d.coords[:rank], *([d.core_on_chip] if cores > 1 else []))) for d in mesh.devices.flat
        ]
        assert coordinates == place_mesh(hardware, shape).coordinates()


def test_slice_inside_its_pod():
    """Coordinates may start anywhere, and the torus may be rotated."""
    hardware = parse_slice("v5e:2x4")
    mesh = arrange(tpus("v5e:4x2", (4, 8, 0)), hardware, sizes(1, 2, 4))
    for row in mesh.devices[0]:
        assert [device.coords[0] for device in row] == [4, 5, 6, 7]
        assert len({device.coords[1] for device in row}) == 1


def test_devices_that_do_not_fill_a_torus(raises_message):
    """Four planes have three chips each, in the shape of an L."""
    devices = [device for device in tpus("v4:2x2x4") if device.coords[:2] != [1, 1]]
    with raises_message(ConfigError):
        arrange(devices, parse_slice("v4:2x2x4"), sizes(1, 4, 3))


@pytest.mark.parametrize("name", ["cpu-8", "v4-16"])
def test_virtual_devices_are_ordered_by_id(name):
    """CPU devices are ordered by id, whatever slice the plan is for."""
    devices = [Cpu(i) for i in (3, 1, 2, 0, 7, 5, 6, 4)]
    mesh = arrange(devices, parse_slice(name), sizes(1, 4, 2))
    assert [device.id for device in mesh.devices.flat] == list(range(8))


def test_devices_of_another_generation_are_refused(monkeypatch, raises_message):
    """As many of them have other memory and speed than the plan counts with; a kind without data passes."""
    for kind in ("TPU v4", "TPU v9", "TPU v5"):
        monkeypatch.setattr(jax, "devices", lambda kind=kind: [SimpleNamespace(device_kind=kind)] * 4)
        with raises_message(ConfigError) if kind == "TPU v5" else contextlib.nullcontext():
            check_generation(parse_slice("v4-8"))


def test_slice_of_devices(raises_message):
    """Slices of TPU devices are tested in tests/compiler/test_topology.py."""
    assert slice_from(jax.devices()[:5]).name == "cpu-5"
    with raises_message(ConfigError):
        slice_from([SimpleNamespace(platform="gpu", device_kind="NVIDIA H200")])
