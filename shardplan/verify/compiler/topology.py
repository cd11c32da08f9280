"""Makes a mesh of the devices of a TPU slice for compiling ahead of time; needs libtpu, but no TPU.

Start the process with `libtpu_environment(hardware)` of libtpu.py, which libtpu reads when it is first used. The same
process can also compile for slices of other sizes and generations.
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
from shardplan.verify.compiler.libtpu import INSTALL_LIBTPU, check_is_tpu


def make_topology_mesh(hardware: Slice, sizes: Mapping[str, int]) -> Mesh:
    """Make a mesh of all devices of `hardware` with Auto axes, to compile for.

    The devices are arranged as at run time: see `shardplan.runtime.devices.arrange`.

    Args:
        sizes: mesh axis -> size, major to minor.

    Raises:
        ConfigError: `sizes` do not match the devices or the slices, `hardware` is not a TPU slice, or libtpu is
            missing.
    """
    check_is_tpu(hardware)
    required = math.prod(sizes.values())
    if required != hardware.devices:
        raise ConfigError(
            f"the mesh needs {required} devices, {hardware.name} has {hardware.devices}; "
            f"{' x '.join(sizes)} must be {hardware.devices}"
        )
    return arrange(_devices(hardware), hardware, sizes)


def _devices(hardware: Slice) -> list[Device]:
    """Return the devices of `hardware` as libtpu describes them."""
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError(f"compiling for a TPU needs libtpu: {INSTALL_LIBTPU}")
    generation = hardware.generation
    hosts = [
        min(chips, size)
        for chips, size in zip(generation.host_chips, (*hardware.torus, 1), strict=False)  # a 2D torus has z = 1
    ]
    topology = topologies.get_topology_desc(
        platform="tpu",
        topology_name=f"{generation.name}:{'x'.join(map(str, hardware.torus))}",
        # megacore: the two cores of a chip are one device
        chip_config_name="megacore" if generation.devices_per_chip < generation.name_counts_per_chip else "default",
        chips_per_host_bounds=tuple(hosts),
        num_slices=hardware.slices,
    )
    return list(topology.devices)
