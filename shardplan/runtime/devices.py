"""Start-up of JAX on the devices of a slice, and their arrangement as a mesh.

On Cloud TPU, Slurm and Kubernetes JAX finds the other processes by itself. Elsewhere every process needs three
environment variables: JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES, JAX_PROCESS_ID.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from types import MappingProxyType

import jax
import numpy as np
from jax import Device
from jax.sharding import AxisType, Mesh

from shardplan.errors import ConfigError
from shardplan.hardware import Slice, parse_slice, place_mesh
from shardplan.hardware.generations import device_kinds, generation_of_device
from shardplan.runtime.environment import PROCESS_COUNT, ProcessVariables, read_process_variables
from shardplan.runtime.private_jax import detect_cluster, process_count
from shardplan.runtime.processes.start import connect_processes


def start_devices(slice_name: str, count: int, is_cpu: bool, facts: Mapping[str, str] = MappingProxyType({})) -> None:
    """Start JAX on the `count` devices of a slice, and check their number.

    Args:
        is_cpu: whether the devices are virtual CPU devices, which all processes provide in equal parts.
        facts: name -> value of everything that must be equal in all processes, such as keys of a configuration.

    Raises:
        ConfigError: JAX has another number of devices, an environment variable of this process is missing or wrong, or
            processes have different facts.
        PeerError: a process is missing.
    """
    # a program that started JAX's processes by itself may have done so without these variables
    variables = None if jax.distributed.is_initialized() else read_process_variables()
    processes = variables.count if variables else process_count()
    if is_cpu:
        if count % processes:
            raise ConfigError(f"hardware.slice {slice_name} does not divide into {PROCESS_COUNT} = {processes}")
        # fails if the devices exist already, as in a notebook; their number is checked below
        with contextlib.suppress(RuntimeError):
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", count // processes)
    if variables is not None:
        _join_processes(variables, is_cpu, facts)
    devices = jax.devices()
    if len(devices) != count:
        raise ConfigError(
            f"hardware.slice {slice_name} has {count} devices, JAX sees {len(devices)} ({devices[0].platform}); run on "
            "that slice, plan with --dry_run, or name a slice with as many devices"
            + (f" (cpu-{len(devices)})" if devices[0].platform == "cpu" else "")
        )


def _join_processes(variables: ProcessVariables, is_cpu: bool, facts: Mapping[str, str]) -> None:
    """Connect the processes of a run, as given by the environment or, on TPUs, by the cluster."""
    if variables.address is None and not is_cpu and (cluster := detect_cluster()) is not None:
        variables = ProcessVariables(*cluster)
    if variables.address is not None:
        connect_processes(variables, facts)


def is_first_process() -> bool:
    """Return whether this is process 0, which prints tables, writes results and draws progress."""
    return jax.process_index() == 0


def slice_from(devices: Sequence[Device]) -> Slice:
    """Return the slice, or several slices, whose devices are exactly `devices`.

    Raises:
        ConfigError: the device kind is unknown.
    """
    if devices[0].platform == "cpu":
        return parse_slice(f"cpu-{len(devices)}")
    kind = devices[0].device_kind
    generation = generation_of_device(kind)
    if generation is None:
        raise ConfigError(f"no hardware data for device kind {kind!r}; valid: {', '.join(device_kinds())}")
    slices = {_slice_index(device) for device in devices}
    coordinates = [device.coords for device in devices if _slice_index(device) == min(slices)]
    sides = [max(axis) - min(axis) + 1 for axis in zip(*coordinates, strict=True)]
    rank, copies = len(generation.sizes[0]), f"{len(slices)}x" if len(slices) > 1 else ""
    return parse_slice(f"{copies}{generation.name}:{'x'.join(map(str, sides[:rank]))}")


def arrange(devices: Sequence[Device], hardware: Slice, sizes: Mapping[str, int]) -> Mesh:
    """Return a mesh of `devices` whose axes all have the type Auto.

    TPU devices are placed on their torus by `shardplan.hardware.place_mesh`; devices without coordinates, such as
    virtual CPU devices, are in the order of their ids.

    Args:
        sizes: mesh axis -> size, major to minor; the product is the number of devices.

    Raises:
        ConfigError: the number of slices does not divide replica x data, or the devices do not fill a torus.
    """
    if hardware.is_cpu or not hasattr(devices[0], "coords"):
        arranged = sorted(devices, key=lambda device: device.id)
    else:
        arranged = _order_by_torus(devices, hardware, sizes)
    array = np.asarray(arranged).reshape(tuple(sizes.values()))
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _order_by_torus(devices: Sequence[Device], hardware: Slice, sizes: Mapping[str, int]) -> list[Device]:
    """Return the devices in row-major order of the mesh, after `place_mesh` has placed the mesh on their torus."""
    rank = len(hardware.torus)
    slices = sorted({_slice_index(device) for device in devices})
    # a slice may begin anywhere in its pod
    origins = {
        index: [min(axis) for axis in zip(*(d.coords[:rank] for d in devices if _slice_index(d) == index), strict=True)]
        for index in slices
    }
    by_coordinates = {}
    for device in devices:
        index = _slice_index(device)
        chip = [c - origin for c, origin in zip(device.coords, origins[index], strict=False)]
        core = [device.core_on_chip] if hardware.generation.devices_per_chip > 1 else []
        by_coordinates[slices.index(index), (*chip, *core)] = device
    # the same torus may be rotated: 8x4x4 instead of 4x4x8
    torus = tuple(1 + max(axis) for axis in islice(zip(*(where for _, where in by_coordinates), strict=True), rank))
    actual = replace(hardware, torus=torus, slices=len(slices))
    if len(by_coordinates) != actual.devices:
        raise ConfigError(
            f"the devices of {hardware.name} are only {len(by_coordinates)} of the {actual.devices} devices of "
            f"{len(slices)} x {'x'.join(map(str, torus))} chips that their coordinates span; use all devices of a slice"
        )
    return [by_coordinates[coordinates] for coordinates in place_mesh(actual, sizes).coordinates()]


def _slice_index(device: Device) -> int:
    return getattr(device, "slice_index", 0) or 0
