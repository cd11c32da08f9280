"""The devices of a TPU slice as its compiler knows them, arranged as a mesh; no TPU is needed.

The library that holds the compiler, libtpu, reads its environment when it is first used: start a process with
`environment(hardware)`. That process can have slices of other sizes and generations too.
"""

import importlib.util
import logging
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jax import Device
from jax.experimental import mesh_utils, topologies
from jax.sharding import AxisType, Mesh

from shardplan.errors import ConfigError
from shardplan.hardware import Slice

SLICE_AXES = ("replica", "data")
"""The mesh axes that may cross slices, the one that does so first in front."""

logger = logging.getLogger(__name__)


def environment(hardware: Slice) -> dict[str, str]:
    """Variables to set before a process first uses libtpu: with them it prints nothing, and asks no network service.

    Raises:
        ConfigError: `hardware` is not a TPU slice.
    """
    generation = _check_is_tpu(hardware).generation
    cores = math.prod(generation.sizes[0]) * generation.name_counts_per_chip
    return {
        # JAX itself runs on the CPU; it must not look for a TPU
        "JAX_PLATFORMS": "cpu",
        # neither ask Google Cloud's metadata server what this machine is ...
        "TPU_SKIP_MDS_QUERY": "1",
        # ... but tell libtpu, which else complains. Any size will do: what is compiled for is asked for by its torus.
        # The smallest is one that libtpu knows, which it does not of every v3.
        "TPU_ACCELERATOR_TYPE": f"{generation.name}-{cores}",
        "TPU_WORKER_HOSTNAMES": "localhost",
        # else a second process that uses libtpu at the same time aborts
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }


def make_topology_mesh(hardware: Slice, sizes: Mapping[str, int]) -> Mesh:
    """All devices of `hardware` as a mesh with Auto axes `sizes` (name -> size, major to minor), to compile for.

    Within a slice neighbours are kept close on the torus, as at run time. Where JAX cannot embed the mesh in the torus,
    the devices are in order of their numbers instead, and a warning is logged. Slices are the outermost part of
    `replica`, and of `data` where `replica` is too small.

    Raises:
        ConfigError: `sizes` do not fit the devices or the slices, `hardware` is no TPU slice, or libtpu is missing.
    """
    _check_is_tpu(hardware)
    wanted = math.prod(sizes.values())
    if wanted != hardware.devices:
        raise ConfigError(
            f"the mesh needs {wanted} devices, {hardware.name} has {hardware.devices}; "
            f"{' x '.join(sizes)} must be {hardware.devices}"
        )
    outer = _slices_by_axis(hardware, sizes)
    inner = tuple(size // part for size, part in zip(sizes.values(), outer, strict=True))
    devices = _devices(hardware)
    per_slice = len(devices) // hardware.slices
    blocks = np.stack([_embed(hardware, inner, devices[i : i + per_slice]) for i in range(0, len(devices), per_slice)])
    # array of shape outer + inner; every axis of the mesh is its part in outer, then its part in inner
    axes = [axis for i in range(len(sizes)) for axis in (i, len(sizes) + i)]
    arranged = blocks.reshape(outer + inner).transpose(axes).reshape(tuple(sizes.values()))
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _check_is_tpu(hardware: Slice) -> Slice:
    if hardware.is_cpu:
        raise ConfigError(f"hardware.slice {hardware.name} has no TPU compiler; name a TPU slice, as v4-8")
    return hardware


def _devices(hardware: Slice) -> list[Device]:
    """The devices of `hardware`, slice by slice."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("compiling for a TPU needs libtpu: pip install 'shardplan[verify]'")
    generation = hardware.generation
    hosts = [
        min(chips, size)
        for chips, size in zip(generation.host_chips, (*hardware.torus, 1), strict=False)  # a 2D torus has z = 1
    ]
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{generation.name}:{'x'.join(map(str, hardware.torus))}",
        # two cores that are one device
        chip_config_name="megacore" if generation.devices_per_chip < generation.name_counts_per_chip else "default",
        chips_per_host_bounds=tuple(hosts),
        num_slices=hardware.slices,
    )
    return sorted(topology.devices, key=lambda device: (getattr(device, "slice_index", 0) or 0, device.id))


def _slices_by_axis(hardware: Slice, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How many parts the slices cut each axis of the mesh into; the product is the number of slices.

    Raises:
        ConfigError: the slices do not divide replica x data.
    """
    parts, left = dict.fromkeys(sizes, 1), hardware.slices
    for axis in SLICE_AXES:
        parts[axis] = math.gcd(left, sizes.get(axis, 1))
        left //= parts[axis]
    if left > 1:
        one = hardware.devices // hardware.slices
        model = min(
            (size for size in range(1, one + 1) if one % size == 0), key=lambda size: abs(size - sizes.get("model", 1))
        )
        crossing = math.prod(sizes.get(axis, 1) for axis in SLICE_AXES)
        raise ConfigError(
            f"the {hardware.slices} slices of {hardware.name} do not divide replica x data = {crossing}, and only "
            f"these cross slices; use mesh.replica {hardware.slices}, mesh.data {one // model}, mesh.model {model}"
        )
    return tuple(parts[axis] for axis in sizes)


def _embed(hardware: Slice, shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices of one slice as an array of `shape`."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, TypeError, ValueError):
        # JAX 0.10 loses a prime factor of torus dimensions such as 10 and 14, and then fails as it happens
        logger.warning(
            "%s: JAX cannot embed %s devices in the torus; they are in the order of their numbers",
            hardware.name,
            " x ".join(map(str, shape)),
        )
        return np.asarray(devices).reshape(shape)
