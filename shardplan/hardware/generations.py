"""Accelerator generations, one data row each.

HBM is what the TPU compiler says is available to a program; FLOP/s, bandwidths and torus dimensions are from the Cloud
TPU documentation and the scaling book (https://jax-ml.github.io/scaling-book/tpus); v3's link bandwidth is a guess.

Network bandwidth is what the Cloud TPU documentation gives a host's network cards, divided by the chips of that host
(v5e 2 x 100 Gb/s and v6e 4 x 200 Gb/s for 8 chips; v4 and v5p 50, tpu7x 100 Gb/s for each chip); v3's is v4's, a guess.

Where a chip is two devices (v3: cores, tpu7x: dies), these share its links; between the dies of tpu7x bytes go six
times as fast as over a link (https://docs.cloud.google.com/tpu/docs/tpu7x); for v3 the same factor is a guess. Links
between the ends of a dimension are as the scaling book has them; that v3 has them in a whole pod alone is a guess too.

Clocks are those of the papers about v3 (940 MHz, CACM 63(7)) and v4 (1050 MHz, ISCA 2023), and 1.5 GHz for v5e from the
scaling book; v5p, v6e and tpu7x are inferred from FLOP/s = MXUs x 2 x side^2 x clock. A v5p device has 8 MXUs of side
128. v6e and tpu7x have 2 of side 256, counted twice: the compiler schedules large products at more FLOPs per cycle than
these could do if they took one row a cycle.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Generation:
    """One accelerator generation. A "device" is what JAX calls one."""

    name: str
    devices_per_chip: int
    name_counts_per_chip: int
    """What one chip adds to the number in a slice's name: v5e and v6e names count chips, the others cores."""
    hbm_gib: float
    """Memory per device that the compiler will fill, GiB."""
    flops: float
    """Peak bf16 FLOP/s per device."""
    hbm_bandwidth: float
    """Bytes per second per device."""
    link_bandwidth: float
    """Bytes per second of one interconnect link of a chip, one way."""
    chip_bandwidth: float
    """Bytes per second between the two devices of one chip, one way; 0 where a chip is one device."""
    wraparound: str
    """Where links connect the ends of a dimension: `cubes` (in tori made of 4x4x4 cubes), `side` (along dimensions as
    long as the pod), `pod` (in the whole pod alone)."""
    network_bandwidth: float
    """Bytes per second of one chip over the data-centre network that connects slices, one way."""
    clock: float
    """Hz of the tensor core: the compiler's cycles, divided by it, are seconds."""
    host_chips: tuple[int, ...]
    """Chips of one host along x, y and z. A torus consists of whole hosts, or of a part of one."""
    sizes: tuple[tuple[int, ...], ...]
    """The tori that can be had, in chips."""


_3D = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8),
    (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 24),
)  # fmt: skip
_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_2D_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
# The machines of v5e and v6e have 8 chips (2x4); in a slice of several machines they are handed out as hosts of 4.
_HOST = (2, 2, 1)

GENERATIONS = {
    row.name: row
    for row in (
        Generation("v3", 2, 2, 15.48, 6.1e13, 4.5e11, 7.0e10, 4.2e11, "pod", 6.25e9, 0.94e9, _HOST, _2D_V3),
        Generation("v4", 1, 2, 30.75, 2.75e14, 1.2e12, 4.5e10, 0, "cubes", 6.25e9, 1.05e9, _HOST, _3D),
        Generation("v5e", 1, 1, 15.75, 1.97e14, 8.1e11, 4.5e10, 0, "side", 3.125e9, 1.5e9, _HOST, _2D),
        Generation("v5p", 1, 2, 95.74, 4.59e14, 2.765e12, 9.0e10, 0, "cubes", 6.25e9, 1.75e9, _HOST, _3D),
        Generation("v6e", 1, 1, 31.25, 9.18e14, 1.638e12, 9.0e10, 0, "side", 1.25e10, 1.75e9, _HOST, _2D),
        Generation("tpu7x", 2, 2, 94.75, 1.15e15, 3.7e12, 1.0e11, 6.0e11, "cubes", 1.25e10, 2.2e9, _HOST, _3D),
    )
}
