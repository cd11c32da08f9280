"""What the planner knows of accelerators: generations as data rows, slices by name."""

from shardplan.hardware.generations import GENERATIONS, Generation
from shardplan.hardware.slices import Slice, parse_slice

__all__ = ["GENERATIONS", "Generation", "Slice", "parse_slice"]
