"""Parses the section `mesh` of Levanter's trainer section: `mesh.axes`, `mesh.shared_mapping`, ...

A logical axis is mapped to a mesh axis, to a list of mesh axes, or to null, which replicates it. Mesh axes other than
those of a plan are accepted if they have one device.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from shardplan.errors import ConfigError
from shardplan.hardware import divisors
from shardplan.hardware.mesh_axes import DCN_AXES, MESH_AXES, TOKEN_AXES
from shardplan.levanter_config.section import AxisLists, CorrectableError, MappingEntry, SectionReader
from shardplan.plan.mapping import mesh_text

MESH_KEYS = ("axes", "batch_axis_name", "compute_mapping", "dcn_axes", "param_mapping", "shared_mapping")
"""Keys of the `mesh` section."""
DEFAULT_SHARED_AXES = ("mlp", "heads")
"""Logical axes that `shared_mapping` maps to model if the file omits them."""
BATCH_MESH_AXES = list(TOKEN_AXES)
"""Mesh axes that Levanter shards the batch over."""


@dataclass(frozen=True)
class ParsedMesh:
    """The content of the section `mesh`; see `TrainerSection` for the fields."""

    mesh: dict[str, int]
    compute: list[MappingEntry]
    params: list[MappingEntry]
    batch_axis: str
    is_batch_mapped: bool
    batch_shards: int


class MeshSizeError(CorrectableError):
    """The product of the mesh axes is not the number of devices; with `nearest` as the value of `key`, it would be."""


def parse_mesh_section(section: SectionReader, devices: int, slices: int) -> ParsedMesh:
    """Parse the `mesh` section of the trainer section, for `devices` devices in `slices` equal slices.

    Raises:
        MeshSizeError: sizes of mesh axes whose product is not the number of devices.
        ConfigError: a value of the wrong type, or a mesh that is not replica x data x model.
    """
    section.check_keys(MESH_KEYS, "unknown key")
    axes, single_axes = _without_single_axes(section.subsection("axes"), MESH_AXES)
    dcn_axes, single_dcn_axes = _without_single_axes(section.subsection("dcn_axes"), tuple(DCN_AXES.values()))
    within = _sizes_within_slice(axes, devices, slices)
    across = _sizes_across_slices(dcn_axes, slices)
    single = (*single_axes, *single_dcn_axes)
    names = (*MESH_AXES, *dict.fromkeys((DCN_AXES["replica"], *dcn_axes.values)), *single)
    defaults = [MappingEntry(f"{section.name}.shared_mapping.{axis}", axis, ["model"]) for axis in DEFAULT_SHARED_AXES]
    shared = defaults + section.mapping_entries("shared_mapping", {}, names)
    own = section.mapping_entries("compute_mapping", {}, names)
    batch_axis = section.axis_name("batch_axis_name", "batch")
    batch = []
    if batch_axis is not None and batch_axis not in {entry.axis for entry in shared}:
        # a batch axis of another name gets the mesh axes of `batch`
        mesh_axes = merge_entries(own).get("batch", [DCN_AXES["replica"], *BATCH_MESH_AXES])
        batch = [MappingEntry(f"{section.name}.batch_axis_name", batch_axis, mesh_axes)]
    params = section.mapping_entries("param_mapping", {"embed": ["data"]}, names)

    def merge(entries: list[MappingEntry]) -> list[MappingEntry]:
        merged = []
        for entry in entries:
            mesh_axes = [mesh_axis for mesh_axis in entry.mesh_axes if mesh_axis not in single]
            merged.append(replace(entry, mesh_axes=_merge_dcn(entry.axis, mesh_axes, within, across)))
        return merged

    batch_axis = batch_axis or "batch"
    is_batch_mapped = bool(merge_entries(shared + batch + own).get(batch_axis))
    compute, params = merge(shared + batch + own), merge(shared + params)
    mesh = {axis: size * across.get(axis, 1) for axis, size in within.items()}
    batch_shards = math.prod(mesh[mesh_axis] for mesh_axis in sharded_axes(compute).get(batch_axis, []))
    return ParsedMesh(mesh, compute, params, batch_axis, is_batch_mapped, batch_shards)


def _without_single_axes(axes: SectionReader, known: tuple[str, ...]) -> tuple[SectionReader, tuple[str, ...]]:
    """Remove additional mesh axes of size 1, which shard nothing; also return their names."""
    single = tuple(str(name) for name, size in axes.values.items() if name not in known and size == 1)
    kept = {name: size for name, size in axes.values.items() if str(name) not in single}
    return SectionReader(axes.name, kept), single


def _sizes_across_slices(dcn_axes: SectionReader, slices: int) -> dict[str, int]:
    """Read the number of slices along each mesh axis of a plan."""
    dcn_axes.check_keys(DCN_AXES.values(), "across slices, a plan's mesh has no axis")
    data = dcn_axes.size(DCN_AXES["data"], 1, allow_minus_one=True)
    replica = dcn_axes.size(DCN_AXES["replica"], 1 if data == -1 else -1, allow_minus_one=True)
    keys = {axis: f"{dcn_axes.name}.{dcn}" for axis, dcn in DCN_AXES.items()}
    if replica == data == -1:
        raise ConfigError(
            f"{dcn_axes.name}: {' and '.join(DCN_AXES.values())} are -1; only one can take the remaining slices"
        )
    total = f"the {count_text(slices, 'slice')}"
    if data == -1:
        return {"replica": replica, "data": divide_by_sizes(total, slices, {keys["replica"]: replica})}
    key, remaining = keys["replica"], divide_by_sizes(total, slices, {keys["data"]: data})
    if replica not in (-1, remaining):
        raise MeshSizeError(
            f"{key} is {replica}, but there {'is' if slices == 1 else 'are'} {count_text(slices, 'slice')}; set it to "
            f"{remaining} or -1",
            key,
            remaining,
        )
    return {"replica": remaining, "data": data}


def _sizes_within_slice(axes: SectionReader, devices: int, slices: int) -> dict[str, int]:
    """Read the sizes of the mesh axes within a slice.

    Levanter's order of the axes, data before replica, only decides which device has which mesh coordinates.
    """
    axes.check_keys(MESH_AXES, "a plan's mesh has no axis")
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


def _merge_dcn(axis: str, mesh_axes: list[str], within: Mapping[str, int], across: Mapping[str, int]) -> list[str]:
    """Translate `mesh_axes` to a plan's mesh, in which every axis across slices is part of the axis within a slice.

    Args:
        within: mesh axis of a plan -> its size within a slice.
        across: mesh axis of a plan -> number of slices along it.
    """
    merged = mesh_axes
    for name, dcn in DCN_AXES.items():
        if across[name] == 1:
            merged = [mesh_axis for mesh_axis in merged if mesh_axis != dcn]
        elif within[name] == 1:
            kept = [mesh_axis for mesh_axis in merged if mesh_axis != name]
            merged = [name if mesh_axis == dcn else mesh_axis for mesh_axis in kept]
        else:
            after_dcn = [index + 1 for index, mesh_axis in enumerate(merged) if mesh_axis == dcn]
            if after_dcn != [index for index, mesh_axis in enumerate(merged) if mesh_axis == name]:
                raise ConfigError(
                    f"trainer.mesh maps {axis!r} to [{', '.join(mesh_axes)}]; with {across[name]} slices and {name} "
                    f"{within[name]} a plan shards over {dcn} and {name} together; name both, in this order, or neither"
                )
            merged = [mesh_axis for mesh_axis in merged if mesh_axis != dcn]
    return merged


def merge_entries(entries: Iterable[MappingEntry]) -> AxisLists:
    """Merge entries into one mapping, in which the last entry of a logical axis wins."""
    return {entry.axis: list(entry.mesh_axes) for entry in entries}


def sharded_axes(entries: Iterable[MappingEntry]) -> AxisLists:
    """Merge entries into one mapping without the logical axes that are replicated."""
    return {axis: mesh_axes for axis, mesh_axes in merge_entries(entries).items() if mesh_axes}


def divide_by_sizes(total: str, count: int, sizes: dict[str, int]) -> int:
    """Divide `count` by each of `sizes` in turn.

    Args:
        total: describes `count` in the error message, as in `the 32 devices`.
        sizes: dotted key -> size.

    Raises:
        MeshSizeError: a size does not divide what the sizes before it leave.
    """
    for name, size in sizes.items():
        if count % size:
            valid = [max(d for d in divisors(count) if d < size), *[d for d in divisors(count) if d > size][:1]]
            raise MeshSizeError(
                f"{name} {size} does not divide {total}; did you mean {' or '.join(map(str, valid))}?",
                name,
                min(valid, key=lambda divisor: abs(divisor - size)),
            )
        count //= size
        if size > 1:
            total = f"the {count_text(count, 'device')} that {name} {size} leaves"
    return count


def devices_text(devices: int, slices: int) -> str:
    """Describe the devices of one slice for a message: `the 16 devices of a slice`."""
    return f"the {count_text(devices // slices, 'device')}{' of a slice' if slices > 1 else ''}"


def count_text(number: int, noun: str) -> str:
    """Format `1 slice` or `2 slices`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
