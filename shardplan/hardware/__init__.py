"""Accelerator hardware: generations as data rows, slices by name, and the placement of meshes on their torus."""

from shardplan.hardware.cloud import accelerator_type, chips_per_host, cloud_names, host_count, topology
from shardplan.hardware.collective_kind import CollectiveKind
from shardplan.hardware.generations import GENERATIONS, MAX_HOST_GIB, Generation
from shardplan.hardware.mesh_placement import MeshPlacement, place_mesh
from shardplan.hardware.slices import GIB, Slice, divisors, parse_slice, standard_slices

__all__ = [
    "GENERATIONS",
    "GIB",
    "MAX_HOST_GIB",
    "CollectiveKind",
    "Generation",
    "MeshPlacement",
    "Slice",
    "accelerator_type",
    "chips_per_host",
    "cloud_names",
    "divisors",
    "host_count",
    "parse_slice",
    "place_mesh",
    "standard_slices",
    "topology",
]
