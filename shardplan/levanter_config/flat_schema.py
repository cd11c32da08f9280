"""Parses the flat schema of Levanter's trainer section: `model_axis_size`, `axis_resources`, `fsdp_axis`, ...

This is the schema of levanter 1.2.dev1644.
"""

from shardplan.levanter_config.schema import (
    BATCH_MESH_AXES,
    ParsedSchema,
    count_text,
    devices_text,
    divide_by_sizes,
    merge_entries,
)
from shardplan.levanter_config.section import MappingEntry, SectionReader
from shardplan.plan.mesh_axes import MESH_AXES

FLAT_KEYS = (
    "axis_resources",
    "batch_axis",
    "fsdp_axis",
    "model_axis_size",
    "parameter_axis_resources",
    "replica_dcn_axis_size",
    "replica_ici_axis_size",
    "tensor_parallel_axes",
)
"""Keys of the trainer section that only the flat schema has."""
DEFAULT_FSDP_AXIS = "embed"
"""Value of `fsdp_axis` if the file omits it."""


def parse_flat_schema(trainer: SectionReader, devices: int, slices: int) -> ParsedSchema:
    """Parse the flat keys of the trainer section, for `devices` devices in `slices` equal slices.

    Raises:
        MeshSizeError: sizes of mesh axes that do not divide the devices.
        ConfigError: a value of the wrong type, or an unknown mesh axis.
    """
    model = trainer.size("model_axis_size", 1)
    replica = trainer.size("replica_ici_axis_size", 1)
    replica_dcn = trainer.size("replica_dcn_axis_size", 1, allow_minus_one=True)
    replica_dcn = slices if replica_dcn == -1 else replica_dcn
    data = divide_by_sizes(
        devices_text(devices, slices),
        devices // slices,
        {"trainer.model_axis_size": model, "trainer.replica_ici_axis_size": replica},
    )
    data_dcn = divide_by_sizes(
        f"the {count_text(slices, 'slice')}", slices, {"trainer.replica_dcn_axis_size": replica_dcn}
    )
    mesh = {"replica": replica_dcn * replica, "data": data_dcn * data, "model": model}

    compute = trainer.mapping_entries("axis_resources", {}, MESH_AXES)
    tensor_parallel = trainer.axis_names("tensor_parallel_axes", None, allow_text=False)
    compute += [MappingEntry("trainer.tensor_parallel_axes", axis, ["model"]) for axis in tensor_parallel]
    batch_axis = trainer.axis_name("batch_axis", "batch")
    if batch_axis is not None:
        compute.append(MappingEntry("trainer.batch_axis", batch_axis, BATCH_MESH_AXES))
    params = compute + trainer.mapping_entries("parameter_axis_resources", {}, MESH_AXES)
    # last, so that it wins over parameter_axis_resources: by default `embed` is stored sharded over `data`, whatever
    # they say
    fsdp = trainer.axis_names("fsdp_axis", DEFAULT_FSDP_AXIS)
    params += [MappingEntry("trainer.fsdp_axis", axis, ["data"]) for axis in fsdp]
    batch_axis = batch_axis or "batch"
    is_batch_mapped = bool(merge_entries(compute).get(batch_axis))
    return ParsedSchema(mesh, compute, params, batch_axis, is_batch_mapped, mesh["replica"] * mesh["data"])
