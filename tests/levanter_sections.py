"""Sections of Levanter configurations as tests write and parse them, and how Levanter itself reads them."""

import tempfile
from pathlib import Path

import draccus
import jax.numpy as jnp
import yaml

from shardplan.hardware import parse_slice
from shardplan.levanter_config.flat_schema import convert_sections, old_keys
from shardplan.levanter_config.levanter_file import read_levanter_file
from shardplan.levanter_config.trainer_section import parse_trainer_section

BATCH = ["replica", "data"]


def read_trainer(trainer, devices=8, slices=1):
    """Parse a trainer section, given as a dict or as YAML, from a file."""
    trainer = yaml.safe_load(trainer) if isinstance(trainer, str) else trainer
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.yaml"
        path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"type": "llama"}}))
        return parse_trainer_section(read_levanter_file(str(path)).sections["trainer"], devices, slices)


def convert(trainer, hardware="v5e-8"):
    """Convert a trainer section of levanter 1.2, given as a dict or as YAML."""
    trainer = yaml.safe_load(trainer) if isinstance(trainer, str) else trainer
    return convert_sections({"trainer": trainer}, parse_slice(hardware))["trainer"]


def read_old(trainer, hardware="v5e-8"):
    """Parse what a trainer section of levanter 1.2 is converted to."""
    converted, slice_ = convert(trainer, hardware), parse_slice(hardware)
    assert old_keys({"trainer": converted}) == []
    return parse_trainer_section(converted, slice_.devices, slice_.slices)


def mesh(replica, data, model):
    return {"replica": replica, "data": data, "model": model}


def as_lists(mapping):
    lists = {axis: [value] if isinstance(value, str) else list(value or []) for axis, value in mapping.items()}
    return {axis: mesh_axes for axis, mesh_axes in lists.items() if mesh_axes}


def assert_levanter_agrees(trainer, parsed):
    """Check that Levanter has the mesh, mappings, types and batch of the parsed section, on eight devices."""
    from levanter.trainer import TrainerConfig

    levanter = draccus.decode(TrainerConfig, trainer)
    levanter._validate_and_set_defaults()
    sizes = dict(levanter.device_mesh.shape)
    assert sizes.pop("replica_dcn") == 1 and sizes == parsed.mesh

    def on_the_plans_mesh(mapping):
        lists = as_lists(mapping)
        return as_lists({axis: [m for m in names if m != "replica_dcn"] for axis, names in lists.items()})

    assert on_the_plans_mesh(levanter.compute_axis_mapping) == parsed.compute_mapping
    assert on_the_plans_mesh(levanter.parameter_axis_mapping) == parsed.param_mapping
    assert levanter.mp.param_dtype == getattr(jnp, parsed.param_dtype)
    assert levanter.mp.compute_dtype == getattr(jnp, parsed.compute_dtype)
    if "train_batch_size" in trainer and "batch" in parsed.compute_mapping:
        assert levanter.train_batch_size == parsed.batch
        assert levanter.train_batch_size // levanter.microbatch_size == parsed.microbatches
