"""The tables show every parameter, and the printed YAML reads back as the plan."""

import io

import pytest
import yaml

from shardplan.hardware import parse_slice
from shardplan.levanter_config.schema import TrainerSchema
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.plan.mesh_axes import MESH_AXES
from shardplan.report.tables import console, print_plan, spec_text
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config


@pytest.fixture
def plan(golden, make_config):
    return make_plan(make_config(model_ref=golden / "llama", workload_position=64, mesh_data=2, mesh_model=2))


def test_tables_are_never_truncated_when_piped(plan):
    stream = io.StringIO()
    print_plan(plan, console(stream))
    text = stream.getvalue()
    for parameter in plan.parameters:
        assert parameter.path in text and spec_text(parameter.spec) in text
    assert "…" not in text
    assert f"mesh             replica 2 x data 2 x model 2 = 8 devices of {plan.hardware.slice}" in text
    assert "fits cpu-8" in text and "trainer:" in text


LLAMA = "configs/models/llama-3.1-8b.json"


@pytest.mark.parametrize(
    ("slice_name", "mesh", "compute", "params"),
    [
        ("v4-16", (1, 4, 2), {"batch": ["replica", "data"], "mlp": ["model"], "kv_head": ["model"]}, {}),
        ("v4-16", (2, 2, 2), {"batch": ["data"], "heads": ["model"]}, {"mlp": ["model", "data"], "embed": ["data"]}),
        ("v4-16", (2, 2, 2), {"mlp": ["model", "replica"]}, {"mlp": ["model", "replica"], "heads": ["model"]}),
        ("2xv4-16", (2, 8, 1), {"batch": ["replica", "data"]}, {"embed": ["data", "replica"]}),
        ("2xv4-16", (4, 2, 2), {"batch": ["replica", "data"], "mlp": ["model"]}, {"mlp": ["model"]}),
    ],
)
def test_the_later_schema_reads_back_as_the_plan(make_config, slice_name, mesh, compute, params):
    config = make_config(model_config=LLAMA, hardware_slice=slice_name, workload_batch=64)
    sizes = dict(zip(MESH_AXES, mesh, strict=True))
    plan = plan_given_mappings(config, model_from_config(config), sizes, compute, params)
    text = trainer_yaml(plan, TrainerSchema.MESH)
    values, slices = yaml.safe_load(text)["trainer"], parse_slice(slice_name).slices
    layout = parse_trainer_section(values, plan.hardware.devices, slices)
    assert "TrainerConfig" not in text  # the later schema has lists and the batch
    assert layout.mesh == sizes and layout.batch == 64
    assert layout.compute_mapping == compute and layout.param_mapping == params
    assert (layout.param_dtype, layout.compute_dtype) == (plan.workload.param_dtype, plan.workload.compute_dtype)


def test_a_plan_that_the_later_schema_cannot_express_is_printed_in_the_flat_one(make_config):
    config = make_config(model_config=LLAMA, hardware_slice="2xv4-16", workload_batch=64)
    plan = plan_given_mappings(
        config, model_from_config(config), {"replica": 1, "data": 16, "model": 1}, {"batch": ["replica", "data"]}, {}
    )
    assert trainer_yaml(plan, TrainerSchema.MESH) == trainer_yaml(plan)


def test_partition_spec_text():
    assert spec_text([None, ["model"], ["data", "replica"]]) == "P(None, 'model', ('data', 'replica'))"
