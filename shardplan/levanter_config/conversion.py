"""Converts the sections of a configuration from the schema of one version of Levanter to that of another.

Levanter 1.2 spells the mesh with flat keys, the number of positions as `seq_len`, the profiler with four keys, and a
data set with keys of the data section itself; marin-levanter has sections for all of these.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, assert_never

from shardplan.hardware import Slice
from shardplan.hardware.multislice import slices_by_axis
from shardplan.levanter_config.flat_schema import FLAT_KEYS
from shardplan.levanter_config.trainer_section import OWN_KEYS, TrainerSection, parse_trainer_section
from shardplan.levanter_config.writer import flat_keys, mesh_keys
from shardplan.model.levanter_compat import TrainerSchema
from shardplan.plan.workload import BATCH_AXIS

POSITION_KEYS = {TrainerSchema.FLAT: "seq_len", TrainerSchema.MESH: "max_seq_len"}
"""Key of the model section for the number of positions."""
PROFILER_KEYS = {
    "profiler_num_steps": "num_steps", "profiler_perfetto_link": "perfetto_link", "profiler_start_step": "start_step",
}  # fmt: skip
"""Flat key of the trainer section -> key of the section `profiler`."""
SOURCE_KEYS = ("id", "name", "stream", "splits", "train_urls", "validation_urls")
"""Keys of levanter 1.2 that say where the texts of a data set are; in marin-levanter those of its `source`."""
DATA_KEYS = (*SOURCE_KEYS, "configs", "format", "tags")
"""Keys of the data section that levanter 1.2 alone has."""
NAME_OF_VERSION = {TrainerSchema.FLAT: "levanter 1.2", TrainerSchema.MESH: "marin-levanter"}
"""Schema -> the package that has it."""


def foreign_keys(sections: Mapping[str, Any], schema: TrainerSchema) -> list[str]:
    """List the dotted keys that the Levanter with `schema` does not have, and the other one has.

    >>> foreign_keys({"trainer": {"model_axis_size": 2}, "model": {"seq_len": 4096}}, TrainerSchema.MESH)
    ['trainer.model_axis_size', 'model.seq_len']
    """
    return [".".join(path) for path in _foreign_paths(sections, schema)]


def _foreign_paths(sections: Mapping[str, Any], schema: TrainerSchema) -> Iterator[tuple[str, ...]]:
    (other,) = (each for each in TrainerSchema if each != schema)
    trainer, model, data = (_section(sections, name) for name in ("trainer", "model", "data"))
    yield from (("trainer", key) for key in trainer if key in OWN_KEYS[other])
    if schema == TrainerSchema.MESH and isinstance(trainer.get("profiler"), bool):
        yield "trainer", "profiler"
    if schema == TrainerSchema.FLAT and isinstance(trainer.get("profiler"), Mapping):
        yield "trainer", "profiler"
    if POSITION_KEYS[other] in model:
        yield "model", POSITION_KEYS[other]
    if schema == TrainerSchema.MESH:
        yield from (("data", key) for key in data if key in DATA_KEYS)


def _section(sections: Mapping[str, Any], name: str) -> Mapping[Any, Any]:
    section = sections.get(name)
    return section if isinstance(section, Mapping) else {}


def convert_sections(sections: Mapping[str, Any], schema: TrainerSchema, hardware: Slice) -> dict[str, Any]:
    """Return the sections as the Levanter with `schema` reads them, with the same mesh and mappings on `hardware`.

    Keys that have no counterpart are left out, and keys that neither version has are kept.

    Raises:
        CorrectableError: a mesh or mapping that cannot be read.
        ConfigError: a value of the wrong type.
    """
    converted = copy.deepcopy(dict(sections))
    (other,) = (each for each in TrainerSchema if each != schema)
    if any(path[0] == "trainer" for path in _foreign_paths(sections, schema)):
        converted["trainer"] = _convert_trainer(_section(sections, "trainer"), schema, hardware)
    model = converted.get("model")
    if isinstance(model, dict) and POSITION_KEYS[other] in model:
        renamed = {POSITION_KEYS[schema] if key == POSITION_KEYS[other] else key: model[key] for key in model}
        converted["model"] = renamed
    data = converted.get("data")
    if schema == TrainerSchema.MESH and isinstance(data, dict) and any(key in DATA_KEYS for key in data):
        converted["data"] = _convert_data(data)
    return converted


def _convert_trainer(trainer: Mapping[Any, Any], schema: TrainerSchema, hardware: Slice) -> dict[str, Any]:
    is_mesh_foreign = any(key in trainer for key in (("mesh",) if schema == TrainerSchema.FLAT else FLAT_KEYS))
    own = {key for each in TrainerSchema if each != schema for key in OWN_KEYS[each]}
    kept = {key: copy.deepcopy(value) for key, value in trainer.items() if key not in own}
    profiler = _convert_profiler(trainer, schema)
    if profiler:
        kept.pop("profiler", None)
    mesh: dict[str, Any] = {}
    if is_mesh_foreign and "mesh" not in kept:
        mesh = _convert_mesh(parse_trainer_section(trainer, hardware.devices, hardware.slices), schema, hardware)
    return {**kept, **profiler, **mesh}


def _convert_mesh(section: TrainerSection, schema: TrainerSchema, hardware: Slice) -> dict[str, Any]:
    compute, params = section.compute_mapping, section.param_mapping
    match schema:
        case TrainerSchema.MESH:
            stored = {axis: mesh_axes for axis, mesh_axes in params.items() if axis != section.batch_axis}
            return {"mesh": mesh_keys(hardware.slices, section.mesh, compute, stored, section.batch_axis)}
        case TrainerSchema.FLAT:
            along = dict(zip(section.mesh, slices_by_axis(hardware.slices, section.mesh), strict=True))["replica"]
            sizes, mappings = flat_keys(along, section.mesh["replica"] // along, section.mesh["model"], compute, params)
            batch = {} if section.batch_axis == BATCH_AXIS else {"batch_axis": section.batch_axis}
            return {**sizes, **batch, **mappings}
        case _:
            assert_never(schema)


def _convert_profiler(trainer: Mapping[Any, Any], schema: TrainerSchema) -> dict[str, Any]:
    """Return the profiler's keys in `schema`; none if the file has none of the other one."""
    profiler = trainer.get("profiler")
    if schema == TrainerSchema.MESH:
        section = {} if not isinstance(profiler, bool) else {"enabled": profiler}
        section |= {name: trainer[key] for key, name in PROFILER_KEYS.items() if key in trainer}
        return {"profiler": section} if section else {}
    if not isinstance(profiler, Mapping):
        return {}
    flat = {"profiler": bool(profiler.get("enabled", False))}
    return flat | {key: profiler[name] for key, name in PROFILER_KEYS.items() if name in profiler}


def _convert_data(data: Mapping[str, Any]) -> dict[str, Any]:
    """Return the data section of marin-levanter for one of levanter 1.2: every data set becomes a component."""
    kept = {key: value for key, value in data.items() if key not in DATA_KEYS}
    if isinstance(data.get("configs"), Mapping):
        components = {name: _component(each) for name, each in data["configs"].items() if isinstance(each, Mapping)}
    else:
        components = {str(data.get("id", "main")): _component(data, is_inner=False)}
    return {**kept, "components": components}


def _component(dataset: Mapping[str, Any], is_inner: bool = True) -> dict[str, Any]:
    """Return a component for one data set; the cache of the only one is that of the data section."""
    source = {key: value for key, value in dataset.items() if key in SOURCE_KEYS and value is not None}
    kept = ("format", "tags", *(("cache_dir",) if is_inner else ()))
    rest = {key: dataset[key] for key in kept if dataset.get(key) is not None}
    return {"source": {"type": "hf" if "id" in source else "url", **source}, **rest}
