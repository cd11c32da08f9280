"""Slice names: `v4-256` -> 128 devices on a 4x4x8 torus; `cpu-8` -> 8 virtual CPU devices."""

import math
import os
import re
from dataclasses import dataclass

from shardplan.errors import ConfigError, nearest
from shardplan.hardware.generations import GENERATIONS, Generation

GIB = 2**30
MOST_CPU_DEVICES = 4096
"""Virtual devices are threads of one process."""


@dataclass(frozen=True)
class Slice:
    """A set of connected devices that one program runs on."""

    name: str
    generation: Generation
    torus: tuple[int, ...]
    """Chips along each torus dimension; their product is the number of chips."""

    @property
    def devices(self) -> int:
        """Number of JAX devices."""
        return math.prod(self.torus) * self.generation.devices_per_chip

    @property
    def is_cpu(self) -> bool:
        """Virtual CPU devices rather than accelerators."""
        return self.generation.name == "cpu"


def parse_slice(name: str) -> Slice:
    """The slice called `name`.

    Raises:
        ConfigError: an unknown generation, or a size that generation does not come in.
    """
    match = re.fullmatch(r"([a-z0-9]+?)-(\d+)", name)
    generation_name, count = (match[1], int(match[2])) if match else (name, 0)
    if generation_name == "cpu":
        return _cpu_slice(name, count)
    generation = GENERATIONS.get({"v5litepod": "v5e"}.get(generation_name, generation_name))
    if generation is None:
        valid = [*GENERATIONS, "cpu"]
        raise ConfigError(
            f"hardware.slice {name!r}: unknown generation {generation_name!r}; {nearest(generation_name, valid)}"
        )
    tori = {math.prod(torus) * generation.name_counts_per_chip: torus for torus in generation.sizes}
    if count not in tori:
        closest = min(tori, key=lambda size: abs(math.log(size / max(count, 1))))
        raise ConfigError(
            f"hardware.slice {name!r}: {generation.name} does not come in size {count}; "
            f"did you mean '{generation.name}-{closest}'? (sizes: {', '.join(map(str, sorted(tori)))})"
        )
    return Slice(name, generation, tori[count])


def _cpu_slice(name: str, devices: int) -> Slice:
    if not 1 <= devices <= MOST_CPU_DEVICES:
        raise ConfigError(f"hardware.slice {name!r}: needs 1 to {MOST_CPU_DEVICES} virtual devices, as in 'cpu-8'")
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Speeds of virtual devices only rank plans against each other; they are not a prediction for this machine.
    generation = Generation("cpu", 1, 1, host_bytes / GIB / devices, 2e10, 5e9, 2.5e9, sizes=((devices,),))
    return Slice(name, generation, (devices,))
