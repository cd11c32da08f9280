"""Why a plan does not make a choice: the best plan that does, and what is worse about it; or what forbids it."""

from dataclasses import dataclass, replace

from shardplan.config import Config
from shardplan.errors import InfeasibleError
from shardplan.model import Model, inspect_model
from shardplan.plan.pins import Size, parse_pin
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import NO_KERNEL, make_plan

COMPUTE = "compute"
LEAST_PART = 0.005
"""Differences below this part of the step are not told."""


@dataclass(frozen=True)
class Why:
    """One choice that the plan does not make."""

    choice: str
    """As the user wrote it."""
    plan: Plan | None
    """The best plan that makes it; None where none fits."""
    obstacle: str
    """What forbids it, or speaks against it beside its time; empty where nothing does."""
    instead: list[str]
    """The user's pins that it takes the place of."""
    seconds: dict[str, float]
    """Cause -> how much longer a step takes for it, in seconds; what is hidden behind compute included. The largest."""


def why_not(choice: str, plan: Plan, config: Config, model: Model) -> Why:
    """Compare `plan`, the best one for `config`, with the best one that makes `choice`, a pin.

    Raises:
        ConfigError: the choice is none.
    """
    axes = inspect_model(model)
    rules = parse_pin(choice, axes)
    chosen = {rule.subject for rule in rules}
    instead = [pin for pin in config.pin if chosen & {rule.subject for rule in parse_pin(pin, axes)}]
    kept = [pin for pin in config.pin if pin not in instead]
    mesh = replace(config.mesh, **{rule.mesh_axis: None for rule in rules if isinstance(rule, Size)})
    try:
        other = make_plan(replace(config, pin=(*kept, choice), mesh=mesh), model)
    except InfeasibleError as error:
        return Why(choice, None, str(error), instead, {})
    before, after = _seconds(plan), _seconds(other)
    differences = {cause: after.get(cause, 0.0) - before.get(cause, 0.0) for cause in {**before, **after}}
    told = sorted(differences.items(), key=lambda item: -abs(item[1]))
    least = LEAST_PART * plan.cost.step_seconds
    obstacle = NO_KERNEL if NO_KERNEL in other.search.reasons and NO_KERNEL not in plan.search.reasons else ""
    return Why(choice, other, obstacle, instead, {cause: seconds for cause, seconds in told if abs(seconds) > least})


def _seconds(plan: Plan) -> dict[str, float]:
    """Seconds of a step by cause."""
    causes = {COMPUTE: plan.cost.compute_seconds}
    for collective in plan.cost.collectives:
        cause = f"{collective.kind}, {collective.cause}"
        causes[cause] = causes.get(cause, 0.0) + collective.seconds
    return causes
