"""TPU slices, their names, and their topologies.

| name | hardware |
|---|---|
| `v4-256` or `v4:4x4x8` | 128 devices on a 4x4x8 torus |
| `2xv6e-256` | two slices of 16x16 chips, connected by the data-centre network |
| `cpu-8` | 8 virtual CPU devices |
"""

import math
import os
import re
from dataclasses import dataclass
from functools import cache
from typing import assert_never

from shardplan.errors import ConfigError
from shardplan.hardware.generations import GENERATIONS, Generation, Wraparound
from shardplan.hardware.slice_spelling import CLOUD_SPELLINGS, NAME, spelled_generation, standard_spelling

GIB = 2**30
MAX_CPU_DEVICES = 4096
"""Maximum number of virtual CPU devices, which are threads of one process."""
MAX_SLICES = 1024
_CUBE = 4
"""Side, in chips, of the cubes that optical switches connect to larger 3D tori."""


@cache
def divisors(n: int) -> tuple[int, ...]:
    """Return all divisors of `n`, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return tuple(sorted({*low, *(n // d for d in low)}))


@dataclass(frozen=True)
class Slice:
    """The hardware of one job: one slice, or several identical slices."""

    name: str
    generation: Generation
    torus: tuple[int, ...]
    """Chips along each torus dimension of one slice."""
    slices: int = 1
    """Number of slices; only the data-centre network connects them."""

    @property
    def devices(self) -> int:
        """Number of JAX devices in all slices."""
        return self.slices * math.prod(self.torus) * self.generation.devices_per_chip

    @property
    def host_network_bandwidth(self) -> float:
        """Bytes per second of all network cards of a host."""
        chips = math.prod(min(n, host) for n, host in zip(self.torus, self.generation.host_chips, strict=False))
        return self.generation.network_bandwidth * chips

    @property
    def wraps(self) -> tuple[bool, ...]:
        """Whether each torus dimension is a ring, with a link between its two ends."""
        pod = self.generation.sizes[-1]
        match self.generation.wraparound:
            case Wraparound.SIDE:
                return tuple(n == side for n, side in zip(self.torus, pod, strict=True))
            case Wraparound.POD:
                return (self.torus == pod,) * len(self.torus)
            case Wraparound.CUBES:
                return (all(n % _CUBE == 0 for n in self.torus),) * len(self.torus)
            case _:
                assert_never(self.generation.wraparound)

    @property
    def is_cpu(self) -> bool:
        """Whether the devices are virtual CPU devices, not accelerators."""
        return self.generation.name == "cpu"


def standard_slices(generation: Generation) -> tuple[Slice, ...]:
    """Return the slices of a generation that have a name on Cloud TPU, smallest first."""
    counted = [(math.prod(torus) * generation.name_counts_per_chip, torus) for torus in generation.sizes]
    return tuple(Slice(f"{generation.name}-{count}", generation, torus) for count, torus in counted)


def parse_slice(name: str) -> Slice:
    """Parse a slice name.

    Args:
        name: a generation and its number of cores or chips as on Cloud TPU (`v4-256`), or a generation and the chips
            along each torus dimension (`v4:4x4x8`); a prefix `Kx` means K slices.

    Raises:
        ConfigError: the generation is unknown, has no slice of that size, or the name is spelled in another way.
    """
    match = NAME.fullmatch(name)
    if match is None or match["generation"] not in (*GENERATIONS, *CLOUD_SPELLINGS, "cpu"):
        spelled = standard_spelling(name)
        if spelled is None:
            raise ConfigError(f"hardware.slice {name!r}: {_spelling_problem(name)}")
        _parse(spelled, name)
        raise ConfigError(f"hardware.slice {name!r}: did you mean {spelled!r}?")
    return _parse(name, name)


def _spelling_problem(name: str) -> str:
    """Explain what is wrong with a name that has no known spelling: it lacks a size, or its generation is unknown."""
    generation_name = spelled_generation(name)
    if generation_name is None:
        generation = re.split("[-:]", name.strip())[0]
        variants = [each for each in sorted(GENERATIONS) if generation and each.startswith(generation.lower())]
        if variants:
            return f"unknown generation {generation!r}; did you mean {' or '.join(variants)}?"
        return f"unknown generation {generation!r}; valid: {', '.join(sorted((*GENERATIONS, 'cpu')))}"
    if generation_name == "cpu":
        return "the size is missing; write for example 'cpu-8'"
    generation = GENERATIONS[generation_name]
    torus = generation.sizes[1]
    cores = math.prod(torus) * generation.name_counts_per_chip
    return (
        f"the size is missing; write for example '{generation.name}-{cores}' or "
        f"'{generation.name}:{_format_torus(torus)}'"
    )


def _parse(spelled: str, name: str) -> Slice:
    """Parse a name that matches `NAME`, of a known generation.

    Args:
        name: what the user wrote, for messages.

    Raises:
        ConfigError: see `parse_slice`.
    """
    match = NAME.fullmatch(spelled)
    assert match is not None
    copies, generation_name, count, chips = match.groups()
    if generation_name == "cpu":
        return _make_cpu_slice(name, int(count or 0), copies)
    generation = GENERATIONS[CLOUD_SPELLINGS.get(generation_name, generation_name)]
    slices = int(copies or 1)
    if not 1 <= slices <= MAX_SLICES:
        raise ConfigError(
            f"hardware.slice {name!r}: needs 1 to {MAX_SLICES} slices, for example '2x{generation.name}-256'"
        )
    prefix = f"{copies}x" if copies else ""
    if chips:
        torus = _validate_torus(name, prefix, generation, tuple(map(int, chips.split("x"))))
    else:
        torus = _find_standard_torus(name, prefix, generation, int(count or 0))
    return Slice(name, generation, torus, slices)


def _find_standard_torus(name: str, prefix: str, generation: Generation, count: int) -> tuple[int, ...]:
    """Return the torus of the slice whose Cloud TPU name ends in `count`."""
    tori = {math.prod(torus) * generation.name_counts_per_chip: torus for torus in generation.sizes}
    if count not in tori:
        closest = min(tori, key=lambda size: abs(math.log(size / max(count, 1))))
        raise ConfigError(
            f"hardware.slice {name!r}: {generation.name} has no slice of size {count}; "
            f"did you mean '{prefix}{generation.name}-{closest}'? (sizes: {', '.join(map(str, sorted(tori)))})"
        )
    return tori[count]


def _validate_torus(name: str, prefix: str, generation: Generation, torus: tuple[int, ...]) -> tuple[int, ...]:
    """Check that the generation has the topology `torus`, and return it."""
    pod = generation.sizes[-1]
    if len(torus) != len(pod):
        problem = f"a {generation.name} torus has {len(pod)} dimensions, not {len(torus)}"
    elif _is_topology(torus, generation):
        return torus
    elif math.prod(torus) > math.prod(pod):
        problem = f"the largest {generation.name} slice is {_format_torus(pod)}"
    else:
        problem = f"{generation.name} has no topology {_format_torus(torus)}"
    closest = _nearest_size(generation, torus)
    raise ConfigError(
        f"hardware.slice {name!r}: {problem}; did you mean '{prefix}{generation.name}:{_format_torus(closest)}'? "
        f"(topologies: {_describe_topologies(generation)})"
    )


def _is_topology(torus: tuple[int, ...], generation: Generation) -> bool:
    """Return whether Google Cloud offers a topology, in any order of sides: a listed one, or a 3D torus of cubes."""
    if sorted(torus) in [sorted(size) for size in generation.sizes]:
        return True
    has_cubes = len(torus) == 3 and all(n > 0 and n % _CUBE == 0 for n in torus)
    return has_cubes and math.prod(torus) <= math.prod(generation.sizes[-1])


def _describe_topologies(generation: Generation) -> str:
    """Describe the topologies of a generation in words."""
    if len(generation.sizes[-1]) == 2:
        return ", ".join(map(_format_torus, generation.sizes))
    small = [_format_torus(size) for size in generation.sizes if any(n % _CUBE for n in size)]
    return f"{', '.join(small)}, and multiples of 4x4x4 up to {math.prod(generation.sizes[-1])} chips"


def _nearest_size(generation: Generation, torus: tuple[int, ...]) -> tuple[int, ...]:
    """Return the listed topology nearest to `torus`, first by its number of chips, then by its sides."""

    def ratio(n: int, other: int) -> float:
        return abs(math.log(n / max(1, other)))

    def difference(size: tuple[int, ...]) -> tuple[float, float]:
        sides = zip(size, torus, strict=True) if len(size) == len(torus) else ()
        return ratio(math.prod(size), math.prod(torus)), sum(ratio(*each) for each in sides)

    return min(generation.sizes, key=difference)


def _format_torus(sizes: tuple[int, ...]) -> str:
    return "x".join(map(str, sizes))


def _make_cpu_slice(name: str, devices: int, copies: str | None) -> Slice:
    """Return a slice of virtual CPU devices that share the memory of this host."""
    if copies is not None:
        raise ConfigError(
            f"hardware.slice {name!r}: virtual CPU devices are always one slice; write for example 'cpu-8'"
        )
    if not 1 <= devices <= MAX_CPU_DEVICES:
        raise ConfigError(f"hardware.slice {name!r}: needs 1 to {MAX_CPU_DEVICES} virtual devices, for example 'cpu-8'")
    host_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # these speeds only rank plans against each other; they are no prediction for this machine
    generation = Generation(
        name="cpu",
        devices_per_chip=1,
        name_counts_per_chip=1,
        hbm_gib=host_bytes / GIB / devices,
        flops=2e10,
        hbm_bandwidth=5e9,
        link_bandwidth=2.5e9,
        chip_bandwidth=0,
        wraparound=Wraparound.POD,
        network_bandwidth=2.5e9,
        host_bandwidth=5e9,
        host_gib=host_bytes / GIB / devices,
        clock=1e9,
        host_chips=(1, 1, 1),
        sizes=((devices,),),
    )
    return Slice(name, generation, (devices,))
