"""Converts files of levanter 1.2, which had flat keys for the mesh, to the sections that Levanter has today.

Levanter 1.2 had `model_axis_size`, `axis_resources`, `fsdp_axis` and their like in the trainer section, the number of
positions as `seq_len`, the profiler as four keys, and a data set as keys of the data section itself. Today there are
sections for all of these. The old mesh and mappings are read here, and written by `writer.mesh_keys`.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from shardplan.errors import ConfigError
from shardplan.hardware import Slice
from shardplan.hardware.mesh_axes import MESH_AXES, TOKEN_AXES
from shardplan.levanter_config.mesh_section import (
    BATCH_MESH_AXES,
    count_text,
    devices_text,
    divide_by_sizes,
    parse_mesh_section,
    sharded_axes,
)
from shardplan.levanter_config.section import MappingEntry, SectionReader
from shardplan.levanter_config.writer import mesh_keys
from shardplan.plan.mapping import mesh_size

FLAT_MESH_KEYS = (
    "axis_resources",
    "batch_axis",
    "fsdp_axis",
    "model_axis_size",
    "parameter_axis_resources",
    "replica_dcn_axis_size",
    "replica_ici_axis_size",
    "tensor_parallel_axes",
)
"""Keys of the old trainer section for the mesh and the mappings."""
PROFILER_KEYS = {
    "profiler_num_steps": "num_steps", "profiler_perfetto_link": "perfetto_link", "profiler_start_step": "start_step",
}  # fmt: skip
"""Key of the old trainer section -> key of the section `profiler`."""
PER_DEVICE_KEYS = ("per_device_eval_parallelism", "per_device_parallelism")
"""Keys of the trainer section for sequences per device, in levanter 1.2 and today."""
FLAT_KEYS = (*FLAT_MESH_KEYS, *PROFILER_KEYS, "ray")
"""Keys that only the old trainer section has."""
OLD_POSITION_KEY, POSITION_KEY = "seq_len", "max_seq_len"
"""Key of the model section for the number of positions, in levanter 1.2 and today."""
SOURCE_KEYS = ("id", "name", "stream", "splits", "train_urls", "validation_urls")
"""Keys of the old data section that locate the texts of a data set; they are keys of a `source` now."""
DATA_KEYS = (*SOURCE_KEYS, "configs", "format", "tags")
"""Keys that only the old data section has."""
DEFAULT_FSDP_AXIS = "embed"
"""Value of `fsdp_axis` if the file omits it."""


def old_keys(sections: Mapping[str, Any]) -> list[str]:
    """List the dotted keys that levanter 1.2 has and today's Levanter does not.

    >>> old_keys({"trainer": {"model_axis_size": 2}, "model": {"seq_len": 4096}})
    ['trainer.model_axis_size', 'model.seq_len']
    """
    return list(_old_keys(sections))


def _old_keys(sections: Mapping[str, Any]) -> Iterator[str]:
    trainer, model, data = (_section(sections, name) for name in ("trainer", "model", "data"))
    for key in trainer:
        if key in FLAT_KEYS:
            yield f"trainer.{key}"
    if isinstance(trainer.get("profiler"), bool):
        yield "trainer.profiler"
    if OLD_POSITION_KEY in model:
        yield f"model.{OLD_POSITION_KEY}"
    for key in data:
        if key in DATA_KEYS:
            yield f"data.{key}"


def convert_sections(sections: Mapping[str, Any], hardware: Slice) -> dict[str, Any]:
    """Convert sections of levanter 1.2 to today's sections, with the same mesh and mappings on `hardware`.

    Keys that have no counterpart are left out, and keys that neither version has are kept.

    Raises:
        CorrectableError: a mesh or mapping cannot be read.
        ConfigError: a value has the wrong type, or the trainer section has a mesh in both forms.
    """
    converted = copy.deepcopy(dict(sections))
    if any(key.startswith("trainer.") for key in old_keys(sections)):
        converted["trainer"] = _convert_trainer(_section(sections, "trainer"), hardware)
    model = converted.get("model")
    if isinstance(model, dict) and OLD_POSITION_KEY in model:
        renamed = {}
        for key, value in model.items():
            renamed[POSITION_KEY if key == OLD_POSITION_KEY else key] = value
        converted["model"] = renamed
    data = converted.get("data")
    if isinstance(data, dict) and any(key in DATA_KEYS for key in data):
        converted["data"] = _convert_data(data)
    return converted


def _section(sections: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    section = sections.get(name)
    return section if isinstance(section, Mapping) else {}


def _convert_trainer(trainer: Mapping[Any, Any], hardware: Slice) -> dict[str, Any]:
    kept = {key: copy.deepcopy(value) for key, value in trainer.items() if key not in FLAT_KEYS}
    given = kept.get("profiler")
    profiler = {"enabled": given} if isinstance(given, bool) else dict(given) if isinstance(given, Mapping) else {}
    profiler |= {name: trainer[key] for key, name in PROFILER_KEYS.items() if key in trainer}
    if profiler:
        kept["profiler"] = profiler
    flat = [key for key in FLAT_MESH_KEYS if key in trainer]
    if flat and "mesh" in trainer:
        raise ConfigError(
            f"trainer.mesh and trainer.{flat[0]} belong to different versions of Levanter; keep one of them"
        )
    if not flat:
        return kept
    mesh = _convert_mesh(trainer, hardware)
    return {**kept, **_convert_per_device(kept, mesh, hardware), "mesh": mesh}


def _convert_per_device(trainer: Mapping[Any, Any], mesh: dict[str, Any], hardware: Slice) -> dict[str, int]:
    """Convert the numbers of sequences per device, because levanter 1.2 divides by all devices of replica and data."""
    parsed = parse_mesh_section(SectionReader("trainer.mesh", mesh), hardware.devices, hardware.slices)
    counted, shards = mesh_size(parsed.mesh, TOKEN_AXES), parsed.batch_shards
    changed = {}
    for key in PER_DEVICE_KEYS:
        number = trainer.get(key)
        if counted != shards and type(number) is int and number > 0 and number * counted % shards == 0:
            changed[key] = number * counted // shards
    return changed


def _convert_mesh(values: Mapping[Any, Any], hardware: Slice) -> dict[str, Any]:
    """Return the section `mesh` with the mesh and mappings of an old trainer section."""
    trainer = SectionReader("trainer", values)
    batch_axis = trainer.axis_name("batch_axis", "batch")
    compute = trainer.mapping_entries("axis_resources", {}, MESH_AXES)
    tensor_parallel = trainer.axis_names("tensor_parallel_axes", None, allow_text=False)
    compute += [MappingEntry("trainer.tensor_parallel_axes", axis, ["model"]) for axis in tensor_parallel]
    if batch_axis is not None:
        compute.append(MappingEntry("trainer.batch_axis", batch_axis, BATCH_MESH_AXES))
    params = compute + trainer.mapping_entries("parameter_axis_resources", {}, MESH_AXES)
    # last, so that it wins over parameter_axis_resources: by default `embed` is stored sharded over `data`, whatever
    # they say
    fsdp = trainer.axis_names("fsdp_axis", DEFAULT_FSDP_AXIS)
    params += [MappingEntry("trainer.fsdp_axis", axis, ["data"]) for axis in fsdp]
    stored = sharded_axes(params)
    stored.pop(batch_axis or "batch", None)
    mesh = _mesh_sizes(trainer, hardware.devices, hardware.slices)
    return mesh_keys(hardware.slices, mesh, sharded_axes(compute), stored, batch_axis or "batch")


def _mesh_sizes(trainer: SectionReader, devices: int, slices: int) -> dict[str, int]:
    """Read the sizes of the mesh axes; `data` gets all devices that are left.

    Raises:
        MeshSizeError: sizes of mesh axes that do not divide the devices.
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
    return {"replica": replica_dcn * replica, "data": data_dcn * data, "model": model}


def _convert_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the data section of levanter 1.2: every data set becomes a component."""
    kept = {key: value for key, value in data.items() if key not in DATA_KEYS}
    if isinstance(data.get("configs"), Mapping):
        components = {name: _component(each) for name, each in data["configs"].items() if isinstance(each, Mapping)}
    else:
        components = {str(data.get("id", "main")): _component(data, is_inner=False)}
    return {**kept, "components": components}


def _component(dataset: Mapping[str, Any], is_inner: bool = True) -> dict[str, Any]:
    """Return the component of one data set; if there is only one data set, it keeps the cache of the data section."""
    source = {key: dataset[key] for key in SOURCE_KEYS if dataset.get(key) is not None}
    kept = ("format", "tags", *(("cache_dir",) if is_inner else ()))
    rest = {key: dataset[key] for key in kept if dataset.get(key) is not None}
    return {"source": {"type": "hf" if "id" in source else "url", **source}, **rest}
