"""Makes plans of given mesh and mappings, and checks whether a given plan is for the model at hand."""

from dataclasses import replace

from shardplan.config import PlanConfig
from shardplan.cost.calibration import compiler_quirks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.experts.method import ExpertMethod
from shardplan.hardware import parse_slice
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.file.sections import SearchInfo
from shardplan.plan.mapping import MeshShape, as_tuples
from shardplan.plan.plan import Mapping, Plan
from shardplan.plan.workload.workload import BATCH_AXIS
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import Step
from shardplan.search.reasons import CAVEATS, GIVEN, caveats_of, describe_trace, describe_unknown_axis
from shardplan.search.result.assignment_to_plan import build_plan, estimate_cost
from shardplan.search.result.attention_costs import attention_costs
from shardplan.search.result.plan_details import plan_details


def plan_given_mappings(
    config: PlanConfig,
    model: Model,
    mesh: MeshShape,
    compute: Mapping,
    params: Mapping,
    attention: AttentionPlan | None = None,
    experts: ExpertMethod | None = None,
) -> Plan:
    """Return the Plan of a given mesh and mappings, without a search, and even if it does not fit.

    Logical axes that the model does not have shard nothing; `search.reasons` names them.

    Args:
        attention: the method of attention; Levanter's own if it is left out.
        experts: the method of routed experts; tokens are gathered if it is left out.
    """
    hardware, axes = parse_slice(config.hardware.slice), inspect_model(model)
    step = plan_step(model, config.workload.resolve())
    assignment = ShardingAssignment(
        mesh, as_tuples(compute), as_tuples(params), step.merged_axes, step.activation_axes, compiler_quirks(hardware),
        attention or AttentionPlan(), experts or ExpertMethod(),
    )  # fmt: skip
    known = {*axes.axes, axes.position, BATCH_AXIS}
    unknown = [describe_unknown_axis(axis, known) for axis in sorted({*compute, *params} - known)]
    caveats = caveats_of(assignment)
    info = SearchInfo(
        candidates=1,
        proven_optimal=False,
        seconds=0.0,
        runner_up=None,
        rejected={},
        reasons=[GIVEN, *unknown, *(CAVEATS[caveat] for caveat in caveats), *describe_trace(step)],
        caveats=caveats,
        given=True,
    )
    return build_plan(config, model, step, assignment, estimate_cost(step, assignment, hardware).plan, info)


def with_details(plan: Plan, model: Model) -> Plan:
    """Return a plan of given mappings with details for reports, which `plan_given_mappings` omits."""
    hardware, workload = parse_slice(plan.hardware.slice), plan.workload.resolve()
    step = plan_step(model, workload)
    assignment = assignment_of(plan, step)
    attention = attention_costs(model, workload, step, assignment, hardware)
    return replace(plan, details=plan_details(step, assignment, hardware, [], attention))


def assignment_of(plan: Plan, step: Step) -> ShardingAssignment:
    """Return the sharding of every array of a step under a plan."""
    return ShardingAssignment(
        plan.mesh, as_tuples(plan.compute_mapping), as_tuples(plan.param_mapping), step.merged_axes,
        step.activation_axes, compiler_quirks(parse_slice(plan.hardware.slice)), plan.attention,
        plan.experts or ExpertMethod(),
    )  # fmt: skip


def check_model(plan: Plan, model: Model) -> None:
    """Check that `plan` is for a model with the logical axes of `model`.

    Raises:
        ConfigError: the size of a logical axis differs.
    """
    axes = inspect_model(model).axes
    differing = [axis for axis in {**plan.model.axes, **axes} if plan.model.axes.get(axis) != axes.get(axis)]
    if differing:
        axis = differing[0]
        raise ConfigError(
            f"the plan is for {plan.model.name} with {axis} {plan.model.axes.get(axis)}, the model has "
            f"{axes.get(axis)}; plan again"
        )
