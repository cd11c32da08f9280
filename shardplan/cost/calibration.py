"""What the TPU compiler makes of work beyond the rooflines, by generation; calibration.json has the numbers.

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
    """Factors on rooflines, under the compiler options that plans carry."""

    products: float = 1.0
    """Time of products, in that of their FLOPs at peak (or of their bytes)."""
    vectors: float = 1.0
    """Time of products of matrices with vectors, one for every token, in that of their bytes at HBM bandwidth."""
    elementwise: float = 1.0
    """Time of elementwise work, in that of its bytes at HBM bandwidth."""
    attention: float = 1.0
    """Time of attention, in that of the FLOPs that a causal mask leaves, at peak."""
    rearranging: float = 1.0
    """Time to put gathered parameters in order, in that of their bytes at HBM bandwidth."""
    gathering: float = 0.0
    """Time to copy a device's own part of what it gathers, in that of its bytes at HBM bandwidth."""
    overlap: float = 1.0
    """Part of a product's time in which a gather of its weights can hide."""
    memory_error: float = 0.0
    """Part of the memory that is kept free for the error of the estimated peak."""
    quirks: CompilerQuirks = field(default_factory=CompilerQuirks)


@cache
def calibration(generation: str) -> Calibration:
    """The factors of a generation; the rooflines themselves for one that has not been fitted, such as CPUs."""
    text = resources.files("shardplan.cost").joinpath(FILE).read_text(encoding="utf-8")
    values = json.loads(text).get(generation, {})
    return Calibration(**{**values, "quirks": CompilerQuirks(**values.get("quirks", {}))})


def usable_bytes(hardware: Slice) -> float:
    """Bytes per device that an estimated peak may have."""
    return hardware.generation.hbm_gib * GIB * (1 - calibration(hardware.generation.name).memory_error)


def quirks(hardware: Slice) -> CompilerQuirks:
    """What the compiler for `hardware` does."""
    return replace(calibration(hardware.generation.name).quirks, plain_attention=hardware.is_cpu)
