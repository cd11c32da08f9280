"""Explains why a plan does not make a choice: the cost of the best plan with the choice, or the obstacle to it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from shardplan.config import PlanConfig
from shardplan.config.arguments import check_config
from shardplan.config.sections import MeshConfig
from shardplan.errors import InfeasibleError, check_argument
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model
from shardplan.plan.arguments import check_plan
from shardplan.plan.displayed import Displayed
from shardplan.plan.pins import MeshSize, parse_pin
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import make_plan, model_from_config
from shardplan.search.reasons import CAVEATS

COMPUTE = "compute"
COMPUTE_OUTSIDE_ATTENTION = "compute, outside of attention"
MIN_PART = 0.005
"""Fraction of a step's time below which a difference is left out."""


@dataclass(frozen=True)
class WhyNot(Displayed):
    """A choice that a plan does not make, and the consequences of making it."""

    choice: str
    """The choice as the user wrote it."""
    original: Plan
    """The plan that does not make the choice."""
    plan: Plan | None
    """The best plan that makes the choice; None if none fits."""
    obstacle: str
    """Obstacle to the choice, or argument against it other than time; empty if there is none."""
    replaced_pins: list[str]
    """The user's pins that the choice replaces."""
    seconds: dict[str, float]
    """Cause -> seconds that it adds to a step, overlapped time included; largest differences first."""


def why_not(choice: str, plan: Plan, config: PlanConfig, model: Model | None = None) -> WhyNot:
    """Compare `plan`, the best for `config`, with the best plan that makes `choice`, written like a pin.

    Args:
        model: the model, if it has been built already.

    Raises:
        ConfigError: `choice` is not a pin.
    """
    check_argument("why_not", "choice", choice, str, "a choice written like a pin, such as 'mlp=model'")
    check_plan("why_not", plan)
    check_config("why_not", config)
    model = model or model_from_config(config)
    axes = inspect_model(model)
    rules = parse_pin(choice, axes, "why")
    subjects = {rule.subject for rule in rules}
    replaced = [pin for pin in config.pin if subjects & {rule.subject for rule in parse_pin(pin, axes)}]
    kept = [pin for pin in config.pin if pin not in replaced]
    opened = {rule.mesh_axis: None for rule in rules if isinstance(rule, MeshSize)}
    mesh = MeshConfig(**{**vars(config.mesh), **opened})
    try:
        other = make_plan(replace(config, pin=(*kept, choice), mesh=mesh), model)
    except InfeasibleError as error:
        return WhyNot(choice, plan, None, str(error), replaced, {})
    attention = _compute_of_attention(plan), _compute_of_attention(other)
    if not all(attention):  # compare what both have
        attention = {}, {}
    before, after = _seconds_by_cause(plan, attention[0]), _seconds_by_cause(other, attention[1])
    differences = {cause: after.get(cause, 0.0) - before.get(cause, 0.0) for cause in {**before, **after}}
    by_size = sorted(differences.items(), key=lambda item: -abs(item[1]))
    minimum = MIN_PART * plan.cost.step_seconds
    new_caveats = [caveat for caveat in other.search.caveats if caveat not in plan.search.caveats]
    obstacle = "; ".join(CAVEATS[caveat] for caveat in new_caveats)
    return WhyNot(
        choice, plan, other, obstacle, replaced, {cause: value for cause, value in by_size if abs(value) > minimum}
    )


def _compute_of_attention(plan: Plan) -> dict[str, float]:
    """Return kind of attention -> seconds of compute; empty if there is one kind, or if the plan has no details."""
    attention = plan.details.attention if plan.details is not None else []
    return {each.kind: each.compute_seconds for each in attention} if len(attention) > 1 else {}


def _seconds_by_cause(plan: Plan, attention: Mapping[str, float]) -> dict[str, float]:
    """Return cause -> seconds of a step, for compute and for every kind and cause of collectives.

    Args:
        attention: kind of attention -> its seconds of compute, if kinds are listed as separate causes.
    """
    compute = plan.cost.compute_seconds - sum(attention.values())
    causes = {COMPUTE_OUTSIDE_ATTENTION if attention else COMPUTE: compute}
    causes |= {f"{COMPUTE}, attention of {kind}": seconds for kind, seconds in attention.items()}
    for collective in plan.cost.collectives:
        cause = f"{collective.kind}, {collective.cause}"
        causes[cause] = causes.get(cause, 0.0) + collective.seconds
    return causes
