"""Measures the memory that this process uses on its devices and its host."""

import resource
from dataclasses import dataclass

import jax

from shardplan.runtime.progress import size_text


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a device, in bytes."""

    in_use: int
    peak: int
    """Most bytes in use since JAX started."""
    limit: int
    """Most bytes that JAX may use; 0 if the device does not report it."""


def device_memory() -> dict[str, DeviceMemory]:
    """Return device -> its memory, for the devices of this process that report statistics; CPUs do not."""
    statistics = {str(device): device.memory_stats() or {} for device in jax.local_devices()}
    return {
        device: DeviceMemory(each["bytes_in_use"], each["peak_bytes_in_use"], each.get("bytes_limit", 0))
        for device, each in statistics.items()
        if "peak_bytes_in_use" in each
    }


def peak_host_bytes() -> int:
    """Return the most bytes that this process has used on its host so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


def describe_device_memory() -> list[str]:
    """Return a line for each device of this process that reports statistics."""
    return [
        f"{device}: {size_text(each.in_use, each.limit)} in use, {size_text(each.peak)} at most"
        for device, each in device_memory().items()
    ]
