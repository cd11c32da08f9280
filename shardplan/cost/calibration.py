"""Factors on the rooflines by TPU generation, fitted to the TPU compiler; calibration.json has the numbers.

`scripts/fit_planner.py` fits them to compiled programs, and writes the file: for every generation the factors, and for
every group of factors the programs that it was fitted to, the error that is left, and the error of the programs when
they are left out of the fit. Where plans ask the compiler for larger tiles, `larger_tiles` has the factors that differ
with these, fitted to programs of their own.
"""

import json
import logging
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from shardplan.cost.sharding import CompilerQuirks
from shardplan.hardware import GENERATIONS, GIB, MAX_HOST_GIB, Slice
from shardplan.program.tasks import Step

logger = logging.getLogger(__name__)

FILE = "calibration.json"
MEMORY_ERROR = 0.08
"""Fraction of a device's memory that is kept free because the estimated peak has an error.

No program of docs/benchmarks that the compiler accepts needs more than this above or below its estimate
(`tests/unit/test_accuracy.py`). A constant: no generation has enough programs near the limit for one of its own."""

HOST_PART = 0.75
"""Fraction of a host's memory that activations may take; the rest is for the loader, the input pipeline, copies of
checkpoints on their way to storage, and the system. Chosen, not measured: no program here has run on a TPU."""

STEP_ERROR = 0.11
"""Relative error of step times that nine in ten estimates stay below; a smaller difference does not tell which step is
faster.

It is that of the programs of docs/benchmarks/planner.json, against the compiler (`tests/unit/test_accuracy.py`)."""


@dataclass(frozen=True)
class TrainingFactors:
    """The factors of steps with gradients, in place of the same factors of `Calibration`."""

    products: float = 1.0
    elementwise: float = 1.0
    weight_passes: int = 0


@dataclass(frozen=True)
class Calibration:
    """Factors on rooflines for one TPU generation, under the compiler options that plans carry."""

    products: float = 1.0
    """Matmul seconds (grouped ones excepted) = products x max(padded FLOPs / peak, bytes / bandwidth)."""
    vectors: float = 1.0
    """Seconds of matrix-vector products, one per token = vectors x bytes / HBM bandwidth."""
    elementwise: float = 1.0
    """Seconds of elementwise work that computes elements = elementwise x bytes / HBM bandwidth."""
    copying: float = 1.0
    """Seconds to reorder gathered parameters and to copy own shards into gathered arrays = copying x bytes / HBM
    bandwidth."""
    overlap: float = 1.0
    """Fraction of a matmul's time that a gather of its weights can overlap with."""
    slicing: float = 2.0
    """Seconds to copy a layer's expert weights out of the stack of all layers = slicing x bytes read and written / HBM
    bandwidth."""
    kernel_wait: float = 0.5
    """Fraction of transfers beside expert kernels (of chunks of tokens, and of stored weights) that the kernels do not
    hide."""
    weight_passes: int = 0
    """Number of times that elementwise work reads or writes the weight, or its gradient, of a matmul: 0 or 1 in steps
    with gradients, where it is work that does not grow with the tokens (casts, sums of gradients, copies into another
    memory layout)."""
    quirks: CompilerQuirks = field(default_factory=CompilerQuirks)
    vmem_kib: int | None = None
    """KiB of vector memory (VMEM) that one operation may use, for larger matmul tiles; None for the compiler's
    limit."""
    training: TrainingFactors | None = None
    """The factors of steps with gradients; None if they have those of other steps."""

    def of(self, step: Step) -> "Calibration":
        """Return the factors of a step: those of trainings, if it has gradients.

        Trainings with routed experts have those of other steps: only dense ones are fitted apart.
        """
        if self.training is None or not step.has_gradients or step.has_experts:
            return self
        return replace(self, **vars(self.training))


@cache
def load_calibration(generation: str, larger_tiles: bool = True) -> Calibration:
    """Load the factors on rooflines of a generation.

    All factors are 1 for virtual CPU devices, and, with a warning, for TPU generations that nothing is fitted for yet.

    Args:
        larger_tiles: whether plans ask for larger tiles, on generations on which matmuls gain from them.

    >>> load_calibration("v3") == load_calibration("v4"), load_calibration("cpu") == Calibration()
    (True, True)
    """
    row = GENERATIONS.get(generation)
    if row is None:
        return Calibration()
    text = resources.files("shardplan.cost").joinpath(FILE).read_text(encoding="utf-8")
    entry = json.loads(text).get(row.factors_of or generation)
    if entry is None:
        logger.warning(
            "no factors are fitted for %s, so that its times are plain rooflines, which are shorter", generation
        )
        return Calibration()
    factors, training, tiles = entry["factors"], entry["training"], entry.get("larger_tiles")
    if tiles is not None and larger_tiles:
        factors = {**factors, **tiles["factors"], "vmem_kib": tiles["vmem_kib"]}
        training = tiles["training"]
    return Calibration(
        **factors,
        quirks=CompilerQuirks(**entry["quirks"]),
        training=TrainingFactors(**training),
    )


def calibration_of(step: Step, hardware: Slice) -> Calibration:
    """Return the factors for a step on a slice, under the compiler options that its plan carries.

    Steps with routed experts have the compiler's own tiles: larger ones were not tried with the kernels of experts.
    """
    return load_calibration(hardware.generation.name, larger_tiles=not step.has_experts).of(step)


def usable_bytes(hardware: Slice) -> float:
    """Return the bytes per device that an estimated peak must not exceed."""
    available = hardware.generation.hbm_gib * GIB
    return available if hardware.is_cpu else available * (1 - MEMORY_ERROR)


def usable_host_bytes(hardware: Slice, host_gib: float | None = None) -> float:
    """Return the bytes of a host's memory that a device may use for activations.

    Args:
        host_gib: `hardware.host_gib` of the configuration.
    """
    return GIB * (min(MAX_HOST_GIB, HOST_PART * hardware.generation.host_gib) if host_gib is None else host_gib)


def compiler_quirks(hardware: Slice, factors: Calibration | None = None) -> CompilerQuirks:
    """Return the behaviour of the compiler for `hardware`.

    On a 2D torus, reduce-scatters over the slice depend on its shape: if it is a rectangle, the compiler leaves most of
    them as they are; if it is a square, it replaces all of them (programs for v5e and v6e in docs/benchmarks).

    Args:
        factors: factors of the generation; default: the factors in calibration.json.
    """
    quirks = (factors or load_calibration(hardware.generation.name)).quirks
    is_rectangle = len(hardware.torus) == 2 and len({*hardware.torus}) == 2
    return replace(
        quirks,
        scatters_over_slice=quirks.scatters_over_slice or is_rectangle,
        devices_per_slice=hardware.devices // hardware.slices,
        plain_attention=hardware.is_cpu,
        core_memory=hardware.generation.core_memory,
    )
