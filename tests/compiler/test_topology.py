"""The TPU compiler's devices of a slice are as the planner assumes, and meshes of them are arranged alike."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from shardplan.errors import ConfigError
from shardplan.hardware import GENERATIONS, Slice, parse_slice, place_mesh
from shardplan.verify.compiler.libtpu import INSTALL_LIBTPU, libtpu_environment
from shardplan.verify.compiler.topology import make_topology_mesh

pytest.importorskip("libtpu")
pytestmark = pytest.mark.usefixtures("tpu_compiler")

ROOT = Path(__file__).parents[2]
TIMEOUT = 120
"""Seconds after which a hang is a failure."""
MAX_DEVICES = 512
"""Slices with more devices are not tested, except for the largest of a generation."""

KINDS = {
    "v3": "TPU v3",
    "v4": "TPU v4",
    "v5e": "TPU v5 lite",
    "v5p": "TPU v5",
    "v6e": "TPU v6 lite",
    "tpu7x": "TPU7x",
}
"""Generation -> JAX's name for its devices."""
ODD = {"v3": "8x4", "v4": "4x12x4", "v5e": "8x4", "v5p": "12x4x4", "v6e": "8x4", "tpu7x": "4x4x12"}

SCRIPT = """
import json, sys
from shardplan.hardware import parse_slice
from shardplan.runtime.devices import slice_from
from shardplan.verify.compiler.topology import make_topology_mesh

for name, sizes in json.load(sys.stdin):
    devices = make_topology_mesh(parse_slice(name), sizes).devices
    print(json.dumps({
        "name": name,
        "shape": list(devices.shape),
        "kinds": sorted({device.device_kind for device in devices.flat}),
        "ids": sorted(device.id for device in devices.flat),
        "coords": [list(device.coords) for device in devices.flat],
        "cores": [device.core_on_chip for device in devices.flat],
        "slice": slice_from(list(devices.flat)).name,
        "slices": [getattr(device, "slice_index", 0) or 0 for device in devices.flat],
    }))
"""


def meshes_of(cases: list[tuple[str, dict[str, int]]]) -> tuple[list[dict], str]:
    """The compiler's mesh for each (slice, mesh sizes), and what the process that made them wrote to stderr."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(("TPU_", "JAX_", "ALLOW_"))}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        cwd=ROOT,
        env={**own, **libtpu_environment(parse_slice(cases[0][0]))},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()], done.stderr


def sizes_of(name: str, replica: int = 1) -> dict[str, int]:
    """Mesh sizes for a slice, with data x model as square as possible."""
    left = parse_slice(name).devices // replica
    data = max(size for size in range(1, math.isqrt(left) + 1) if left % size == 0)
    return {"replica": replica, "data": data, "model": left // data}


@pytest.mark.parametrize("generation", GENERATIONS)
def test_every_size(generation):
    row = GENERATIONS[generation]
    tori = [f"{generation}:{'x'.join(map(str, torus))}" for torus in row.sizes]
    names = [name for name in tori if parse_slice(name).devices <= MAX_DEVICES] + [f"{generation}:{ODD[generation]}"]
    cases = [(name, sizes_of(name)) for name in names]
    cases += [(f"2x{name}", sizes_of(f"2x{name}", replica=2)) for name in names[1:3]]
    cases.append((tori[-1], sizes_of(tori[-1])))  # the whole pod
    meshes, errors = meshes_of(cases)
    assert errors == ""
    assert len(meshes) == len(cases)
    for (name, sizes), mesh in zip(cases, meshes, strict=True):
        hardware = parse_slice(name)
        assert mesh["name"] == name
        assert mesh["shape"] == list(sizes.values())
        assert mesh["kinds"] == [KINDS[generation]]
        assert len(set(mesh["ids"])) == hardware.devices
        torus = [max(axis) + 1 for axis in islice(zip(*mesh["coords"], strict=True), len(hardware.torus))]
        assert torus == list(hardware.torus)
        assert len(set(mesh["slices"])) == hardware.slices
        assert parse_slice(mesh["slice"]) == dataclasses.replace(hardware, name=mesh["slice"])
        cores = hardware.generation.devices_per_chip
        assert len(set(mesh["cores"])) == cores
        coordinates = [
            (number, (*coords[: len(torus)], *([core] if cores > 1 else [])))
            for number, coords, core in zip(mesh["slices"], mesh["coords"], mesh["cores"], strict=True)
        ]
        assert coordinates == place_mesh(hardware, sizes).coordinates()


@pytest.fixture(scope="module", autouse=True)
def quiet():
    with pytest.MonkeyPatch.context() as patch:
        for key, value in libtpu_environment(parse_slice("v4-8")).items():
            patch.setenv(key, value)
        yield


def slice_indices(mesh) -> list:
    return [[[device.slice_index for device in row] for row in plane] for plane in mesh.devices]


def test_axes_are_auto():
    from jax.sharding import AxisType

    mesh = make_topology_mesh(parse_slice("v4:4x4x4"), {"replica": 1, "data": 16, "model": 4})
    assert mesh.axis_names == ("replica", "data", "model")
    assert set(mesh.axis_types) == {AxisType.Auto}
    # the model axis is a ring on the torus
    assert all(
        sum(a != b for a, b in zip(row[i].coords, row[i - 1].coords, strict=True)) == 1
        for row in mesh.devices[0]
        for i in range(4)
    )


@pytest.mark.parametrize(
    ("name", "sizes", "indices"),
    [
        # replica alone crosses slices, then with data, then data alone
        ("2xv4:2x2x1", (2, 2, 2), [[[0, 0], [0, 0]], [[1, 1], [1, 1]]]),
        ("2xv4:2x2x1", (4, 1, 2), [[[0, 0]], [[0, 0]], [[1, 1]], [[1, 1]]]),
        ("2xv4:2x2x1", (1, 4, 2), [[[0, 0], [0, 0], [1, 1], [1, 1]]]),
        ("4xv4:2x2x1", (2, 4, 2), [[[0, 0], [0, 0], [1, 1], [1, 1]], [[2, 2], [2, 2], [3, 3], [3, 3]]]),
    ],
)
def test_slices_are_outermost(name, sizes, indices):
    from jax.experimental import mesh_utils

    mesh = make_topology_mesh(parse_slice(name), dict(zip(("replica", "data", "model"), sizes, strict=True)))
    assert slice_indices(mesh) == indices
    # JAX arranges slices in the same way
    slices = parse_slice(name).slices
    replica = math.gcd(slices, sizes[0])
    outer = (replica, slices // replica, 1)
    inner = [size // part for size, part in zip(sizes, outer, strict=True)]
    devices = sorted(mesh.devices.flat, key=lambda device: device.id)
    expected = mesh_utils.create_hybrid_device_mesh(inner, outer, devices, allow_split_physical_axes=True)
    assert [device.slice_index for device in expected.flat] == [device.slice_index for device in mesh.devices.flat]


def test_a_torus_that_jax_cannot_arrange():
    """create_device_mesh loses a prime factor of 10; here data is five pairs along y, and model the chips of a pair."""
    hardware = Slice("v4:2x10x2", GENERATIONS["v4"], (2, 10, 2))  # which Google Cloud does not have
    mesh = make_topology_mesh(hardware, {"replica": 1, "data": 5, "model": 8})
    for i, block in enumerate(mesh.devices[0]):
        assert {device.coords[1] for device in block} == {2 * i, 2 * i + 1}
    assert len({device.id for device in mesh.devices.flat}) == 40


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        (
            "4xv4:2x2x1",
            (1, 2, 8),
            "the 4 slices do not divide replica x data = 2, and only these mesh axes cross slices; "
            "make mesh.replica or mesh.data a multiple of 4",
        ),
        (
            "v4-8",
            (1, 2, 4),
            "the mesh needs 8 devices, v4-8 has 4; replica x data x model must be 4",
        ),
        ("cpu-8", (1, 2, 4), "hardware.slice cpu-8 has no TPU compiler; plan for a TPU slice, such as v4-8"),
    ],
)
def test_bad_meshes(name, sizes, message):
    with pytest.raises(ConfigError) as error:
        make_topology_mesh(parse_slice(name), dict(zip(("replica", "data", "model"), sizes, strict=True)))
    assert str(error.value) == message


def test_without_libtpu(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=f"needs libtpu: {re.escape(INSTALL_LIBTPU)}$"):
        make_topology_mesh(parse_slice("v4-8"), {"replica": 1, "data": 1, "model": 4})
