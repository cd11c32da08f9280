"""Start JAX on the devices of a slice, in one process or one of several, and arrange the devices as a mesh.

On Cloud TPU, Slurm and Kubernetes JAX finds the other processes by itself. Elsewhere each process is told:
JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES, JAX_PROCESS_ID.
"""

import contextlib
import logging
import math
import os
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax import Device
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from shardplan.errors import ConfigError
from shardplan.runtime.placement import slices_by_axis

logger = logging.getLogger(__name__)


def start_devices(slice_name: str, count: int, is_cpu: bool) -> None:
    """Make JAX run on the `count` devices of a slice; with `is_cpu`, on virtual CPU devices of all processes together.

    Raises:
        ConfigError: JAX sees another number of devices, or the processes are not told who they are.
    """
    processes = _environment_number("JAX_NUM_PROCESSES", 1)
    if is_cpu:
        if count % processes:
            raise ConfigError(f"hardware.slice {slice_name} does not divide into JAX_NUM_PROCESSES = {processes}")
        # where the devices exist already, as in a notebook, what counts is how many there are
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count // processes)
    _join_processes(processes, is_cpu)
    found = jax.devices()
    if len(found) != count:
        raise ConfigError(
            f"hardware.slice {slice_name} has {count} devices, JAX sees {len(found)} ({found[0].platform}); run on "
            "that slice, plan with --dry_run, or name a slice of the devices there are"
            + (f" (cpu-{len(found)})" if found[0].platform == "cpu" else "")
        )


def _join_processes(processes: int, is_cpu: bool) -> None:
    if jax.distributed.is_initialized():
        return
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    if address is not None:
        number = _environment_number("JAX_PROCESS_ID", None)
        jax.distributed.initialize(address, num_processes=processes, process_id=number)
    elif not is_cpu:
        with contextlib.suppress(ValueError):  # no cluster was recognised: this process is the only one
            jax.distributed.initialize()


def _environment_number(name: str, default: int | None) -> int:
    text = os.environ.get(name)
    if text is None and default is not None:
        return default
    if text is None or not text.isdecimal():
        raise ConfigError(f"{name} is {text!r}; set it to a number, as every process of several needs to be told")
    return int(text)


def is_first_process() -> bool:
    """Whether this process reports: prints tables, writes results, draws progress."""
    return jax.process_index() == 0


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
    return arrange(jax.devices(), sizes)


def arrange(devices: Sequence[Device], sizes: Mapping[str, int]) -> Mesh:
    """`devices` as a mesh with Auto axes `sizes` (name -> size, major to minor); as many as the product of `sizes`.

    Within a slice neighbours are kept close on the torus. Where JAX cannot embed the mesh in the torus, the devices are
    in order of their numbers instead, and a warning is logged. Slices are the outermost part of `replica`, and of
    `data` where `replica` is too small.

    Raises:
        ConfigError: the slices do not divide replica x data.
    """
    slices: dict[int, list[Device]] = {}
    for device in sorted(devices, key=lambda device: device.id):
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    outer = slices_by_axis(len(slices), sizes)
    inner = tuple(size // part for size, part in zip(sizes.values(), outer, strict=True))
    blocks = np.stack([_embed(inner, slices[number]) for number in sorted(slices)])
    # array of shape outer + inner; every axis of the mesh is its part in outer, then its part in inner
    axes = [axis for i in range(len(sizes)) for axis in (i, len(sizes) + i)]
    arranged = blocks.reshape(outer + inner).transpose(axes).reshape(tuple(sizes.values()))
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _embed(shape: tuple[int, ...], devices: Sequence[Device]) -> np.ndarray:
    """The devices of one slice as an array of `shape`."""
    try:
        return mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
    except (NotImplementedError, TypeError, ValueError):
        # JAX 0.10 loses a prime factor of torus dimensions such as 10 and 14, and then fails as it happens
        logger.warning(
            "JAX cannot embed %s devices in the torus; they are in the order of their numbers",
            " x ".join(map(str, shape)),
        )
        return np.asarray(devices).reshape(shape)
