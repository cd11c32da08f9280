"""The diff of two plans lists each difference once, and nothing else."""

import dataclasses
import io

import pytest

from shardplan.plan.diff import Change, diff_plans
from shardplan.report.console import console
from shardplan.report.plan.diff import print_difference
from shardplan.search.make_plan import make_plan


@pytest.fixture
def plan_of(golden, make_config):
    def plan(**overrides):
        return make_plan(make_config(model_ref=golden / "llama", workload_position=64, **overrides))

    return plan


def printed(before, after):
    stream = io.StringIO()
    print_difference("old.json", "new.json", diff_plans(before, after), console(stream))
    return stream.getvalue()


def test_the_same(plan_of):
    """Planned again, by other versions: the search takes another time, and the plan is the same."""
    plan = plan_of()
    again = dataclasses.replace(
        plan, search=dataclasses.replace(plan.search, seconds=1e9, candidates=1), versions={"jax": "0"}
    )
    assert not diff_plans(plan, again)
    assert printed(plan, again) == "the plans are the same\n"


def test_another_mesh(plan_of):
    before, after = plan_of(mesh_model=2, mesh_data=4), plan_of(mesh_model=4, mesh_data=2, workload_batch=16)
    found = diff_plans(before, after)
    assert found.settings == [Change("workload.batch", 8, 16)]
    assert found.mesh == [Change("data", 4, 2), Change("model", 2, 4)]
    assert {change.name for change in found.memory} >= {"activations", "peak"}
    for change in found.memory:
        assert (change.before, change.after) == (
            getattr(before.memory, change.name),
            getattr(after.memory, change.name),
        )
    assert found.cost[0] == Change("step", before.cost.step_seconds, after.cost.step_seconds)
    text = printed(before, after)
    assert "old.json" in text and "new.json" in text and "workload.batch" in text


def test_parameters_that_change_in_the_same_way_are_one_group(plan_of):
    before = plan_of(mesh_model=2, mesh_data=4)
    moved = [
        dataclasses.replace(p, spec=[["replica"], *p.spec[1:]], bytes_per_device=10) if ".mlp." in p.path else p
        for p in before.parameters
    ]
    after = dataclasses.replace(before, parameters=moved[:-1])
    paths = {p.path for p in before.parameters if ".mlp." in p.path}
    found = diff_plans(before, after)
    grouped = [change for change in found.parameters if change.after is not None]
    assert {path for change in grouped for path in change.parameters} == paths
    # gate and up have their axes in one order, down in the other
    assert sorted(len(change.parameters) for change in grouped) == [1, 2]
    assert all(change.bytes_after == 10 * len(change.parameters) for change in grouped)
    (gone,) = [change for change in found.parameters if change.after is None]
    assert gone.parameters == [before.parameters[-1].path] and gone.bytes_after == 0
    assert not found.mesh and not found.memory and not found.settings


def test_mappings_axis_by_axis_and_collectives_by_cause(plan_of):
    before = plan_of(mesh_model=2, mesh_data=4)
    first, *rest = before.cost.collectives
    after = dataclasses.replace(
        before,
        compute_mapping={**before.compute_mapping, "position": ["replica", "data"]},
        param_mapping={axis: axes for axis, axes in before.param_mapping.items() if axis != "mlp"},
        cost=dataclasses.replace(before.cost, collectives=[dataclasses.replace(first, seconds=9.5), *rest]),
    )
    found = diff_plans(before, after)
    assert found.compute_mapping == [Change("position", None, ["replica", "data"])]
    assert found.param_mapping == [Change("mlp", before.param_mapping["mlp"], None)]
    (change,) = found.collectives
    assert change.name == f"{first.kind}, {first.cause}"
    assert change.after - change.before == pytest.approx(9.5 - first.seconds)
    text = printed(before, after)
    assert "replica x data" in text and "9.5" in text
