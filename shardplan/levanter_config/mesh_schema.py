"""Parses the mesh schema of Levanter's trainer section: `mesh.axes`, `mesh.shared_mapping`, ...

Versions of Levanter later than 1.2.dev1644 have this schema.
"""

import math
from dataclasses import replace

from shardplan.errors import ConfigError
from shardplan.levanter_config.schema import (
    BATCH_MESH_AXES,
    MeshSizeError,
    ParsedSchema,
    count_text,
    devices_text,
    divide_by_sizes,
    merge_entries,
    sharded_axes,
)
from shardplan.levanter_config.section import MappingEntry, SectionReader
from shardplan.plan.mapping import mesh_text
from shardplan.plan.mesh_axes import MESH_AXES

MESH_KEYS = ("axes", "batch_axis_name", "compute_mapping", "dcn_axes", "param_mapping", "shared_mapping")
"""Keys of the `mesh` section."""
DCN_AXIS = "replica_dcn"
"""Mesh axis of the `mesh` schema across slices; in a plan's mesh it is the major part of `replica`."""
DEFAULT_SHARED_AXES = ("mlp", "heads")
"""Logical axes that `shared_mapping` maps to model if the file omits them."""


def parse_mesh_schema(section: SectionReader, devices: int, slices: int) -> ParsedSchema:
    """Parse the `mesh` section of the trainer section, for `devices` devices in `slices` equal slices.

    Raises:
        MeshSizeError: sizes of mesh axes whose product is not the number of devices.
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    section.check_keys(MESH_KEYS, "unknown key")
    mesh = _mesh(section, devices, slices)
    names = (*MESH_AXES, DCN_AXIS)
    defaults = [MappingEntry(f"{section.name}.shared_mapping.{axis}", axis, ["model"]) for axis in DEFAULT_SHARED_AXES]
    shared = defaults + section.mapping_entries("shared_mapping", {}, names)
    own = section.mapping_entries("compute_mapping", {}, names)
    batch_axis = section.axis_name("batch_axis_name", "batch")
    batch = []
    if batch_axis is not None and batch_axis not in {entry.axis for entry in shared}:
        # a batch axis of another name gets the mesh axes of `batch`
        mesh_axes = merge_entries(own).get("batch", [DCN_AXIS, *BATCH_MESH_AXES])
        batch = [MappingEntry(f"{section.name}.batch_axis_name", batch_axis, mesh_axes)]
    params = section.mapping_entries("param_mapping", {"embed": ["data"]}, names)

    def merge_dcn(entries: list[MappingEntry]) -> list[MappingEntry]:
        return [replace(e, mesh_axes=_merge_dcn(e.axis, e.mesh_axes, mesh["replica"], slices)) for e in entries]

    compute, params = merge_dcn(shared + batch + own), merge_dcn(shared + params)
    mesh["replica"] *= slices
    batch_axis = batch_axis or "batch"
    batch_shards = math.prod(mesh[mesh_axis] for mesh_axis in sharded_axes(compute).get(batch_axis, []))
    return ParsedSchema(mesh, compute, params, batch_axis, batch_shards)


def _mesh(section: SectionReader, devices: int, slices: int) -> dict[str, int]:
    """Read the sizes of the mesh axes within one slice, and check those across slices."""
    dcn_axes = section.subsection("dcn_axes")
    dcn_axes.check_keys(
        [DCN_AXIS], "a plan's mesh is replica x data x model, its only axis across slices replica_dcn; not"
    )
    replica_dcn = dcn_axes.size(DCN_AXIS, -1, allow_minus_one=True)
    if replica_dcn not in (-1, slices):
        key = f"{dcn_axes.name}.{DCN_AXIS}"
        raise MeshSizeError(
            f"{key} is {replica_dcn}, but there {'is' if slices == 1 else 'are'} "
            f"{count_text(slices, 'slice')}; set it to {slices} or -1",
            key,
            slices,
        )
    return _sizes_within_slice(section.subsection("axes"), devices, slices)


def _sizes_within_slice(axes: SectionReader, devices: int, slices: int) -> dict[str, int]:
    """Read the sizes of the mesh axes within a slice.

    Levanter's order of the axes, data before replica, only decides which device has which mesh coordinates.
    """
    axes.check_keys(MESH_AXES, "a plan's mesh is replica x data x model; not")
    mesh = {axis: axes.size(axis, -1 if axis == "data" else 1, allow_minus_one=True) for axis in MESH_AXES}
    open_axes = [axis for axis, size in mesh.items() if size == -1]
    if len(open_axes) > 1 and "data" not in axes.values:
        open_axes.remove("data")
        mesh["data"] = 1
    if len(open_axes) > 1:
        raise ConfigError(f"{axes.name}: {' and '.join(open_axes)} are -1; only one can take the remaining devices")
    sizes = {f"{axes.name}.{axis}": mesh[axis] for axis in reversed(MESH_AXES) if axis not in open_axes}
    remaining = divide_by_sizes(devices_text(devices, slices), devices // slices, sizes)
    if open_axes:
        return mesh | {open_axes[0]: remaining}
    if remaining > 1:
        raise MeshSizeError(
            f"{axes.name}: {mesh_text(mesh)} is 1/{remaining} of {devices_text(devices, slices)}; "
            f"set data to {mesh['data'] * remaining} or -1",
            f"{axes.name}.data",
            mesh["data"] * remaining,
        )
    return mesh


def _merge_dcn(axis: str, mesh_axes: list[str], replica: int, slices: int) -> list[str]:
    """Translate `mesh_axes` to a mesh in which replica_dcn is part of replica; `replica` is its size within a slice."""
    if slices == 1:
        return [mesh_axis for mesh_axis in mesh_axes if mesh_axis != DCN_AXIS]
    if replica == 1:
        kept = [mesh_axis for mesh_axis in mesh_axes if mesh_axis != "replica"]
        return ["replica" if mesh_axis == DCN_AXIS else mesh_axis for mesh_axis in kept]
    after_dcn = [index + 1 for index, mesh_axis in enumerate(mesh_axes) if mesh_axis == DCN_AXIS]
    if after_dcn != [index for index, mesh_axis in enumerate(mesh_axes) if mesh_axis == "replica"]:
        raise ConfigError(
            f"trainer.mesh maps {axis!r} to [{', '.join(mesh_axes)}]; with {slices} slices and replica {replica} only "
            "replica_dcn and replica together, in this order, are part of a plan's mesh"
        )
    return [mesh_axis for mesh_axis in mesh_axes if mesh_axis != DCN_AXIS]
