"""The tables hold every parameter, uncut; Levanter reads the pasted YAML as the plan meant it."""

import dataclasses
import io
import logging

import draccus
import jmp
import pytest
import yaml

from shardplan.plan.planner import make_plan
from shardplan.report import console, print_plan, trainer_yaml
from shardplan.report.tables import spec_text


@pytest.fixture
def plan(golden, make_config):
    return make_plan(make_config(model_ref=golden / "llama", workload_position=64, mesh_data=2, mesh_model=2))


def used(mapping, mesh):
    """A Levanter or shardplan mapping without mesh axes of size 1."""
    as_tuples = {axis: (v,) if isinstance(v, str) else tuple(v) for axis, v in mapping.items()}
    kept = {axis: tuple(a for a in axes if mesh[a] > 1) for axis, axes in as_tuples.items()}
    return {axis: axes for axis, axes in kept.items() if axes}


@pytest.mark.parametrize("mesh", [{"mesh_data": 4}, {"mesh_model": 4}, {"mesh_replica": 2, "mesh_data": 4}])
def test_levanter_reads_the_yaml_as_the_plan(golden, make_config, mesh, caplog):
    from levanter.trainer import TrainerConfig

    plan = make_plan(make_config(model_ref=golden / "llama", workload_position=64, **mesh))
    with caplog.at_level(logging.ERROR):
        trainer = draccus.decode(TrainerConfig, yaml.safe_load(trainer_yaml(plan))["trainer"])
    assert used(trainer.compute_axis_mapping, plan.mesh) == used(plan.compute_mapping, plan.mesh)
    assert dict(trainer.device_mesh.shape) == plan.mesh
    assert trainer.mp == jmp.get_policy("p=bfloat16,c=bfloat16")
    assert trainer.eval_batch_size == plan.workload.batch
    expressible = {axis: axes for axis, axes in plan.param_mapping.items() if len(axes) == 1}
    found = used(trainer.parameter_axis_mapping, plan.mesh)
    assert {axis: found.get(axis) for axis in expressible} == used(expressible, plan.mesh)
    if len(expressible) == len(plan.param_mapping):
        assert found.keys() - {"batch"} == plan.param_mapping.keys()


def test_lists_of_mesh_axes_are_a_comment(plan):
    several = dataclasses.replace(plan, param_mapping={"mlp": ["model", "data"], "vocab": ["model"]})
    text = trainer_yaml(several)
    assert yaml.safe_load(text)["trainer"]["parameter_axis_resources"] == {"vocab": "model"}
    assert "# in Python only, for Levanter reads no list of mesh axes from YAML: {mlp: [model, data]}" in text


def test_tables_are_never_cut_when_piped(plan):
    stream = io.StringIO()
    print_plan(plan, console(stream))
    text = stream.getvalue()
    for parameter in plan.parameters:
        assert parameter.path in text and spec_text(parameter.spec) in text
    assert "…" not in text
    assert f"mesh             replica 2 x data 2 x model 2 = 8 devices of {plan.hardware.slice}" in text
    assert "fits cpu-8" in text and "trainer:" in text


def test_partition_spec_text():
    assert spec_text([None, ["model"], ["data", "replica"]]) == "P(None, 'model', ('data', 'replica'))"
