"""Sections of levanter 1.2 are converted to the same mesh, mappings and batch.

That version is not installed here, so that its values are written by hand.
"""

import copy

import draccus
import pytest
from levanter_sections import BATCH, assert_levanter_agrees, convert, mesh, read_old

from shardplan.hardware import parse_slice
from shardplan.levanter_config.flat_schema import convert_sections


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


def test_defaults_of_levanter_12():
    section = read_old({"model_axis_size": 1})
    assert section.mesh == mesh(1, 8, 1)
    assert section.compute_mapping == {"batch": BATCH}
    assert section.param_mapping == {"embed": ["data"]}
    assert (section.batch, section.param_dtype, section.compute_dtype) == (None, "float32", "float32")


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
