"""Slice names: `v4-256` or `v4:4x4x8` -> 128 devices on a 4x4x8 torus; `2xv6e-256` -> two slices of 16x16 chips, joined
by the data-centre network; `cpu-8` -> 8 virtual CPU devices.
"""

import math
import os
import re
from dataclasses import dataclass
from functools import cache

from shardplan.errors import ConfigError, nearest
from shardplan.hardware.generations import GENERATIONS, Generation

GIB = 2**30
MOST_CPU_DEVICES = 4096
"""Virtual devices are threads of one process."""
MOST_SLICES = 1024
_CUBE = 4
"""Chips along each side of the cubes that optical switches connect into the larger 3D tori."""


@cache
def divisors(n: int) -> tuple[int, ...]:
    """Of a number of devices, chips or sequences: every one that divides it, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*low, *(n // d for d in low)}))


@dataclass(frozen=True)
class Slice:
    """A set of connected devices that one program runs on: one slice, or several of the same kind."""

    name: str
    generation: Generation
    torus: tuple[int, ...]
    """Chips along each torus dimension of one slice; their product is the number of its chips."""
    slices: int = 1
    """Slices, each a torus of its own, that only the data-centre network connects."""

    @property
    def devices(self) -> int:
        """Number of JAX devices, of all slices together."""
        return self.slices * math.prod(self.torus) * self.generation.devices_per_chip

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Of each torus dimension, whether a link connects its ends, so that it is a ring."""
        pod, rule = self.generation.sizes[-1], self.generation.wraparound
        if rule == "side":
            return tuple(n == most for n, most in zip(self.torus, pod, strict=True))
        every = self.torus == pod if rule == "pod" else all(n % _CUBE == 0 for n in self.torus)
        return (every,) * len(self.torus)

    @property
    def is_cpu(self) -> bool:
        """Virtual CPU devices rather than accelerators."""
        return self.generation.name == "cpu"


def parse_slice(name: str) -> Slice:
    """The slice called `name`: a generation and its number of cores or chips as in its name on Cloud TPU (`v4-256`), or
    a generation and the chips along each dimension of its torus (`v4:4x4x8`); `Kx` in front means K of them.

    Raises:
        ConfigError: an unknown generation, or a size that generation does not come in.
    """
    match = re.fullmatch(r"(?:([0-9]{1,9})x)?([a-z0-9]+?)(?:-([0-9]{1,9})|:([0-9]{1,9}(?:x[0-9]{1,9})*))", name)
    copies, generation_name, count, chips = match.groups() if match else (None, re.split("[-:]", name)[0], None, None)
    if generation_name == "cpu":
        return _cpu_slice(name, int(count or 0), copies)
    generation = GENERATIONS.get({"v5litepod": "v5e"}.get(generation_name, generation_name))
    if generation is None:
        valid = [*GENERATIONS, "cpu"]
        raise ConfigError(
            f"hardware.slice {name!r}: unknown generation {generation_name!r}; {nearest(generation_name, valid)}"
        )
    if match is None:
        torus = generation.sizes[1]
        cores = math.prod(torus) * generation.name_counts_per_chip
        raise ConfigError(
            f"hardware.slice {name!r}: no size; write it as in '{generation.name}-{cores}' or "
            f"'{generation.name}:{_by(torus)}'"
        )
    slices = int(copies or 1)
    if not 1 <= slices <= MOST_SLICES:
        raise ConfigError(f"hardware.slice {name!r}: needs 1 to {MOST_SLICES} slices, as in '2x{generation.name}-256'")
    prefix = f"{copies}x" if copies else ""
    if chips:
        torus = _torus(name, prefix, generation, tuple(map(int, chips.split("x"))))
    else:
        torus = _standard_torus(name, prefix, generation, int(count or 0))
    return Slice(name, generation, torus, slices)


def _standard_torus(name: str, prefix: str, generation: Generation, count: int) -> tuple[int, ...]:
    tori = {math.prod(torus) * generation.name_counts_per_chip: torus for torus in generation.sizes}
    if count not in tori:
        closest = min(tori, key=lambda size: abs(math.log(size / max(count, 1))))
        raise ConfigError(
            f"hardware.slice {name!r}: {generation.name} does not come in size {count}; "
            f"did you mean '{prefix}{generation.name}-{closest}'? (sizes: {', '.join(map(str, sorted(tori)))})"
        )
    return tori[count]


def _torus(name: str, prefix: str, generation: Generation, torus: tuple[int, ...]) -> tuple[int, ...]:
    """`torus` itself, when the generation can be connected that way."""
    pod, hosts = generation.sizes[-1], generation.host_chips[: len(generation.sizes[-1])]
    if len(torus) != len(pod):
        problem = f"a {generation.name} torus has {len(pod)} dimensions, not {len(torus)}"
    elif torus not in generation.sizes and any(n < 1 or n % host for n, host in zip(torus, hosts, strict=True)):
        problem = f"{generation.name} comes in whole hosts of {_by(hosts)} chips"
    elif not _fits(torus, pod):
        problem = f"the largest {generation.name} pod is {_by(pod)}"
    else:
        return torus
    closest = tuple(host * max(1, round(n / host)) for n, host in zip(torus, hosts, strict=False))
    if len(torus) != len(pod) or not _fits(closest, pod):
        wanted = max(1, math.prod(torus))
        closest = min(generation.sizes, key=lambda size: abs(math.log(math.prod(size) / wanted)))
    raise ConfigError(f"hardware.slice {name!r}: {problem}; did you mean '{prefix}{generation.name}:{_by(closest)}'?")


def _fits(torus: tuple[int, ...], pod: tuple[int, ...]) -> bool:
    """Whether `torus` is a part of the pod, or can be put together from its cubes."""
    part = all(n <= most for n, most in zip(sorted(torus), sorted(pod), strict=True))
    cubes = len(pod) == 3 and all(n % _CUBE == 0 for n in torus)
    return part or (cubes and math.prod(torus) <= math.prod(pod))


def _by(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _cpu_slice(name: str, devices: int, copies: str | None) -> Slice:
    if copies is not None:
        raise ConfigError(f"hardware.slice {name!r}: virtual CPU devices are one slice; name them as in 'cpu-8'")
    if not 1 <= devices <= MOST_CPU_DEVICES:
        raise ConfigError(f"hardware.slice {name!r}: needs 1 to {MOST_CPU_DEVICES} virtual devices, as in 'cpu-8'")
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Speeds of virtual devices only rank plans against each other; they are not a prediction for this machine.
    generation = Generation(
        "cpu", 1, 1, host_bytes / GIB / devices, 2e10, 5e9, 2.5e9, 0, "pod", 2.5e9, 1e9, (1, 1, 1), ((devices,),)
    )
    return Slice(name, generation, (devices,))
