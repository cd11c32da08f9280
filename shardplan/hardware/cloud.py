"""Slices as Google Cloud knows them: the names of their types, their hosts, and the software of TPU VMs.

From the pages of the TPU versions in the Cloud TPU documentation (https://docs.cloud.google.com/tpu/docs), and
https://docs.cloud.google.com/tpu/docs/runtimes for the software.
"""

import math
from dataclasses import dataclass

from shardplan.hardware.slices import Slice, standard_slices


@dataclass(frozen=True)
class CloudGeneration:
    """What Google Cloud calls a generation, and which machines it has."""

    type: str
    """What the name of an accelerator type begins with."""
    software: str | None
    """Software version of a TPU VM; None for a generation that is only in Kubernetes clusters."""
    lone_host_chips: int
    """Most chips of a host that is a slice by itself."""


CLOUD_GENERATIONS = {
    "v3": CloudGeneration("v3", "tpu-ubuntu2204-base", 4),
    "v4": CloudGeneration("v4", "tpu-ubuntu2204-base", 4),
    "v5e": CloudGeneration("v5litepod", "v2-alpha-tpuv5-lite", 8),
    "v5p": CloudGeneration("v5p", "v2-alpha-tpuv5", 4),
    "v6e": CloudGeneration("v6e", "v2-alpha-tpuv6e", 8),
    "tpu7x": CloudGeneration("tpu7x", None, 4),
}
"""Generation -> what Google Cloud calls it."""


def cloud_generation(hardware: Slice) -> CloudGeneration:
    """Return what Google Cloud calls the generation of a TPU slice."""
    return CLOUD_GENERATIONS[hardware.generation.name]


def accelerator_type(hardware: Slice) -> str | None:
    """Return the accelerator type of one slice, as in `v5litepod-256`; None if only its topology describes it."""
    generation, sides = hardware.generation, sorted(hardware.torus)
    names = (each.name for each in standard_slices(generation) if sorted(each.torus) == sides)
    name = next(names, None)
    return None if name is None else name.replace(generation.name, cloud_generation(hardware).type)


def topology(hardware: Slice) -> str:
    """Return the topology of one slice without an accelerator type: its chips, ascending, as in `4x4x12`."""
    return "x".join(map(str, sorted(hardware.torus)))


def chips_per_host(hardware: Slice) -> int:
    """Return how many chips each host of a TPU slice has."""
    chips = math.prod(hardware.torus)
    is_one_host = chips <= cloud_generation(hardware).lone_host_chips
    return chips if is_one_host else math.prod(hardware.generation.host_chips)


def host_count(hardware: Slice) -> int:
    """Return the number of hosts of all slices; each runs one process."""
    return hardware.slices * math.prod(hardware.torus) // chips_per_host(hardware)
