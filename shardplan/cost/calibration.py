"""Factors on the rooflines by TPU generation, fitted to the TPU compiler; calibration.json has the numbers.

`scripts/fit_planner.py` fits them to compiled programs, and writes the file.
"""

import json
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import resources

from shardplan.cost.sharding import CompilerQuirks
from shardplan.hardware import GIB, Slice

FILE = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Factors on rooflines for one TPU generation, under the compiler options that plans carry."""

    products: float = 1.0
    """Time of matmuls, relative to that of their padded FLOPs at peak (or of their bytes, if longer)."""
    vectors: float = 1.0
    """Time of matrix-vector products, one for every token, relative to that of their bytes at HBM bandwidth."""
    elementwise: float = 1.0
    """Time of elementwise work, relative to that of its bytes at HBM bandwidth."""
    attention: float = 1.0
    """Time of attention, relative to that of its unmasked FLOPs at peak."""
    rearranging: float = 1.0
    """Time to reorder gathered parameters, relative to that of their bytes at HBM bandwidth."""
    gathering: float = 0.0
    """Time to copy a device's own shard into a gathered array, relative to that of its bytes at HBM bandwidth."""
    overlap: float = 1.0
    """Fraction of a matmul's time that a gather of its weights can overlap with."""
    memory_error: float = 0.0
    """Fraction of the memory that is kept free for the error of the estimated peak."""
    quirks: CompilerQuirks = field(default_factory=CompilerQuirks)


@cache
def load_calibration(generation: str) -> Calibration:
    """The factors of a generation; plain rooflines for one that is not fitted, such as CPUs."""
    text = resources.files("shardplan.cost").joinpath(FILE).read_text(encoding="utf-8")
    values = json.loads(text).get(generation, {})
    return Calibration(**{**values, "quirks": CompilerQuirks(**values.get("quirks", {}))})


def usable_bytes(hardware: Slice) -> float:
    """Bytes per device that an estimated peak must not exceed."""
    return hardware.generation.hbm_gib * GIB * (1 - load_calibration(hardware.generation.name).memory_error)


def compiler_quirks(hardware: Slice) -> CompilerQuirks:
    """The behaviour of the compiler for `hardware`."""
    return replace(load_calibration(hardware.generation.name).quirks, plain_attention=hardware.is_cpu)
