"""The devices of a TPU slice as its compiler knows them, arranged as a mesh; no TPU is needed.

The library that holds the compiler, libtpu, reads its environment when it is first used: start a process with
`environment(hardware)`. That process can have slices of other sizes and generations too.
"""

import importlib.util
import math
from collections.abc import Mapping

from jax import Device
from jax.experimental import topologies
from jax.sharding import Mesh

from shardplan.errors import ConfigError
from shardplan.hardware import Slice
from shardplan.runtime.devices import arrange


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

    The devices are arranged as at run time: see `shardplan.runtime.devices.arrange`.

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
    return arrange(_devices(hardware), hardware, sizes)


def _check_is_tpu(hardware: Slice) -> Slice:
    if hardware.is_cpu:
        raise ConfigError(f"hardware.slice {hardware.name} has no TPU compiler; name a TPU slice, as v4-8")
    return hardware


def _devices(hardware: Slice) -> list[Device]:
    """The devices of `hardware`."""
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
    return list(topology.devices)
