"""Levanter configurations are parsed as Levanter parses them, and errors in them are reported on one line.

Those of levanter 1.2 are converted to the same mesh, mappings and batch. It is not installed here, so that its values
are written by hand.
"""

import copy
import subprocess
import sys
from pathlib import Path

import draccus
import jax.numpy as jnp
import pytest
import yaml

from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.levanter_config.flat_schema import convert_sections, old_keys
from shardplan.levanter_config.levanter_file import is_levanter_config, read_levanter_file
from shardplan.levanter_config.model_section import ModelSection, parse_model_section
from shardplan.levanter_config.trainer_section import DEFAULT_TRAIN_BATCH_SIZE, parse_trainer_section
from shardplan.lint.corrections import convert_nearest

BATCH = ["replica", "data"]


@pytest.fixture
def read(tmp_path):
    """Parse a trainer section, given as a dict or as YAML, for 8 devices by default."""

    def read_trainer(trainer, devices=8, slices=1):
        path = tmp_path / "config.yaml"
        trainer = yaml.safe_load(trainer) if isinstance(trainer, str) else trainer
        path.write_text(yaml.safe_dump({"trainer": trainer, "model": {"type": "llama"}}))
        return parse_trainer_section(read_levanter_file(str(path)).sections["trainer"], devices, slices)

    return read_trainer


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


def test_a_section_of_levanter_12():
    trainer = """
        mp: p=f32,c=bf16
        seed: 3
        tracker: {type: wandb}
        train_batch_size: 64
        model_axis_size: 8
        replica_ici_axis_size: 4
        tensor_parallel_axes: [mlp, heads]
        fsdp_axis: [embed, vocab]
        axis_resources: {mlp: data, kv_head: [data, model], layers: null}
        parameter_axis_resources: {head_size: [replica], embed: model, kv_head: null}
        """
    section = read_old(trainer, "v5e-128")
    assert section.mesh == mesh(4, 4, 8)
    assert list(section.mesh) == ["replica", "data", "model"]
    assert section.compute_mapping == {
        "mlp": ["model"],
        "heads": ["model"],
        "kv_head": ["data", "model"],
        "batch": BATCH,
    }
    assert section.param_mapping == {
        "mlp": ["model"],
        "heads": ["model"],
        "head_size": ["replica"],
        "embed": ["data"],  # fsdp_axis wins over parameter_axis_resources
        "vocab": ["data"],
    }
    assert (section.batch, section.param_dtype, section.compute_dtype) == (64, "float32", "bfloat16")
    converted = convert(trainer, "v5e-128")
    others = {name: value for name, value in converted.items() if name != "mesh"}
    assert others == {"mp": "p=f32,c=bf16", "seed": 3, "tracker": {"type": "wandb"}, "train_batch_size": 64}


def test_an_empty_trainer_has_the_defaults(read):
    assert read({}) == read({"mesh": {}})
    assert (read({}).batch, read({}).param_dtype, read({}).compute_dtype) == (None, "float32", "float32")


def test_defaults_of_levanter_12():
    section = read_old({"model_axis_size": 1})
    assert section.mesh == mesh(1, 8, 1)
    assert section.compute_mapping == {"batch": BATCH}
    assert section.param_mapping == {"embed": ["data"]}
    assert (section.batch, section.param_dtype, section.compute_dtype) == (None, "float32", "float32")


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"trainer": {"seed": 1, "ray": {}}}, ["trainer.ray"]),
        ({"trainer": {"seed": 1, "progress_watchdog": {}}}, []),
        ({"trainer": {"seed": 1, "mesh": {}, "profiler": {"enabled": True}}, "model": {"max_seq_len": 8}}, []),
        ({"trainer": {"fsdp_axis": None, "profiler": False}}, ["trainer.fsdp_axis", "trainer.profiler"]),
        (
            {"trainer": {"profiler_num_steps": 2}, "model": {"seq_len": 8}},
            ["trainer.profiler_num_steps", "model.seq_len"],
        ),
        ({"trainer": {}, "data": {"id": "org/text", "tokenizer": "gpt2", "tags": []}}, ["data.id", "data.tags"]),
        ({"trainer": None, "model": "llama", "data": {"components": {}, "tokenizer": "gpt2"}}, []),
    ],
    ids=str,
)
def test_keys_that_only_levanter_12_has(sections, expected):
    assert old_keys(sections) == expected


def test_the_mesh_in_both_forms_is_an_error():
    with pytest.raises(ConfigError) as raised:
        convert({"mesh": {}, "fsdp_axis": "embed"})
    assert str(raised.value) == (
        "trainer.mesh and trainer.fsdp_axis belong to different versions of Levanter; keep one of them"
    )
    # other keys of levanter 1.2 beside a mesh leave it as it is
    assert convert({"mesh": {"axes": {"model": 2}}, "ray": {}}) == {"mesh": {"axes": {"model": 2}}}


def test_conversion_does_not_change_its_input():
    sections = {"trainer": {"axis_resources": {"mlp": "model"}, "profiler": True}, "model": {"seq_len": 8}, "id": 3}
    kept = copy.deepcopy(sections)
    converted = convert_sections(sections, parse_slice("v5e-8"))
    assert sections == kept and converted["id"] == 3
    today = {"trainer": {"mesh": {}}, "model": {"max_seq_len": 8}, "data": {"components": {}}}
    assert convert_sections(today, parse_slice("v5e-8")) == today


@pytest.mark.parametrize(
    ("model", "replica_ici", "replica_dcn", "devices", "expected"),
    [
        (2, 2, 1, 64, mesh(2, 16, 2)),
        (2, 2, 2, 64, mesh(4, 8, 2)),
        (2, 2, 4, 64, mesh(8, 4, 2)),
        (2, 2, -1, 64, mesh(8, 4, 2)),
        (1, 1, 1, 128, mesh(1, 128, 1)),
        (2, 2, 2, 128, mesh(4, 16, 2)),
        (4, 2, -1, 128, mesh(8, 4, 4)),
        (1, 4, 4, 128, mesh(16, 8, 1)),
    ],
)
def test_a_section_of_levanter_12_over_slices(model, replica_ici, replica_dcn, devices, expected):
    """Levanter has the same mesh with what the section is converted to."""
    from levanter.utils.mesh import MeshConfig

    sizes = {
        "model_axis_size": model,
        "replica_ici_axis_size": replica_ici,
        "replica_dcn_axis_size": replica_dcn,
        "axis_resources": {"mlp": "model"},
    }
    hardware = f"4xv5e-{devices // 4}"
    section = read_old(sizes, hardware)
    assert section.mesh == expected
    assert section.compute_mapping == {"mlp": ["model"], "batch": BATCH}
    assert section.param_mapping == {"mlp": ["model"], "embed": ["data"]}
    within, across = draccus.decode(MeshConfig, convert(sizes, hardware)["mesh"]).axis_shapes(devices, 4)
    assert expected == mesh(
        within["replica"] * across["replica_dcn"], within["data"] * across.get("data_dcn", 1), within["model"]
    )


def test_mesh(read):
    section = read(
        """
        mp: params=float16
        train_batch_size: 32
        mesh:
          axes: {model: 4, replica: 2}
          shared_mapping: {heads: null, vocab: model}
          compute_mapping: {token: [replica_dcn, replica, data], kv_head: model}
          param_mapping: {embed: [data, model], mlp: [replica_dcn, data]}
        """,
        devices=64,
    )
    assert section.mesh == mesh(2, 8, 4)
    assert list(section.mesh) == ["replica", "data", "model"]
    assert section.compute_mapping == {
        "mlp": ["model"],
        "vocab": ["model"],
        "kv_head": ["model"],
        "token": BATCH,
        "batch": BATCH,
    }
    assert section.param_mapping == {"mlp": ["data"], "vocab": ["model"], "embed": ["data", "model"]}
    assert (section.batch, section.param_dtype, section.compute_dtype) == (32, "float16", "float16")


def test_mesh_defaults(read):
    section = read({"mesh": {}})
    assert section.mesh == mesh(1, 8, 1)
    assert section.compute_mapping == {"mlp": ["model"], "heads": ["model"], "batch": BATCH}
    assert section.param_mapping == {"mlp": ["model"], "heads": ["model"], "embed": ["data"]}
    assert read({"mesh": {"param_mapping": {}}}).param_mapping == {"mlp": ["model"], "heads": ["model"]}


@pytest.mark.parametrize(
    ("axes", "expected"),
    [
        ({"model": -1}, mesh(1, 1, 8)),  # data gives way where it was not given
        ({"model": -1, "replica": 2}, mesh(2, 1, 4)),
        ({"model": -1, "data": 2}, mesh(1, 2, 4)),
        ({"model": 2, "data": 4}, mesh(1, 4, 2)),
        ({"replica": -1, "data": 1}, mesh(8, 1, 1)),
        ({"data": -1, "replica": 1, "model": 8}, mesh(1, 1, 8)),
    ],
)
def test_an_axis_of_size_minus_one_takes_the_remaining_devices(read, axes, expected):
    assert read({"mesh": {"axes": axes}}).mesh == expected


@pytest.mark.parametrize(
    ("section", "batch"),
    [
        ({}, {"batch": BATCH}),
        ({"batch_axis_name": "row"}, {"row": BATCH}),
        ({"batch_axis_name": None}, {}),
        ({"batch_axis_name": "row", "compute_mapping": {"batch": "data"}}, {"row": ["data"], "batch": ["data"]}),
        ({"batch_axis_name": "row", "compute_mapping": {"row": "replica"}}, {"row": ["replica"]}),
        ({"shared_mapping": {"batch": "data"}}, {"batch": ["data"]}),
        ({"compute_mapping": {"batch": None}}, {}),
    ],
)
def test_batch_axis_of_the_mesh_schema(read, section, batch):
    assert read({"mesh": section}).compute_mapping == {"mlp": ["model"], "heads": ["model"], **batch}


def test_mesh_over_slices(read):
    mappings = {"param_mapping": {"a": "replica", "b": "replica_dcn", "c": ["data", "replica_dcn"]}}
    section = read({"mesh": mappings}, devices=64, slices=4)
    assert section.mesh == mesh(4, 16, 1)
    assert section.compute_mapping["batch"] == BATCH
    # within a slice replica is of size 1
    assert section.param_mapping == {"mlp": ["model"], "heads": ["model"], "b": ["replica"], "c": ["data", "replica"]}

    both = {"axes": {"replica": 2}, "dcn_axes": {"replica_dcn": 4}}
    section = read({"mesh": both}, devices=64, slices=4)
    assert section.mesh == mesh(8, 8, 1)
    assert section.compute_mapping["batch"] == BATCH
    with pytest.raises(ConfigError, match=r"maps 'a' to \[replica\]; with 4 slices and replica 2 only replica_dcn and"):
        read({"mesh": both | {"param_mapping": {"a": "replica"}}}, devices=64, slices=4)
    with pytest.raises(ConfigError, match=r"maps 'b' to \[replica, replica_dcn\]"):
        read({"mesh": both | {"shared_mapping": {"b": ["replica", "replica_dcn"]}}}, devices=64, slices=4)


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


OLD_SECTIONS = [
    ({"model_axis_size": 1}, mesh(1, 8, 1), {"batch": BATCH}, {"embed": ["data"]}),
    (
        {"model_axis_size": 2, "tensor_parallel_axes": ["mlp", "heads"]},
        mesh(1, 4, 2),
        {"mlp": ["model"], "heads": ["model"], "batch": BATCH},
        {"mlp": ["model"], "heads": ["model"], "embed": ["data"]},
    ),
    (
        {"model_axis_size": 8, "tensor_parallel_axes": None, "axis_resources": {"mlp": "model", "heads": ["model"]}},
        mesh(1, 1, 8),
        {"mlp": ["model"], "heads": ["model"], "batch": BATCH},
        {"mlp": ["model"], "heads": ["model"], "embed": ["data"]},
    ),
    # the batch axis wins over axis_resources, and fsdp_axis over what the parameters have of it
    (
        {"replica_ici_axis_size": 2, "model_axis_size": 2, "axis_resources": {"batch": "data", "embed": "model"}},
        mesh(2, 2, 2),
        {"embed": ["model"], "batch": BATCH},
        {"embed": ["data"]},
    ),
    (
        {"replica_ici_axis_size": 8, "replica_dcn_axis_size": -1, "tensor_parallel_axes": ["batch"]},
        mesh(8, 1, 1),
        {"batch": BATCH},
        {"embed": ["data"]},
    ),
    # tensor_parallel_axes win over axis_resources
    (
        {"model_axis_size": 2, "tensor_parallel_axes": ["mlp"], "axis_resources": {"mlp": "data", "batch": "data"}},
        mesh(1, 4, 2),
        {"mlp": ["model"], "batch": BATCH},
        {"mlp": ["model"], "embed": ["data"]},
    ),
    (
        {"fsdp_axis": None, "parameter_axis_resources": {"embed": "replica", "batch": "model"}},
        mesh(1, 8, 1),
        {"batch": BATCH},
        {"embed": ["replica"]},
    ),
    # parameter_axis_resources win over axis_resources, and the default fsdp_axis over both
    (
        {"parameter_axis_resources": {"embed": "model", "mlp": ["data"]}, "axis_resources": {"mlp": "model"}},
        mesh(1, 8, 1),
        {"mlp": ["model"], "batch": BATCH},
        {"mlp": ["data"], "embed": ["data"]},
    ),
    ({"fsdp_axis": "batch", "batch_axis": "row"}, mesh(1, 8, 1), {"row": BATCH}, {"batch": ["data"]}),
    (
        {"batch_axis": "row", "axis_resources": {"batch": "data"}},
        mesh(1, 8, 1),
        {"row": BATCH, "batch": ["data"]},
        {"batch": ["data"], "embed": ["data"]},
    ),
    # fsdp_axis wins over tensor_parallel_axes
    (
        {"fsdp_axis": "mlp", "batch_axis": None, "tensor_parallel_axes": ["mlp"]},
        mesh(1, 8, 1),
        {"mlp": ["model"]},
        {"mlp": ["data"]},
    ),
    (
        {"batch_axis": None, "axis_resources": {"batch": "data"}, "replica_ici_axis_size": 2},
        mesh(2, 4, 1),
        {"batch": ["data"]},
        {"embed": ["data"]},
    ),
    (
        {"axis_resources": {"mlp": None, "heads": "model"}, "parameter_axis_resources": {"heads": None}},
        mesh(1, 8, 1),
        {"heads": ["model"], "batch": BATCH},
        {"embed": ["data"]},
    ),
    (
        {"fsdp_axis": ["mlp", "vocab"], "axis_resources": {"mlp": ["data", "model"]}, "model_axis_size": 2},
        mesh(1, 4, 2),
        {"mlp": ["data", "model"], "batch": BATCH},
        {"mlp": ["data"], "vocab": ["data"]},
    ),
    ({"fsdp_axis": []}, mesh(1, 8, 1), {"batch": BATCH}, {}),
]
"""Trainer section of levanter 1.2, and what that version made of it: mesh, compute mapping, and stored parameters."""


@pytest.mark.parametrize(("trainer", "sizes", "compute", "params"), OLD_SECTIONS, ids=str)
def test_conversion_of_mappings(trainer, sizes, compute, params):
    section = read_old(trainer)
    assert section.mesh == sizes
    # the batch is no axis of parameters
    stored = {axis: mesh_axes for axis, mesh_axes in section.param_mapping.items() if axis in params}
    assert section.compute_mapping == compute and stored == params
    assert set(section.param_mapping) <= {*params, section.batch_axis}
    assert section.batch_axis == (trainer.get("batch_axis") or "batch") and section.is_batch_mapped
    assert_levanter_agrees(convert(trainer), section)


@pytest.mark.parametrize(
    ("trainer", "batch", "microbatches"),
    [
        ({"train_batch_size": -1, "per_device_parallelism": 3, "model_axis_size": 2}, 12, 1),
        ({"train_batch_size": 64, "per_device_parallelism": 2, "model_axis_size": 1}, 64, 4),
        ({"train_batch_size": 64, "per_device_parallelism": 2, "model_axis_size": 2}, 64, 8),
        ({"train_batch_size": 64, "model_axis_size": 2}, 64, 1),
        # levanter 1.2 counts all devices of replica and data, whatever the batch is sharded over
        ({"train_batch_size": -1, "per_device_parallelism": 3, "batch_axis": None}, 24, 1),
        (
            {
                "train_batch_size": 96,
                "per_device_parallelism": 3,
                "batch_axis": None,
                "axis_resources": {"batch": "data"},
                "replica_ici_axis_size": 2,
            },
            96,
            4,
        ),
    ],
)
def test_conversion_of_the_batch(trainer, batch, microbatches):
    section = read_old(trainer)
    assert (section.batch, section.microbatches) == (batch, microbatches)
    evaluation = read_old({**trainer, "per_device_eval_parallelism": 2}).eval_batch
    assert evaluation == 2 * section.mesh["replica"] * section.mesh["data"]
    assert_levanter_agrees(convert(trainer), section)


@pytest.mark.parametrize(
    ("trainer", "kind", "where", "remedy", "axes", "mlp"),
    [
        ({"model_axis_size": 3}, "mesh size", "model_axis_size", "the other findings assume 2", mesh(1, 4, 2), None),
        (
            {"model_axis_size": 8, "replica_ici_axis_size": 3},
            "mesh size",
            "replica_ici_axis_size",
            "the other findings assume 1",
            mesh(1, 1, 8),
            None,
        ),
        (
            {"model_axis_size": 2, "axis_resources": {"mlp": "modle", "heads": "model"}},
            "unknown mesh axis",
            "axis_resources.mlp",
            "the other findings assume model",
            mesh(1, 4, 2),
            ["model"],
        ),
        (
            {"axis_resources": {"mlp": "xyz"}},
            "unknown mesh axis",
            "axis_resources.mlp",
            "the other findings assume that mlp is replicated",
            mesh(1, 8, 1),
            None,
        ),
        (
            {"axis_resources": {"mlp": []}},
            "list",
            "axis_resources.mlp",
            "the other findings assume that mlp is replicated",
            mesh(1, 8, 1),
            None,
        ),
    ],
    ids=str,
)
def test_wrong_values_are_corrected_before_the_conversion(trainer, kind, where, remedy, axes, mlp):
    converted, old, (finding,) = convert_nearest({"trainer": trainer}, parse_slice("v5e-8"))
    assert (finding.severity, finding.kind, finding.where) == ("error", kind, (f"trainer.{where}",))
    assert finding.remedy == remedy
    assert old == [f"trainer.{key}" for key in trainer]
    section = parse_trainer_section(converted["trainer"], 8)
    assert section.mesh == axes and section.compute_mapping.get("mlp") == mlp


@pytest.mark.parametrize(
    ("trainer", "where", "remedy", "old", "model"),
    [
        ({"model_axis_sise": 8}, "model_axis_sise", "did you mean 'model_axis_size'?", "model_axis_size", 8),
        (
            {"fsdp_axis": "mlp", "progress_watchdg": {}},
            "progress_watchdg",
            "did you mean 'progress_watchdog'?",
            "fsdp_axis",
            1,
        ),
        # a key that is there already
        (
            {"model_axis_size": 2, "model_axis_sise": 8},
            "model_axis_sise",
            "remove it, or did you mean 'model_axis_size'?",
            "model_axis_size",
            2,
        ),
        # not similar enough to rename it, and a value of the wrong type
        ({"ray": {}, "fsdp": "mlp"}, "fsdp", "remove it, or did you mean 'fsdp_axis'?", "ray", 1),
        (
            {"ray": {}, "model_axis_sise": "big"},
            "model_axis_sise",
            "remove it, or did you mean 'model_axis_size'?",
            "ray",
            1,
        ),
        ({"ray": {}, "qqq": 1}, "qqq", "remove it", "ray", 1),
    ],
    ids=str,
)
def test_misspelt_keys_are_corrected_before_the_conversion(trainer, where, remedy, old, model):
    converted, old_ones, (finding,) = convert_nearest({"trainer": trainer}, parse_slice("v5e-8"))
    assert (finding.severity, finding.kind, finding.where) == ("error", "unknown key", (f"trainer.{where}",))
    assert finding.remedy == remedy and old_ones == [f"trainer.{old}"]
    assert where not in converted["trainer"]
    assert parse_trainer_section(converted["trainer"], 8).mesh == mesh(1, 8 // model, model)


def test_sections_without_old_keys_are_not_converted():
    """Their wrong keys are found later, with the others."""
    sections = {"trainer": {"mehs": {}, "fsdp": "mlp", "mesh": {"axes": {"model": 3}}}, "model": {"max_seq_len": 8}}
    assert convert_nearest(sections, parse_slice("v5e-8")) == (sections, [], [])
    model_alone = {**sections, "model": {"seq_len": 8}}
    assert convert_nearest(model_alone, parse_slice("v5e-8")) == (sections, ["model.seq_len"], [])


@pytest.mark.parametrize(
    ("trainer", "expected"),
    [
        ({"profiler": True}, {"enabled": True}),
        ({"profiler": False}, {"enabled": False}),
        ({"profiler_num_steps": 20}, {"num_steps": 20}),
        (
            {"profiler": True, "profiler_num_steps": 20, "profiler_start_step": 5, "profiler_perfetto_link": False},
            {"enabled": True, "num_steps": 20, "start_step": 5, "perfetto_link": False},
        ),
    ],
    ids=str,
)
def test_conversion_of_the_profiler(trainer, expected):
    from levanter.trainer import TrainerConfig

    converted = convert({"seed": 1, **trainer})
    assert converted == {"seed": 1, "profiler": expected}
    profiler = draccus.decode(TrainerConfig, converted).profiler
    assert {name: getattr(profiler, name) for name in expected} == expected
    assert convert({"ray": {}, "profiler": {"enabled": True}}) == {"profiler": {"enabled": True}}


def test_conversion_of_the_number_of_positions():
    model = {"type": "llama", "seq_len": 1024, "hidden_dim": 64}
    converted = convert_sections({"trainer": {"seed": 1}, "model": model}, parse_slice("v5e-8"))
    assert converted == {
        "trainer": {"seed": 1},
        "model": {"type": "llama", "max_seq_len": 1024, "hidden_dim": 64},
    }
    assert [*converted["model"]] == ["type", "max_seq_len", "hidden_dim"]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (
            {
                "id": "org/text",
                "name": "en",
                "stream": None,
                "tokenizer": "gpt2",
                "cache_dir": "gs://b/c",
                "tags": ["a"],
            },
            {
                "tokenizer": "gpt2",
                "cache_dir": "gs://b/c",
                "components": {"org/text": {"source": {"type": "hf", "id": "org/text", "name": "en"}, "tags": ["a"]}},
            },
        ),
        (
            {"train_urls": ["a.jsonl"], "validation_urls": ["b.jsonl"], "tokenizer": "gpt2"},
            {
                "tokenizer": "gpt2",
                "components": {
                    "main": {"source": {"type": "url", "train_urls": ["a.jsonl"], "validation_urls": ["b.jsonl"]}}
                },
            },
        ),
        (
            {
                "configs": {"web": {"id": "org/web", "cache_dir": "gs://b/web"}, "code": {"train_urls": ["c.jsonl"]}},
                "train_weights": {"web": 0.9, "code": 0.1},
            },
            {
                "train_weights": {"web": 0.9, "code": 0.1},
                "components": {
                    "web": {"source": {"type": "hf", "id": "org/web"}, "cache_dir": "gs://b/web"},
                    "code": {"source": {"type": "url", "train_urls": ["c.jsonl"]}},
                },
            },
        ),
    ],
    ids=["one set", "addresses", "several sets"],
)
def test_conversion_of_the_data_section(data, expected):
    from levanter.main.train_lm import TrainLmConfig

    converted = convert_sections({"trainer": {}, "data": data}, parse_slice("v5e-8"))
    assert converted == {"trainer": {}, "data": expected}
    levanter = draccus.decode(TrainLmConfig, converted)
    assert set(levanter.data.components) == set(expected["components"])


BATCH_OVER_SLICES = {"batch": ["replica_dcn", "replica", "data_dcn", "data"]}
MESH_SECTIONS = [
    {},
    {"axes": {"model": 2}},
    {"axes": {"model": -1}},
    {"axes": {"replica": 2, "data": 2, "model": 2}},
    {"shared_mapping": {"mlp": None, "vocab": "model"}},
    {"shared_mapping": {"batch": "data"}, "param_mapping": {}},
    {
        "compute_mapping": {"heads": ["data", "model"], "token": "replica"},
        "param_mapping": {"embed": ["data", "model"]},
    },
    {"compute_mapping": {"batch": ["data"]}, "batch_axis_name": "row"},
    {"batch_axis_name": "mlp"},
    {"compute_mapping": {"batch": "replica_dcn"}},
]


@pytest.mark.parametrize("section", MESH_SECTIONS, ids=str)
@pytest.mark.parametrize(
    "trainer",
    [
        {},
        {"mp": "p=f32,c=bf16", "train_batch_size": 64, "per_device_parallelism": 2},
        {"mp": "bf16", "train_batch_size": -1, "per_device_parallelism": 3},
    ],
    ids=["default", "microbatches", "per device"],
)
def test_levanter_agrees(read, section, trainer):
    assert_levanter_agrees({**trainer, "mesh": section}, read({**trainer, "mesh": section}))


@pytest.mark.parametrize(
    "trainer",
    [
        {"mp": "p=f32,c=bf16"},
        {"mp": "c=bf16"},
        {"mp": "p=f16"},
        {"mp": "params=bfloat16,compute=full,output=f16"},
        {"mp": "bf16"},
        {"mp": "full", "train_batch_size": 64, "per_device_parallelism": 2},
        {"train_batch_size": -1, "per_device_parallelism": 3, "mesh": {"axes": {"replica": 2, "model": 2}}},
    ],
    ids=str,
)
def test_levanter_agrees_about_types_and_batches(read, trainer):
    assert_levanter_agrees(trainer, read(trainer))


@pytest.mark.parametrize(
    "section",
    [
        {},
        {"axes": {"model": 2, "replica": 2}},
        {"dcn_axes": {"data_dcn": -1}, "compute_mapping": BATCH_OVER_SLICES, "param_mapping": {}},
        {"dcn_axes": {"data_dcn": 2}, "compute_mapping": BATCH_OVER_SLICES, "param_mapping": {}},
        {"dcn_axes": {"data_dcn": 4}, "axes": {"model": 16}, "compute_mapping": BATCH_OVER_SLICES, "param_mapping": {}},
    ],
    ids=str,
)
def test_levanter_agrees_over_slices_about_the_mesh(read, section):
    from levanter.utils.mesh import MeshConfig

    within, across = draccus.decode(MeshConfig, section).axis_shapes(128, 4)
    parsed = read({"mesh": section}, devices=128, slices=4).mesh
    assert parsed["replica"] == within["replica"] * across["replica_dcn"]
    assert parsed["data"] == within["data"] * across.get("data_dcn", 1)
    assert parsed["model"] == within["model"]


def test_batch(read):
    schedule = [{"start": 0, "value": 32}, {"start": 100, "value": 256}, {"start": 200, "value": 64}]
    assert read({"train_batch_size": schedule}).batch == 256
    per_device = {"train_batch_size": -1, "per_device_parallelism": 4}
    assert read({**per_device, "mesh": {"axes": {"model": 2}}}).batch == 16
    assert read({**per_device, "mesh": {"axes": {"replica": 2}, "compute_mapping": {"batch": "data"}}}).batch == 16
    assert read({**per_device, "mesh": {"batch_axis_name": "row"}}, devices=64, slices=2).batch == 256


@pytest.mark.parametrize(
    ("trainer", "microbatches"),
    [
        ({}, 1),
        ({"per_device_parallelism": -1}, 1),
        ({"per_device_parallelism": 2}, 4),
        ({"mesh": {"axes": {"model": 2}}}, 1),
        ({"per_device_parallelism": 2, "mesh": {"axes": {"model": 2}}}, 8),
    ],
)
def test_microbatches(read, trainer, microbatches):
    assert read({"train_batch_size": 64, **trainer}).microbatches == microbatches


def test_half_is_bfloat16(read):
    assert read({"mp": "p=f32,c=half"}).compute_dtype == "bfloat16"


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"mesh": {"axes": {"model": 256}}},
            "trainer.mesh.axes.model 256 does not divide the 128 devices; did you mean 128?",
        ),
        (
            {"mesh": {"axes": {"model": 64, "replica": 8}}},
            "trainer.mesh.axes.replica 8 does not divide the 2 devices that trainer.mesh.axes.model 64 leaves; "
            "did you mean 2?",
        ),
        ({"mesh": {"axes": {"model": "2"}}}, "trainer.mesh.axes.model is '2'; it must be a positive integer or -1"),
        ({"mesh": {"axes": {"model": 0}}}, "trainer.mesh.axes.model is 0; it must be a positive integer or -1"),
        (
            {"mesh": {"axes": {"replica": True}}},
            "trainer.mesh.axes.replica is True; it must be a positive integer or -1",
        ),
        (
            {"mesh": {"dcn_axes": {"replica_dcn": 0}}},
            "trainer.mesh.dcn_axes.replica_dcn is 0; it must be a positive integer or -1",
        ),
        (
            {"mesh": {"shared_mapping": {"mlp": "modle"}}},
            "trainer.mesh.shared_mapping maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?",
        ),
        (
            {"mesh": {"compute_mapping": {"mlp": "(data, model)"}}},
            "trainer.mesh.compute_mapping maps 'mlp' to the unknown mesh axis '(data, model)'; "
            "valid: data, model, replica, replica_dcn",
        ),
        (
            {"mesh": {"shared_mapping": {"mlp": 3}}},
            "trainer.mesh.shared_mapping maps 'mlp' to 3; "
            "it must map names of axes to a mesh axis, a list of them, or null",
        ),
        ({"mesh": {"param_mapping": None}}, "trainer.mesh.param_mapping is None; it must be a section with keys"),
        (
            {"mesh": {"batch_axis_name": ["a"]}},
            "trainer.mesh.batch_axis_name is ['a']; it must be the name of an axis, or null",
        ),
        ({"train_batch_size": 2.5}, "trainer.train_batch_size is 2.5; it must be a positive integer or -1"),
        ({"train_batch_size": None}, "trainer.train_batch_size is None; it must be a positive integer or -1"),
        (
            {"train_batch_size": -1},
            "trainer.train_batch_size and trainer.per_device_parallelism are both -1; set one of them",
        ),
        (
            {"train_batch_size": [{"start": 0}]},
            "trainer.train_batch_size[0].value is None; it must be a positive integer",
        ),
        (
            {"mp": "p=f64"},
            "trainer.mp is 'p=f64': unknown type 'f64'; valid: bf16, bfloat16, f16, f32, float16, float32, full, half",
        ),
        ({"mp": "q=f32"}, "trainer.mp is 'q=f32': unknown key 'q'; valid: c, compute, o, output, p, params"),
        ({"mp": 16}, "trainer.mp is 16; it must be text such as 'p=f32,c=bf16'"),
        (
            {"mesh": {"shared_mapping": {"mlp": []}}},
            "trainer.mesh.shared_mapping maps 'mlp' to an empty list, with which Levanter fails; null replicates it",
        ),
        ({"mesh": None}, "trainer.mesh is None; it must be a section with keys"),
        ({"mesh": {"axis": {"model": 2}}}, "trainer.mesh: unknown key 'axis'; did you mean 'axes'?"),
        (
            {"mesh": {"axes": {"context": 4}}},
            "trainer.mesh.axes: a plan's mesh is replica x data x model; not 'context'; valid: data, model, replica",
        ),
        (
            {"mesh": {"dcn_axes": {"slice": 2}}},
            "trainer.mesh.dcn_axes: a plan's mesh is replica x data x model, across slices replica_dcn x data_dcn; "
            "not 'slice'; valid: data_dcn, replica_dcn",
        ),
        (
            {"mesh": {"dcn_axes": {"replica_dcn": 2}}},
            "trainer.mesh.dcn_axes.replica_dcn is 2, but there is 1 slice; set it to 1 or -1",
        ),
        (
            {"mesh": {"shared_mapping": {"mlp": "data_dcn"}}},
            "trainer.mesh.shared_mapping maps 'mlp' to the unknown mesh axis 'data_dcn'; did you mean 'data'?",
        ),
        (
            {"mesh": {"dcn_axes": {"data_dcn": -1, "replica_dcn": -1}}},
            "trainer.mesh.dcn_axes: replica_dcn and data_dcn are -1; only one can take the remaining slices",
        ),
        (
            {"mesh": {"axes": {"data": -1, "model": -1}}},
            "trainer.mesh.axes: data and model are -1; only one can take the remaining devices",
        ),
        (
            {"mesh": {"axes": {"replica": -1, "model": -1}}},
            "trainer.mesh.axes: replica and model are -1; only one can take the remaining devices",
        ),
        (
            {"mesh": {"axes": {"model": 48}}},
            "trainer.mesh.axes.model 48 does not divide the 128 devices; did you mean 32 or 64?",
        ),
        (
            {"mesh": {"axes": {"data": 16, "model": 4}}},
            "trainer.mesh.axes: replica 1 x data 16 x model 4 is 1/2 of the 128 devices; set data to 32 or -1",
        ),
        ({"mesh": {"axes": {"model": None}}}, "trainer.mesh.axes.model is None; it must be a positive integer or -1"),
        (
            {"mesh": {"param_mapping": {"embed": ["data", "modle"]}}},
            "trainer.mesh.param_mapping maps 'embed' to the unknown mesh axis 'modle'; did you mean 'model'?",
        ),
        (3, "trainer is 3; it must be a section with keys"),
    ],
    ids=str,
)
def test_errors(read, trainer, message):
    with pytest.raises(ConfigError) as raised:
        read(trainer, devices=128)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("trainer", "message"),
    [
        (
            {"model_axis_size": 48},
            "trainer.model_axis_size 48 does not divide the 128 devices; did you mean 32 or 64?",
        ),
        ({"model_axis_size": 256}, "trainer.model_axis_size 256 does not divide the 128 devices; did you mean 128?"),
        (
            {"model_axis_size": 64, "replica_ici_axis_size": 8},
            "trainer.replica_ici_axis_size 8 does not divide the 2 devices that trainer.model_axis_size 64 leaves; "
            "did you mean 2?",
        ),
        ({"replica_dcn_axis_size": 2}, "trainer.replica_dcn_axis_size 2 does not divide the 1 slice; did you mean 1?"),
        ({"model_axis_size": "2"}, "trainer.model_axis_size is '2'; it must be a positive integer"),
        ({"model_axis_size": -1}, "trainer.model_axis_size is -1; it must be a positive integer"),
        ({"replica_dcn_axis_size": 0}, "trainer.replica_dcn_axis_size is 0; it must be a positive integer or -1"),
        ({"replica_ici_axis_size": True}, "trainer.replica_ici_axis_size is True; it must be a positive integer"),
        (
            {"axis_resources": {"mlp": "modle"}},
            "trainer.axis_resources maps 'mlp' to the unknown mesh axis 'modle'; did you mean 'model'?",
        ),
        (
            {"parameter_axis_resources": {"mlp": ["data", "replica_dcn"]}},
            "trainer.parameter_axis_resources maps 'mlp' to the unknown mesh axis 'replica_dcn'; "
            "did you mean 'replica'?",
        ),
        (
            {"axis_resources": {"mlp": "(data, model)"}},
            "trainer.axis_resources maps 'mlp' to the unknown mesh axis '(data, model)'; valid: data, model, replica",
        ),
        (
            {"axis_resources": {"mlp": 3}},
            "trainer.axis_resources maps 'mlp' to 3; it must map names of axes to a mesh axis, a list of them, or null",
        ),
        ({"axis_resources": None}, "trainer.axis_resources is None; it must be a section with keys"),
        (
            {"tensor_parallel_axes": "mlp"},
            "trainer.tensor_parallel_axes is 'mlp'; it must be a list of axes, or null",
        ),
        ({"fsdp_axis": 3}, "trainer.fsdp_axis is 3; it must be the name of an axis, a list of names, or null"),
        ({"batch_axis": ["a"]}, "trainer.batch_axis is ['a']; it must be the name of an axis, or null"),
        (
            {"axis_resources": {"mlp": []}},
            "trainer.axis_resources maps 'mlp' to an empty list, with which Levanter fails; null replicates it",
        ),
    ],
    ids=str,
)
def test_errors_of_a_section_of_levanter_12(trainer, message):
    with pytest.raises(ConfigError) as raised:
        convert(trainer, "v5e-128")
    assert str(raised.value) == message


def test_errors_over_slices(read):
    with pytest.raises(
        ConfigError, match=r"^trainer.model_axis_size 32 does not divide the 16 devices of a slice; did"
    ):
        convert({"model_axis_size": 32}, "4xv5e-16")
    with pytest.raises(
        ConfigError, match=r"^trainer.replica_dcn_axis_size 3 does not divide the 4 slices; did you mean 2 or 4\?$"
    ):
        convert({"replica_dcn_axis_size": 3}, "4xv5e-16")
    with pytest.raises(
        ConfigError, match=r"^trainer.mesh.axes.model 32 does not divide the 16 devices of a slice; did"
    ):
        read({"mesh": {"axes": {"model": 32}}}, devices=64, slices=4)
    with pytest.raises(ConfigError, match=r"replica_dcn is 2, but there are 4 slices; set it to 4 or -1"):
        read({"mesh": {"dcn_axes": {"replica_dcn": 2}}}, devices=64, slices=4)
    with pytest.raises(ConfigError, match=r"^64 devices cannot be split into 3 slices of equal size$"):
        read({}, devices=64, slices=3)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot be read: "),
        (b"\xff\xfe", "cannot be read: "),
        (b"trainer: [", "is not YAML: "),
        (b"trainer: !include other.yaml", "is not YAML: "),
        (b"data: 1\nmodel: 2", "contains the sections data, model, but no trainer section; is it for Levanter?"),
        (b"- 1", "contains a list, but no trainer section; is it for Levanter?"),
        (b"", "contains nothing, but no trainer section; is it for Levanter?"),
    ],
)
def test_unreadable_files(tmp_path, content, message):
    path = tmp_path / "config.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_levanter_file(str(path))
    assert str(raised.value).startswith(f"config file {path} {message}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("content", "name"),
    [
        ("trainer: &a {seed: 3, x: *a}", "trainer.x"),
        ("trainer: {ids: &a [1, *a]}", "trainer.ids.1"),
        ("trainer: {}\nmodel: &m {type: llama, rope: {of: *m}}", "model.rope.of"),
    ],
)
def test_sections_that_contain_themselves(tmp_path, content, name):
    path = tmp_path / "config.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=rf"^config file {path}: {name} is an alias of a section that contains it; w"):
        read_levanter_file(str(path))
    path.write_text("a: &a {model: 2}\ntrainer: {x: *a, y: *a}")  # an alias by itself is fine
    assert [*read_levanter_file(str(path)).sections] == ["a", "trainer"]


def test_default_batch_size_of_levanter():
    from levanter.trainer import TrainerConfig

    assert TrainerConfig.train_batch_size == DEFAULT_TRAIN_BATCH_SIZE


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ({}, ModelSection()),
        ({"type": "llama", "seq_len": 1024}, ModelSection(position=1024)),
        ({"max_seq_len": 512, "attn_backend": "jax_flash"}, ModelSection(position=512, attention_backend="jax_flash")),
        ({"gradient_checkpointing": True}, ModelSection("default")),
        ({"gradient_checkpointing": False}, ModelSection("save_all")),
        ({"gradient_checkpointing": "full"}, ModelSection("recompute")),
        ({"gradient_checkpointing": "nested"}, ModelSection("nested")),
        ({"gradient_checkpointing": {"nested": 4}}, ModelSection("nested:4")),
        ({"gradient_checkpointing": {"nested": 4, "simple": True}}, ModelSection("nested:4")),
        ({"gradient_checkpointing": {"save_carries": "offload"}}, ModelSection("offload_carries")),
        ({"gradient_checkpointing": {"save_carries": "offload", "save_inputs": "offload"}}, ModelSection("offload")),
        ({"gradient_checkpointing": {"save_carries": False}}, ModelSection("recompute")),
        ({"gradient_checkpointing": {"save_block_internals": True}}, ModelSection("save_all")),
        ({"gradient_checkpointing": {"simple": True}}, ModelSection("default")),
        (None, ModelSection()),
        ("llama", ModelSection()),
    ],
    ids=str,
)
def test_model_section(model, expected):
    assert parse_model_section({"model": model}) == expected


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (
            {"gradient_checkpointing": "ofload"},
            "model.gradient_checkpointing is 'ofload'; did you mean 'offload'? (or true, or false)",
        ),
        ({"gradient_checkpointing": {"nested": 0}}, "model.gradient_checkpointing.nested is 0; it must be true, false"),
        ({"gradient_checkpointing": {"nested": "a"}}, "model.gradient_checkpointing.nested is 'a'; it must be true"),
        ({"gradient_checkpointing": [1]}, "model.gradient_checkpointing is [1]; valid: full, nested, offload, "),
        ({"seq_len": "4k"}, "model.seq_len is '4k'; it must be a positive integer"),
    ],
)
def test_model_section_errors(model, message):
    with pytest.raises(ConfigError) as raised:
        parse_model_section({"model": model})
    assert str(raised.value).startswith(message)


def test_is_levanter_config():
    assert is_levanter_config({"trainer": {}, "model": {"type": "llama"}})
    assert is_levanter_config({"trainer": None})
    assert not is_levanter_config({"model": {"ref": "x"}, "hardware": {"slice": "cpu-8"}})
    assert not is_levanter_config({"trainer": {}, "workload": {"batch": 8}})
    assert not is_levanter_config(["trainer"])
    assert not is_levanter_config(None)


def test_imports_no_jax():
    script = "import sys, shardplan.levanter_config.trainer_section; print(*sys.modules)"
    modules = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    assert not {"jax", "haliax", "levanter"} & set(modules)


@pytest.mark.parametrize("path", sorted(Path("configs/levanter").glob("*.yaml")), ids=lambda path: path.stem)
def test_configurations_of_the_repository(path):
    """They are for 128 devices, and map a logical axis to every mesh axis of several devices."""
    section = parse_trainer_section(read_levanter_file(str(path)).sections["trainer"], 128)
    assert section.mesh["replica"] * section.mesh["data"] * section.mesh["model"] == 128
    mapped = {
        axis
        for mapping in (section.compute_mapping, section.param_mapping)
        for axes in mapping.values()
        for axis in axes
    }
    assert {axis for axis, size in section.mesh.items() if size > 1} <= mapped
