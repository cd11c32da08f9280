"""Edits of a trainer section: what is tried, what is applied, and the lines that show it."""

import pytest
import yaml
from lint_trainers import LLAMA, target_8b

from shardplan import config as configuration
from shardplan.lint.edits import Edit, candidate_edits, diff_trainers, explain_lines
from shardplan.lint.lint import lint_trainer, target_of


@pytest.mark.parametrize(
    "trainer",
    [
        "{mesh: {axes: {model: 2}, shared_mapping: {layers: data, layer: null}}}",
        "{mesh: {axes: {model: 2}, param_mapping: {layer: data}}}",
        "{mesh: {axes: {model: 2}, shared_mapping: {layer: replica}}}",
    ],
)
def test_no_edit_maps_the_axis_along_which_layers_are_stacked(trainer):
    target = target_8b()
    start = lint_trainer(yaml.safe_load(trainer), target)
    for edit in candidate_edits(start.trainer, start.subject):
        mapped = {key: value for key, value in edit.values.items() if value is not None}
        assert "layer" not in mapped.values() and not any(key.endswith(".layer") for key in mapped)


def test_an_edit_does_not_change_its_input():
    before = {"mesh": {"batch_axis_name": None, "shared_mapping": {"mlp": "model", "kv_heads": "model"}}, "seed": 3}
    edit = Edit(
        {"trainer.mesh.shared_mapping.kv_head": "model", "trainer.mesh.param_mapping.embed": ["model", "data"]},
        ("trainer.mesh.shared_mapping.kv_heads", "trainer.mesh.batch_axis_name"),
    )
    after = edit.apply(before)
    assert before["mesh"] == {"batch_axis_name": None, "shared_mapping": {"mlp": "model", "kv_heads": "model"}}
    assert after == {
        "mesh": {
            "shared_mapping": {"mlp": "model", "kv_head": "model"},
            "param_mapping": {"embed": ["model", "data"]},
        },
        "seed": 3,
    }
    assert diff_trainers(before, after) == [
        "-trainer.mesh.batch_axis_name: null",
        "-trainer.mesh.shared_mapping.kv_heads: model",
        "+trainer.mesh.shared_mapping.kv_head: model",
        "+trainer.mesh.param_mapping.embed: [model, data]",
    ]


def test_lines_say_what_replaces_what():
    """Where only one of the two lines is there, it says what holds instead."""
    lines = [
        "-trainer.mesh.axes.model: 3", "+trainer.mesh.axes.model: 2", "+trainer.per_device_parallelism: 2",
        "-trainer.mesh.param_mapping.embed: model", "+trainer.mesh.shared_mapping.kv_head: model",
        "-trainer.mesh.shared_mapping.vocab: model", "-trainer.qqq: 1",
        "+train_config.trainer.mesh.axes.model: 4",
    ]  # fmt: skip
    assert explain_lines(lines) == [
        "-trainer.mesh.axes.model: 3",
        "+trainer.mesh.axes.model: 2",
        "+trainer.per_device_parallelism: 2 (instead of Levanter's default, -1)",
        "-trainer.mesh.param_mapping.embed: model (then it is Levanter's default, data)",
        "+trainer.mesh.shared_mapping.kv_head: model (instead of no entry)",
        "-trainer.mesh.shared_mapping.vocab: model",
        "-trainer.qqq: 1",
        "+train_config.trainer.mesh.axes.model: 4 (instead of Levanter's default, 1)",
    ]


@pytest.mark.slow
def test_repairs_keep_a_schedule():
    """128 and 1024 sequences, on 64 batch shards with 4 sequences each."""
    argv = [f"--model.config={LLAMA}", "--hardware.slice=v4-128", "--workload.kind=train", "--workload.position=512"]
    target = target_of(configuration.parse_config(argv))
    schedule = [{"start": 0, "value": 128}, {"start": 1000, "value": 1024}]
    start = lint_trainer({"mp": "p=f32,c=bf16", "per_device_parallelism": 4, "train_batch_size": schedule}, target)
    assert [error.kind for error in start.errors] == ["batch"]
    edits = [
        edit for edit in candidate_edits(start.trainer, start.subject)
        if {"trainer.train_batch_size", "trainer.per_device_parallelism"} & edit.values.keys()
    ]  # fmt: skip
    schedules = [edit.values["trainer.train_batch_size"] for edit in edits if "trainer.train_batch_size" in edit.values]
    assert [{"start": 0, "value": 256}, schedule[1]] in schedules
    assert all([step["start"] for step in each] == [0, 1000] for each in schedules)
    per_device = {edit.values.get("trainer.per_device_parallelism") for edit in edits}
    assert {-1, 1, 2} <= per_device and 8 not in per_device
    assert diff_trainers({"train_batch_size": schedule}, {"train_batch_size": schedules[0]})[0] == (
        "-trainer.train_batch_size: [{start: 0, value: 128}, {start: 1000, value: 1024}]"
    )
