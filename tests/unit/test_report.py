"""The tables show every parameter, and the printed YAML reads back as the plan."""

import dataclasses
import io
import json

import pytest
import yaml

from shardplan.hardware import parse_slice
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.levanter_config.trainer_section import parse_trainer_section
from shardplan.levanter_config.writer import trainer_yaml
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.plan import Plan
from shardplan.report.console import console
from shardplan.report.plan.tables import print_plan, spec_text
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, model_from_config

LLAMA = "llama-3.1-8b"


@pytest.fixture
def plan(golden, make_config):
    return make_plan(make_config(model_ref=golden / "llama", workload_position=64, mesh_data=2, mesh_model=2))


def test_model_flops_are_recorded(plan):
    """MFU is them over the peak of all devices during a step; a CPU and a plan of version 0.1 have none."""
    on_tpu = dataclasses.replace(plan, hardware=dataclasses.replace(plan.hardware, slice="v4-16"))
    assert plan.cost.model_flops and plan.mfu is None
    assert on_tpu.mfu == pytest.approx(plan.cost.model_flops / (plan.cost.step_seconds * 8 * 2.75e14))
    assert dataclasses.replace(on_tpu, cost=dataclasses.replace(plan.cost, model_flops=None)).mfu is None
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))).cost.model_flops == plan.cost.model_flops


def test_the_time_of_the_search_is_not_that_of_the_plan(plan):
    """A given Plan file prints what it printed when it was planned."""
    texts = []
    for seconds in (0.0, 123.0):
        stream = io.StringIO()
        print_plan(dataclasses.replace(plan, search=dataclasses.replace(plan.search, seconds=seconds)), console(stream))
        texts.append(stream.getvalue())
    assert texts[0] == texts[1]


def test_printed_comments_fit_80_columns(make_config):
    """With what the flat schema cannot express: the class, and the calls of sequence-parallel attention."""
    config = make_config(model_config=LLAMA, hardware_slice="v4-16", workload_batch=1, model_levanter_class="levanter")
    axes = {
        "mlp": ["model", "replica"],
        "kv_head": ["model"],
        "q_heads_per_group": ["data", "replica"],
        "vocab": ["model"],
    }
    plan = plan_given_mappings(
        config,
        model_from_config(config),
        {"replica": 2, "data": 2, "model": 2},
        {"position": ["replica", "data"], "mlp": ["model"], "kv_head": ["model"], "vocab": ["model"]},
        axes,
        AttentionPlan("hybrid", 2, 2, "zigzag", "splash"),
    )
    text = trainer_yaml(plan)
    assert max(map(len, text.splitlines())) <= 80
    assert yaml.safe_load(text)["trainer"]["mesh"]["param_mapping"]["q_heads_per_group"] == ["data", "replica"]
    assert '#     layout = SequenceLayout(2048, 2, 2, "zigzag")\n' in text
    assert '#     method = Method("hybrid", ulysses=2, kernel="splash", layout=layout)\n' in text


@pytest.mark.parametrize("with_parameters", [True, False])
def test_what_the_search_rejected_is_the_last_reason_of_the_long_form(plan, with_parameters):
    rejected = {"indivisible": 563, "memory": 0, "slower": 238}
    stream = io.StringIO()
    counted = dataclasses.replace(plan, search=dataclasses.replace(plan.search, rejected=rejected))
    print_plan(counted, console(stream), with_parameters)
    bullets = [line for line in stream.getvalue().splitlines() if line.startswith("  · ")]
    last = "  · meshes and choices that the search rejected: indivisible 563, slower 238"
    assert (bullets[-1] == last) == with_parameters
    assert bullets[:-1] if with_parameters else bullets


def test_parts_of_memory_that_would_be_0_are_left_out(plan):
    memory = dataclasses.replace(
        plan.memory, parameters=2**30, activations=2**29, logits=2**20, gathered_weights=0, peak=2**30 + 2**29 + 2**20
    )
    stream = io.StringIO()
    print_plan(dataclasses.replace(plan, memory=memory), console(stream), with_parameters=False)
    assert "\nmemory           parameters 1.00 + activations 0.50 = 1.50 GiB\n" in stream.getvalue()


def test_tables_are_never_truncated_when_piped(plan):
    stream = io.StringIO()
    print_plan(plan, console(stream))
    text = stream.getvalue()
    for parameter in plan.parameters:
        assert parameter.path in text and spec_text(parameter.spec) in text
    assert "…" not in text
    assert f"mesh             replica 2 x data 2 x model 2 = 8 devices of {plan.hardware.slice}" in text
    assert "fits cpu-8" in text and "trainer:" in text


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
def test_the_section_reads_back_as_the_plan(make_config, slice_name, mesh, compute, params):
    config = make_config(model_config=LLAMA, hardware_slice=slice_name, workload_batch=64)
    sizes = dict(zip(MESH_AXES, mesh, strict=True))
    plan = plan_given_mappings(config, model_from_config(config), sizes, compute, params)
    text = trainer_yaml(plan)
    values, slices = yaml.safe_load(text)["trainer"], parse_slice(slice_name).slices
    layout = parse_trainer_section(values, plan.hardware.devices, slices)
    assert layout.mesh == sizes and layout.batch == 64
    assert layout.compute_mapping == compute and layout.param_mapping == params
    assert (layout.param_dtype, layout.compute_dtype) == (plan.workload.param_dtype, plan.workload.compute_dtype)


def test_the_section_expresses_data_across_slices(make_config):
    config = make_config(model_config=LLAMA, hardware_slice="2xv4-16", workload_batch=64)
    plan = plan_given_mappings(
        config, model_from_config(config), {"replica": 1, "data": 16, "model": 1}, {"batch": ["replica", "data"]}, {}
    )
    text = trainer_yaml(plan)
    assert yaml.safe_load(text)["trainer"]["mesh"]["dcn_axes"] == {"data_dcn": 2}
    assert parse_trainer_section(yaml.safe_load(text)["trainer"], 16, 2).mesh == plan.mesh


def test_warnings_of_the_section_have_the_axes_of_the_model(make_config):
    config = make_config(model_config=LLAMA, hardware_slice="v4-16", workload_batch=64)
    plan = plan_given_mappings(
        config, model_from_config(config), {"replica": 1, "data": 4, "model": 2}, {"batch": ["data"]}, {}
    )
    own = dataclasses.replace(plan.model, vocab="words", unsharded_in_kernels=["lanes"])
    for axis, warning in (("words", "with words sharded, Levanter's own"), ("lanes", "jax_flash: with lanes sharded,")):
        for model, is_warned in ((own, True), (plan.model, False)):
            sharded = dataclasses.replace(plan, model=model, compute_mapping={"batch": ["data"], axis: ["model"]})
            text = trainer_yaml(sharded).replace("\n# ", " ")
            assert (warning in text) == is_warned


def test_partition_spec_text():
    assert spec_text([None, ["model"], ["data", "replica"]]) == "P(None, 'model', ('data', 'replica'))"
