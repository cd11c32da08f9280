"""Accelerator generations, one data row each; all differences between them, except fitted factors, are here.

HBM is what the TPU compiler reports as available to a program. FLOP/s, bandwidths and torus dimensions are from the
Cloud TPU documentation and the scaling book (https://jax-ml.github.io/scaling-book/tpus); v3's link bandwidth is a
guess.

Network bandwidth is the bandwidth of a host's network cards in the Cloud TPU documentation, divided by the chips of
that host (v5e 2 x 100 Gb/s and v6e 4 x 200 Gb/s for 8 chips; v4 and v5p 50, tpu7x 100 Gb/s for each chip); for v3 the
value of v4 is a guess.

Host bandwidth is the bandwidth of PCIe to a chip in the scaling book, 16 GB/s and 32 GB/s for v6e; for v3 and tpu7x,
where two devices share it, 16 and 32 GB/s to a chip are guesses.

Host memory is what Google Cloud gives a machine with four chips, divided by its devices; its GB are taken as GiB: 340
for v3 and 407 for v4 (TPU VMs), 192 for v5e, 448 for v5p, 720 for v6e and 960 for tpu7x. It was not measured, and
`hardware.host_gib` replaces it.

Where one chip is two JAX devices (v3: cores, tpu7x: dies), both share the links of the chip. Between the dies of tpu7x
the bandwidth is six times that of a link (https://docs.cloud.google.com/tpu/docs/tpu7x); for v3 the same factor is a
guess. Wraparound links are as in the scaling book; that v3 has them only in a full pod is a guess too.

Clocks are from the papers about v3 (940 MHz, CACM 63(7)) and v4 (1050 MHz, ISCA 2023), and 1.5 GHz for v5e from the
scaling book; v5p, v6e and tpu7x are inferred from FLOP/s = MXUs x 2 x side^2 x clock. A v5p device has 8 MXUs of side
128. v6e and tpu7x have 2 of side 256, counted twice: the compiler schedules large products at more FLOPs per cycle than
these could do if they took one row a cycle.

What Google Cloud calls a generation is from the pages of the TPU versions in the Cloud TPU documentation
(https://docs.cloud.google.com/tpu/docs) and from https://docs.cloud.google.com/tpu/docs/runtimes.
"""

from dataclasses import dataclass
from enum import StrEnum

MAX_HOST_GIB = 128
"""GiB of host memory that the TPU compiler gives the program of one device; it refuses programs that need more
(libtpu 0.0.48 for v6e, where three quarters of a device's part of its host are more)."""


class Wraparound(StrEnum):
    """Which torus dimensions of a generation's slices are rings rather than lines."""

    CUBES = "cubes"
    """All torus dimensions are rings if the torus is made of 4x4x4 cubes."""
    SIDE = "side"
    """A torus dimension is a ring if it is as long as the pod's."""
    POD = "pod"
    """Only the dimensions of the full pod are rings."""


@dataclass(frozen=True)
class CloudNames:
    """Google Cloud's names of a generation and of its machine types."""

    type: str
    """Prefix of the names of accelerator types."""
    software: str | None
    """Software version of a TPU VM; None for a generation that is only in Kubernetes clusters."""
    lone_host_chips: int
    """Largest number of chips of a host that is a slice by itself."""
    has_xpk: bool = True
    """Whether xpk, Google's command for Kubernetes clusters of TPUs, creates clusters of this generation."""


@dataclass(frozen=True)
class Generation:
    """One accelerator generation; "device" means JAX device."""

    name: str
    devices_per_chip: int
    name_counts_per_chip: int
    """How much one chip adds to the number in a slice's name: names count chips for v5e and v6e, cores for others."""
    hbm_gib: float
    """GiB of memory per device that the compiler can allocate."""
    flops: float
    """Peak bf16 FLOP/s per device."""
    hbm_bandwidth: float
    """HBM bandwidth, bytes per second per device."""
    link_bandwidth: float
    """Bytes per second of one interconnect (ICI) link of a chip, one way."""
    chip_bandwidth: float
    """Bytes per second between the two devices of one chip, one way; 0 if a chip is one device."""
    wraparound: Wraparound
    network_bandwidth: float
    """Bytes per second of one chip over the data-centre network (DCN) that connects slices, one way."""
    host_bandwidth: float
    """Bytes per second between a device and the memory of its host (PCIe), one way."""
    host_gib: float
    """GiB of host memory per device, in the machines that the cloud rents out with the chips."""
    clock: float
    """Frequency of the tensor core, Hz; converts the compiler's cycles to seconds."""
    host_chips: tuple[int, ...]
    """Chips of one host along x, y and z; a torus consists of complete hosts, or of a part of one host."""
    sizes: tuple[tuple[int, ...], ...]
    """Available torus shapes, in chips; the last one is the pod."""
    cloud: CloudNames | None = None
    """Google Cloud's names; None for virtual CPU devices."""
    device_kinds: tuple[str, ...] = ()
    """JAX's names for the generation's devices, as in `jax.devices()[0].device_kind`."""
    spellings: tuple[str, ...] = ()
    """Other names that users, clouds and JAX use, in lower case and without separators."""
    kernel_memory: int = 16 * 2**20
    """Bytes of a core's memory (VMEM) that the compiler gives to a kernel by default."""
    core_memory: int = 16 * 2**20
    """Bytes of the core's memory (VMEM)."""
    matrix_unit: int = 128
    """Rows and columns of a matrix unit (MXU)."""
    gathers_on_sparse_cores: bool = False
    """Whether plans make the compiler gather on the sparse cores, because otherwise gathers overlap with nothing."""
    factors_of: str | None = None
    """The generation whose fitted factors the cost model uses; None for its own factors, see
    `shardplan.cost.calibration`."""


_3D = (
    (2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), (4, 4, 4), (4, 4, 8), (4, 8, 8),
    (8, 8, 8), (8, 8, 16), (8, 16, 16), (16, 16, 16), (16, 16, 24),
)  # fmt: skip
_3D_V4 = _3D[:-1]  # a pod of v4 has 4096 chips
_2D = ((1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16))
_2D_V3 = ((2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32))
# Machines of v5e and v6e have 8 chips (2x4), but in a slice of several machines each host has 4 of them.
_HOST = (2, 2, 1)

_V3 = Generation(
    name="v3",
    devices_per_chip=2,
    name_counts_per_chip=2,
    hbm_gib=15.48,
    flops=6.1e13,
    hbm_bandwidth=4.5e11,
    link_bandwidth=7.0e10,
    chip_bandwidth=4.2e11,
    wraparound=Wraparound.POD,
    network_bandwidth=6.25e9,
    host_bandwidth=8.0e9,
    host_gib=42.5,
    clock=0.94e9,
    host_chips=_HOST,
    sizes=_2D_V3,
    cloud=CloudNames("v3", "tpu-ubuntu2204-base", 4, has_xpk=False),
    device_kinds=("TPU v3",),
    factors_of="v4",  # libtpu compiles no attention kernel in bfloat16 for v3
)
_V4 = Generation(
    name="v4",
    devices_per_chip=1,
    name_counts_per_chip=2,
    hbm_gib=30.75,
    flops=2.75e14,
    hbm_bandwidth=1.2e12,
    link_bandwidth=4.5e10,
    chip_bandwidth=0,
    wraparound=Wraparound.CUBES,
    network_bandwidth=6.25e9,
    host_bandwidth=1.6e10,
    host_gib=101.75,
    clock=1.05e9,
    host_chips=_HOST,
    sizes=_3D_V4,
    cloud=CloudNames("v4", "tpu-ubuntu2204-base", 4),
    device_kinds=("TPU v4",),
)
_V5E = Generation(
    name="v5e",
    devices_per_chip=1,
    name_counts_per_chip=1,
    hbm_gib=15.75,
    flops=1.97e14,
    hbm_bandwidth=8.1e11,
    link_bandwidth=4.5e10,
    chip_bandwidth=0,
    wraparound=Wraparound.SIDE,
    network_bandwidth=3.125e9,
    host_bandwidth=1.6e10,
    host_gib=48.0,
    clock=1.5e9,
    host_chips=_HOST,
    sizes=_2D,
    cloud=CloudNames("v5litepod", "v2-alpha-tpuv5-lite", 8),
    device_kinds=("TPU v5 lite", "TPU v5e"),
    spellings=("5e", "v5lite", "v5litepod"),
    core_memory=128 * 2**20,
)
_V5P = Generation(
    name="v5p",
    devices_per_chip=1,
    name_counts_per_chip=2,
    hbm_gib=95.74,
    flops=4.59e14,
    hbm_bandwidth=2.765e12,
    link_bandwidth=9.0e10,
    chip_bandwidth=0,
    wraparound=Wraparound.CUBES,
    network_bandwidth=6.25e9,
    host_bandwidth=1.6e10,
    host_gib=112.0,
    clock=1.75e9,
    host_chips=_HOST,
    sizes=_3D,
    cloud=CloudNames("v5p", "v2-alpha-tpuv5", 4),
    device_kinds=("TPU v5", "TPU v5p"),
    spellings=("5p",),
    core_memory=64 * 2**20,
    gathers_on_sparse_cores=True,
)
_V6E = Generation(
    name="v6e",
    devices_per_chip=1,
    name_counts_per_chip=1,
    hbm_gib=31.25,
    flops=9.18e14,
    hbm_bandwidth=1.638e12,
    link_bandwidth=9.0e10,
    chip_bandwidth=0,
    wraparound=Wraparound.SIDE,
    network_bandwidth=1.25e10,
    host_bandwidth=3.2e10,
    host_gib=180.0,
    clock=1.75e9,
    host_chips=_HOST,
    sizes=_2D,
    cloud=CloudNames("v6e", "v2-alpha-tpuv6e", 8),
    device_kinds=("TPU v6 lite", "TPU v6e"),
    spellings=("v6", "6e", "v6lite", "trillium"),
    kernel_memory=32 * 2**20,
    core_memory=128 * 2**20,
    gathers_on_sparse_cores=True,
    matrix_unit=256,
)
_TPU7X = Generation(
    name="tpu7x",
    devices_per_chip=2,
    name_counts_per_chip=2,
    hbm_gib=94.75,
    flops=1.15e15,
    hbm_bandwidth=3.7e12,
    link_bandwidth=1.0e11,
    chip_bandwidth=6.0e11,
    wraparound=Wraparound.CUBES,
    network_bandwidth=1.25e10,
    host_bandwidth=1.6e10,
    host_gib=120.0,
    clock=2.2e9,
    host_chips=_HOST,
    sizes=_3D,
    cloud=CloudNames("tpu7x", None, 4),
    device_kinds=("TPU7x",),
    spellings=("v7", "v7x", "7x", "tpu7", "ironwood"),
    kernel_memory=32 * 2**20,
    core_memory=64 * 2**20,
    matrix_unit=256,
)
GENERATIONS = {row.name: row for row in (_V3, _V4, _V5E, _V5P, _V6E, _TPU7X)}


def device_kinds() -> list[str]:
    """Return all names of JAX for devices that have hardware data."""
    kinds: list[str] = []
    for row in GENERATIONS.values():
        kinds += row.device_kinds
    return kinds


def generation_of_device(kind: str) -> Generation | None:
    """Return the generation whose devices JAX calls `kind`; None for a kind without hardware data.

    >>> generation_of_device("TPU v5 lite").name
    'v5e'
    """
    return next((row for row in GENERATIONS.values() if kind in row.device_kinds), None)
