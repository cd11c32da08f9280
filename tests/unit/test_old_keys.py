"""Keys of levanter 1.2 are recognised, and corrected where they are misspelt, before the conversion."""

import pytest
from levanter_sections import convert, mesh

from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.levanter_config.flat_schema import old_keys
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.lint.corrections import convert_nearest


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
