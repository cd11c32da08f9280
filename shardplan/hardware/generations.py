"""Accelerator generations, one data row each.

HBM is what the TPU compiler reports as available to a program. FLOP/s, bandwidths and torus dimensions are from the
Cloud TPU documentation and the scaling book (https://jax-ml.github.io/scaling-book/tpus); v3's link bandwidth is a
guess.

Network bandwidth is the bandwidth of a host's network cards in the Cloud TPU documentation, divided by the chips of
that host (v5e 2 x 100 Gb/s and v6e 4 x 200 Gb/s for 8 chips; v4 and v5p 50, tpu7x 100 Gb/s for each chip); for v3 the
value of v4 is a guess.

Where one chip is two JAX devices (v3: cores, tpu7x: dies), both share the links of the chip. Between the dies of tpu7x
the bandwidth is six times that of a link (https://docs.cloud.google.com/tpu/docs/tpu7x); for v3 the same factor is a
guess. Wraparound links are as in the scaling book; that v3 has them only in a full pod is a guess too.

Clocks are from the papers about v3 (940 MHz, CACM 63(7)) and v4 (1050 MHz, ISCA 2023), and 1.5 GHz for v5e from the
scaling book; v5p, v6e and tpu7x are inferred from FLOP/s = MXUs x 2 x side^2 x clock. A v5p device has 8 MXUs of side
128. v6e and tpu7x have 2 of side 256, counted twice: the compiler schedules large products at more FLOPs per cycle than
these could do if they took one row a cycle.
"""

from dataclasses import dataclass
from enum import StrEnum


class Wraparound(StrEnum):
    """Which slices of a generation have links between the two ends of a torus dimension."""

    CUBES = "cubes"
    """Tori made of 4x4x4 cubes, in all dimensions."""
    SIDE = "side"
    """Any torus, in the dimensions that are as long as those of the pod."""
    POD = "pod"
    """Only the full pod."""


@dataclass(frozen=True)
class Generation:
    """One accelerator generation; "device" means JAX device."""

    name: str
    devices_per_chip: int
    name_counts_per_chip: int
    """How much one chip adds to the number in a slice's name: v5e and v6e names count chips, the others cores."""
    hbm_gib: float
    """Memory per device that the compiler can allocate, GiB."""
    flops: float
    """Peak bf16 FLOP/s per device."""
    hbm_bandwidth: float
    """Bytes per second per device."""
    link_bandwidth: float
    """Bytes per second of one interconnect (ICI) link of a chip, one way."""
    chip_bandwidth: float
    """Bytes per second between the two devices of one chip, one way; 0 where a chip is one device."""
    wraparound: Wraparound
    network_bandwidth: float
    """Bytes per second of one chip over the data-centre network (DCN) that connects slices, one way."""
    clock: float
    """Frequency of the tensor core, Hz; converts the compiler's cycles to seconds."""
    host_chips: tuple[int, ...]
    """Chips of one host along x, y and z; a torus consists of complete hosts, or of a part of one host."""
    sizes: tuple[tuple[int, ...], ...]
    """Available torus shapes, in chips; the last one is the pod."""


_3D = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8),
    (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 24),
)  # fmt: skip
_V4 = _3D[:-1]  # a pod of v4 has 4096 chips
_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_2D_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
# Machines of v5e and v6e have 8 chips (2x4), but in a slice of several machines each host has 4 of them.
_HOST = (2, 2, 1)

GENERATIONS = {
    row.name: row
    for row in (
        Generation("v3", 2, 2, 15.48, 6.1e13, 4.5e11, 7.0e10, 4.2e11, Wraparound.POD, 6.25e9, 0.94e9, _HOST, _2D_V3),
        Generation("v4", 1, 2, 30.75, 2.75e14, 1.2e12, 4.5e10, 0, Wraparound.CUBES, 6.25e9, 1.05e9, _HOST, _V4),
        Generation("v5e", 1, 1, 15.75, 1.97e14, 8.1e11, 4.5e10, 0, Wraparound.SIDE, 3.125e9, 1.5e9, _HOST, _2D),
        Generation("v5p", 1, 2, 95.74, 4.59e14, 2.765e12, 9.0e10, 0, Wraparound.CUBES, 6.25e9, 1.75e9, _HOST, _3D),
        Generation("v6e", 1, 1, 31.25, 9.18e14, 1.638e12, 9.0e10, 0, Wraparound.SIDE, 1.25e10, 1.75e9, _HOST, _2D),
        Generation("tpu7x", 2, 2, 94.75, 1.15e15, 3.7e12, 1.0e11, 6.0e11, Wraparound.CUBES, 1.25e10, 2.2e9, _HOST, _3D),
    )
}
