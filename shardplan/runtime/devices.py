"""Start JAX on the devices of a slice, in one process or one of several, and arrange the devices as a mesh.

On Cloud TPU, Slurm and Kubernetes JAX finds the other processes by itself. Elsewhere each process is told:
JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES, JAX_PROCESS_ID.
"""

import contextlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice

import jax
import numpy as np
from jax import Device
from jax.sharding import AxisType, Mesh

from shardplan.errors import ConfigError
from shardplan.hardware import GENERATIONS, Slice, parse_slice, place_mesh

KINDS = {
    "TPU v3": "v3", "TPU v4": "v4", "TPU v5 lite": "v5e", "TPU v5e": "v5e", "TPU v5": "v5p", "TPU v5p": "v5p",
    "TPU v6 lite": "v6e", "TPU v6e": "v6e", "TPU7x": "tpu7x",
}  # fmt: skip
"""Generations, by what JAX calls their devices."""


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


def slice_from(devices: Sequence[Device]) -> Slice:
    """The slice, or the slices, that these are all devices of.

    Raises:
        ConfigError: devices of an unknown kind.
    """
    if devices[0].platform == "cpu":
        return parse_slice(f"cpu-{len(devices)}")
    kind = devices[0].device_kind
    if kind not in KINDS:
        raise ConfigError(f"nothing is known of the speed of {kind} devices, only of {', '.join(KINDS)}")
    slices = {_slice_of(device) for device in devices}
    places = [device.coords for device in devices if _slice_of(device) == min(slices)]
    sides = [max(axis) - min(axis) + 1 for axis in zip(*places, strict=True)]
    rank, copies = len(GENERATIONS[KINDS[kind]].sizes[0]), f"{len(slices)}x" if len(slices) > 1 else ""
    return parse_slice(f"{copies}{KINDS[kind]}:{'x'.join(map(str, sides[:rank]))}")


def make_mesh(hardware: Slice, sizes: Mapping[str, int]) -> Mesh:
    """All devices as a mesh with axes `sizes` (name -> size, major to minor); see `arrange`.

    Raises:
        ConfigError: there are more or fewer devices.
    """
    wanted, found = math.prod(sizes.values()), jax.device_count()
    if wanted != found:
        raise ConfigError(
            f"the mesh needs {wanted} devices, JAX has {found}; for virtual CPU devices set JAX_PLATFORMS=cpu and "
            f"JAX_NUM_CPU_DEVICES={wanted} before JAX is imported"
        )
    return arrange(jax.devices(), hardware, sizes)


def arrange(devices: Sequence[Device], hardware: Slice, sizes: Mapping[str, int]) -> Mesh:
    """`devices` as a mesh with Auto axes `sizes` (name -> size, major to minor); as many as the product of `sizes`.

    TPUs lie as `shardplan.hardware.place_mesh` has them on the torus; devices without coordinates are in order of their
    numbers.

    Raises:
        ConfigError: the slices do not divide replica x data, or the devices are not a torus.
    """
    if hardware.is_cpu or not hasattr(devices[0], "coords"):
        arranged = sorted(devices, key=lambda device: device.id)
    else:
        arranged = _on_torus(devices, hardware, sizes)
    array = np.asarray(arranged).reshape(tuple(sizes.values()))
    return Mesh(array, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _on_torus(devices: Sequence[Device], hardware: Slice, sizes: Mapping[str, int]) -> list[Device]:
    """The devices in row-major order of the mesh."""
    rank = len(hardware.torus)
    slices = sorted({_slice_of(device) for device in devices})
    # a slice may begin anywhere in its pod
    origins = {
        number: [min(axis) for axis in zip(*(d.coords[:rank] for d in devices if _slice_of(d) == number), strict=True)]
        for number in slices
    }
    found = {}
    for device in devices:
        number = _slice_of(device)
        place = [c - origin for c, origin in zip(device.coords, origins[number], strict=False)]
        core = [device.core_on_chip] if hardware.generation.devices_per_chip > 1 else []
        found[slices.index(number), (*place, *core)] = device
    # the same torus may be turned: 8x4x4 where 4x4x8 is meant
    torus = tuple(1 + max(axis) for axis in islice(zip(*(place for _, place in found), strict=True), rank))
    whole = replace(hardware, torus=torus, slices=len(slices))
    if len(found) != whole.devices:
        raise ConfigError(
            f"the devices of {hardware.name} are {len(found)} of the {whole.devices} of {len(slices)} x "
            f"{'x'.join(map(str, torus))} chips, as their coordinates say; use all devices of a slice"
        )
    return [found[place] for place in place_mesh(whole, sizes).places()]


def _slice_of(device: Device) -> int:
    return getattr(device, "slice_index", 0) or 0
