"""What the planner knows of accelerators: generations as data rows, slices by name."""

from shardplan.hardware.generations import GENERATIONS, Generation
from shardplan.hardware.slices import GIB, Slice, parse_slice

__all__ = ["GENERATIONS", "GIB", "Generation", "Slice", "parse_slice"]
