"""What is known of accelerators: generations as data rows, slices by name, meshes on their links."""

from shardplan.hardware.generations import GENERATIONS, Generation
from shardplan.hardware.mesh_placement import MeshPlacement, place_mesh
from shardplan.hardware.slices import GIB, Slice, divisors, parse_slice

__all__ = ["GENERATIONS", "GIB", "Generation", "MeshPlacement", "Slice", "divisors", "parse_slice", "place_mesh"]
