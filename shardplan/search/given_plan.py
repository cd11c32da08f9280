"""Plans that are given, not searched for: a Plan file, or a mesh and mappings."""

from dataclasses import replace
from typing import TypeVar

from shardplan.config import PlanConfig
from shardplan.config.keys import keys_of
from shardplan.config.sections import HardwareConfig, MeshConfig
from shardplan.cost.calibration import compiler_quirks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import parse_slice
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.mapping import MeshShape, as_tuples
from shardplan.plan.plan import Mapping, Plan, SearchInfo
from shardplan.plan.workload import BATCH_AXIS
from shardplan.program.step_trace import plan_step
from shardplan.search.assignment_to_plan import build_plan, estimate_cost
from shardplan.search.reasons import GIVEN, describe_trace, describe_unknown_axis

OPEN_VALUES = (None, "auto")
"""Values of configuration keys that leave the choice to the planner."""
C = TypeVar("C", bound=PlanConfig)


def plan_given_mappings(
    config: PlanConfig,
    model: Model,
    mesh: MeshShape,
    compute: Mapping,
    params: Mapping,
    attention: AttentionPlan | None = None,
) -> Plan:
    """Return the Plan of a given mesh and mappings: nothing is searched, nothing is refused.

    Logical axes that the model does not have shard nothing; `search.reasons` names them.

    Args:
        attention: the method of attention; Levanter's own if it is left out.
    """
    hardware, axes = parse_slice(config.hardware.slice), inspect_model(model)
    step = plan_step(model, config.workload.resolve())
    assignment = ShardingAssignment(
        mesh, as_tuples(compute), as_tuples(params), step.merged_axes, step.activation_axes, compiler_quirks(hardware),
        attention or AttentionPlan(), step.pattern,
    )  # fmt: skip
    known = {*axes.axes, axes.position, BATCH_AXIS}
    unknown = [describe_unknown_axis(axis, known) for axis in sorted({*compute, *params} - known)]
    info = SearchInfo(
        candidates=1,
        proven_optimal=False,
        seconds=0.0,
        runner_up=None,
        rejected={},
        reasons=[GIVEN, *unknown, *describe_trace(step)],
        given=True,
    )
    return build_plan(config, model, step, assignment, estimate_cost(step, assignment, hardware).plan, info)


def load_given_plan(config: C) -> tuple[C, Plan | None]:
    """Load the Plan file that the configuration names, if it names one.

    Returns:
        The configuration, with the model, slice, mesh and workload of the Plan; and the Plan.

    Raises:
        ConfigError: the file cannot be read or is not a plan, or contradicts the configuration.
    """
    if config.plan is None:
        return config, None
    for name in ("pin", "forbid"):
        if getattr(config, name):
            raise ConfigError(f"{name} is for planning, and plan {config.plan} is given; leave one of the two out")
    plan, keys = Plan.load(config.plan), keys_of(PlanConfig)
    planned = {
        **{f"workload.{key}": value for key, value in vars(plan.workload).items()},
        **{f"mesh.{key}": value for key, value in plan.mesh.items()},
        "hardware.slice": plan.hardware.slice,
    }
    for name, value in planned.items():
        section, _, key = name.partition(".")
        configured = getattr(getattr(config, section), key)
        is_set = configured not in OPEN_VALUES and (name in config.given or configured != keys[name].default)
        if is_set and configured != value:
            raise ConfigError(f"{name} is {configured}, plan {config.plan} has {value}; leave it out, or plan again")
    return (
        replace(
            config,
            model=replace(
                config.model, ref=config.model.ref or plan.model.ref, config=config.model.config or plan.model.config
            ),
            hardware=HardwareConfig(plan.hardware.slice),
            mesh=MeshConfig(**plan.mesh),
            workload=plan.workload,
        ),
        plan,
    )


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
