"""Checks that the Plan file can be read, and is for the configured model and slice."""

from collections.abc import Iterator

from shardplan.config.given_plan import load_given_plan
from shardplan.doctor.findings import HostFinding, Level
from shardplan.doctor.subject import HostSubject
from shardplan.plan.mapping import mesh_text
from shardplan.runtime.deferred_packages import defer_unused_packages
from shardplan.runtime.environment import compute_on_cpu


def check(subject: HostSubject) -> Iterator[HostFinding]:
    """Read the Plan, and compare it with the configuration and with the model, which is built without weights."""
    config, plan = load_given_plan(subject.config)
    assert plan is not None
    compute_on_cpu()
    defer_unused_packages()
    from shardplan.search.given_plan import check_model
    from shardplan.search.make_plan import model_from_config

    check_model(plan, model_from_config(config))
    mesh = mesh_text(plan.mesh)
    yield HostFinding(Level.OK, f"{config.plan}: {plan.model.name} on {plan.hardware.slice}, mesh {mesh}")
