"""The tables hold every parameter, uncut."""

import io

import pytest

from shardplan.plan.planner import make_plan
from shardplan.report import console, print_plan
from shardplan.report.tables import spec_text


@pytest.fixture
def plan(golden, make_config):
    return make_plan(make_config(model_ref=golden / "llama", workload_position=64, mesh_data=2, mesh_model=2))


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
