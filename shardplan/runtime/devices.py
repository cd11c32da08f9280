"""Start JAX on the devices of a slice, and arrange them as a mesh."""

import math
from collections.abc import Mapping

import jax
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from shardplan.errors import ConfigError


def start_devices(slice_name: str, count: int, is_cpu: bool) -> None:
    """Make JAX run on the `count` devices of a slice; with `is_cpu`, on virtual CPU devices.

    Raises:
        ConfigError: JAX sees another number of devices.
    """
    if is_cpu:
        try:
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count)
        except RuntimeError:
            pass  # the devices exist already, as in a test or a notebook: what counts is how many
    found = jax.devices()
    if len(found) != count:
        raise ConfigError(
            f"hardware.slice {slice_name} has {count} devices, JAX sees {len(found)} ({found[0].platform}); run on "
            "that slice, plan with --dry_run, or name a slice of the devices there are"
            + (f" (cpu-{len(found)})" if found[0].platform == "cpu" else "")
        )


def make_mesh(sizes: Mapping[str, int]) -> Mesh:
    """All devices as a mesh with axes `sizes` (name -> size, major to minor), neighbours kept close on the torus.

    Raises:
        ConfigError: there are more or fewer devices.
    """
    wanted, found = math.prod(sizes.values()), jax.device_count()
    if wanted != found:
        raise ConfigError(
            f"the mesh needs {wanted} devices, JAX has {found}; for virtual CPU devices set JAX_PLATFORMS=cpu and "
            f"JAX_NUM_CPU_DEVICES={wanted} before JAX is imported"
        )
    devices = mesh_utils.create_device_mesh(tuple(sizes.values()), allow_split_physical_axes=True)
    return Mesh(devices, tuple(sizes))
