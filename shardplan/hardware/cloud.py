"""Google Cloud's names for slices: their types, and their hosts."""

import math

from shardplan.hardware.generations import CloudNames
from shardplan.hardware.slices import Slice, standard_slices


def cloud_names(hardware: Slice) -> CloudNames:
    """Return Google Cloud's names for the generation of a TPU slice."""
    names = hardware.generation.cloud
    assert names is not None  # virtual CPU devices are started by hand, by slurm or ray
    return names


def accelerator_type(hardware: Slice) -> str | None:
    """Return the accelerator type of one slice, as in `v5litepod-256`; None if only its topology describes it."""
    generation, sides = hardware.generation, sorted(hardware.torus)
    names = (each.name for each in standard_slices(generation) if sorted(each.torus) == sides)
    name = next(names, None)
    return None if name is None else name.replace(generation.name, cloud_names(hardware).type)


def topology(hardware: Slice) -> str:
    """Return the topology of one slice without an accelerator type: its sides in chips, ascending, as in `4x4x12`."""
    return "x".join(map(str, sorted(hardware.torus)))


def chips_per_host(hardware: Slice) -> int:
    """Return how many chips each host of a TPU slice has."""
    chips = math.prod(hardware.torus)
    is_one_host = chips <= cloud_names(hardware).lone_host_chips
    return chips if is_one_host else math.prod(hardware.generation.host_chips)


def host_count(hardware: Slice) -> int:
    """Return the number of hosts of all slices; each runs one process."""
    return hardware.slices * math.prod(hardware.torus) // chips_per_host(hardware)
