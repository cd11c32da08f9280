"""Accelerator generations, one data row each.

HBM is what the TPU compiler says is available to a program; FLOP/s, bandwidths and torus dimensions are from the Cloud
TPU documentation and the scaling book (https://jax-ml.github.io/scaling-book/tpus); v3's link bandwidth is a guess.
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
    """Bytes per second of one interconnect link, one way."""
    sizes: tuple[tuple[int, ...], ...]
    """The tori that can be had, in chips."""


_3D = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8),
    (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 24),
)  # fmt: skip
_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_2D_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))

GENERATIONS = {
    row.name: row
    for row in (
        Generation("v3", 2, 2, 15.48, 6.1e13, 4.5e11, 7.0e10, _2D_V3),
        Generation("v4", 1, 2, 30.75, 2.75e14, 1.2e12, 4.5e10, _3D),
        Generation("v5e", 1, 1, 15.75, 1.97e14, 8.1e11, 4.5e10, _2D),
        Generation("v5p", 1, 2, 95.74, 4.59e14, 2.765e12, 9.0e10, _3D),
        Generation("v6e", 1, 1, 31.25, 9.18e14, 1.638e12, 9.0e10, _2D),
        Generation("tpu7x", 2, 2, 94.75, 1.15e15, 3.7e12, 1.0e11, _3D),
    )
}
