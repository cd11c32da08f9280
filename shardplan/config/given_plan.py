"""The Plan file that a configuration names, and the settings that the Plan determines. Imports no JAX."""

from dataclasses import replace

from shardplan.config.keys import keys_of
from shardplan.config.plan_config import PlanConfig
from shardplan.config.sections import HardwareConfig, MeshConfig
from shardplan.errors import ConfigError
from shardplan.model.model_class import resolve_class
from shardplan.plan.plan import Plan
from shardplan.plan.workload.workload import AUTO_BATCH, AUTO_POSITION

OPEN_VALUES = (None, "auto")
"""Values of configuration keys that leave the choice to the planner."""
AUTO_VALUES = {("workload.batch", AUTO_BATCH), ("workload.position", AUTO_POSITION)}
"""(Key, value) pairs in which the value also leaves the choice to the planner."""


def load_given_plan[C: PlanConfig](config: C) -> tuple[C, Plan | None]:
    """Load the Plan file that the configuration names, if it names one.

    Returns:
        The configuration with the Plan's model, slice, mesh and workload, and the Plan.

    Raises:
        ConfigError: the file cannot be read or is not a plan, or contradicts the configuration.
    """
    if config.plan is None:
        return config, None
    for name in ("pin", "forbid", "step_tokens"):
        if getattr(config, name):
            raise ConfigError(f"{name} is for planning, and plan {config.plan} is given; leave one of the two out")
    if config.hardware.host_gib is not None:
        raise ConfigError(
            f"hardware.host_gib is for planning, and plan {config.plan} is given; leave one of the two out"
        )
    plan, keys = Plan.load(config.plan), keys_of(PlanConfig)
    planned = {
        **{f"workload.{key}": value for key, value in vars(plan.workload).items()},
        **{f"mesh.{key}": value for key, value in plan.mesh.items()},
        "hardware.slice": plan.hardware.slice,
    }
    for name, value in planned.items():
        section, _, key = name.partition(".")
        configured = getattr(getattr(config, section), key)
        is_open = configured in OPEN_VALUES or (name, configured) in AUTO_VALUES
        own_default = config.workload.kind_row.param_dtype
        default = keys[name].default if name != "workload.param_dtype" else own_default
        is_set = not is_open and (name in config.given or configured != default)
        if is_set and configured != value:
            raise ConfigError(f"{name} is {configured}, plan {config.plan} has {value}; leave it out, or plan again")
    own_class, kind = config.model.levanter_class, plan.model.type
    planned_class = resolve_class(plan.model.class_name, kind)
    if own_class is not None and resolve_class(own_class, kind) != planned_class:
        raise ConfigError(
            f"model.levanter_class is {own_class}, plan {config.plan} has {planned_class}; leave it out, or plan again"
        )
    keeps_dtype = plan.model.kept_dtype is not None
    if config.load.keep_dtype != keeps_dtype and (config.load.keep_dtype or "load.keep_dtype" in config.given):
        stored = plan.model.kept_dtype or plan.workload.param_dtype
        raise ConfigError(
            f"load.keep_dtype is {str(config.load.keep_dtype).lower()}, and plan {config.plan} has weights in "
            f"{stored}; leave it out, or plan again"
        )
    return (
        replace(
            config,
            load=replace(config.load, keep_dtype=keeps_dtype),
            model=replace(
                config.model,
                ref=config.model.ref or plan.model.ref,
                adapter=config.model.adapter or plan.model.adapter,
                config=config.model.config or plan.model.config,
                levanter_class=config.model.levanter_class or plan.model.class_name,
            ),
            hardware=HardwareConfig(plan.hardware.slice),
            mesh=MeshConfig(**plan.mesh),
            workload=plan.workload,
        ),
        plan,
    )
