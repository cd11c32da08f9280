"""The differences between two Plans, apart from the searches and versions that made them. Pure."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.plan.file.parameters import ParameterPlan, Spec
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import flatten

SETTINGS = ("model", "workload", "hardware", "compiler_options", "attention")


@dataclass(frozen=True)
class Change:
    """A value that differs between two plans; None for a plan that does not have it."""

    name: str
    before: Any
    after: Any


@dataclass(frozen=True)
class SpecChange:
    """Parameters whose PartitionSpec changed in the same way."""

    axes: list[str]
    """Logical axes of the parameters."""
    before: Spec | None
    """Mesh axes of each dimension before the change; None if the first plan has no such parameter."""
    after: Spec | None
    bytes_before: int
    """Bytes per device of all these parameters together, before the change."""
    bytes_after: int
    parameters: list[str]


@dataclass(frozen=True)
class PlanDiff:
    """The differences between two plans, by part; the list of a part without differences is empty."""

    settings: list[Change]
    """Changed settings of the model, the workload, the slice, compiler options and attention."""
    mesh: list[Change]
    """Changed sizes, by mesh axis."""
    compute_mapping: list[Change]
    """Changed mesh axes, by logical axis."""
    param_mapping: list[Change]
    parameters: list[SpecChange]
    memory: list[Change]
    """Changed bytes per device, by part."""
    cost: list[Change]
    """Changed seconds of a step, and of its compute."""
    collectives: list[Change]
    """Changed seconds of a step, by kind and cause of collective; the largest change first."""

    def __bool__(self) -> bool:
        return any(vars(self).values())

    def to_json(self) -> dict[str, Any]:
        """Return the differences as JSON values."""
        return dataclasses.asdict(self)


def diff_plans(before: Plan, after: Plan) -> PlanDiff:
    """Compare two plans.

    >>> from shardplan.plan.file.sections import CostPlan, HardwareInfo, MemoryPlan, ModelInfo, SearchInfo
    >>> from shardplan.plan.workload.workload import Workload
    >>> model, hardware = ModelInfo("gpt2", "gpt2", {"embed": 768}, 124_000_000), HardwareInfo("v5e-8", 8, 16.0)
    >>> memory, cost, search = MemoryPlan(*[0] * 10), CostPlan(0.5, 0.4, []), SearchInfo(1, True, 0.1, None, {}, [])
    >>> before = Plan(model, Workload(), hardware, {"data": 8, "model": 1}, {}, {}, [], memory, cost, search, {})
    >>> diff_plans(before, dataclasses.replace(before, mesh={"data": 4, "model": 2})).mesh
    [Change(name='data', before=8, after=4), Change(name='model', before=1, after=2)]
    """
    return PlanDiff(
        settings=_changes(_settings(before), _settings(after)),
        mesh=_changes(before.mesh, after.mesh),
        compute_mapping=_changes(before.compute_mapping, after.compute_mapping),
        param_mapping=_changes(before.param_mapping, after.param_mapping),
        parameters=_specs(before.parameters, after.parameters),
        memory=_changes(vars(before.memory), vars(after.memory)),
        cost=_changes(_seconds(before), _seconds(after)),
        collectives=sorted(
            _changes(_collectives(before), _collectives(after)),
            key=lambda change: -abs((change.after or 0.0) - (change.before or 0.0)),
        ),
    )


def _settings(plan: Plan) -> dict[str, Any]:
    values = plan.to_json()
    return flatten({name: values[name] for name in SETTINGS})


def _seconds(plan: Plan) -> dict[str, float]:
    return {"step": plan.cost.step_seconds, "compute": plan.cost.compute_seconds}


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Change]:
    names = dict.fromkeys((*before, *after))
    return [Change(n, before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)]


def _specs(before: list[ParameterPlan], after: list[ParameterPlan]) -> list[SpecChange]:
    """Return the parameters whose specs differ or that only one plan has, grouped by axes and specs, largest first."""
    old, new = ({parameter.path: parameter for parameter in parameters} for parameters in (before, after))
    groups: dict[str, SpecChange] = {}
    for path in dict.fromkeys((*old, *new)):
        a, b = old.get(path), new.get(path)
        axes = list((a or new[path]).axes)
        spec_before, spec_after = a.spec if a else None, b.spec if b else None
        if spec_before == spec_after:
            continue
        group = groups.setdefault(
            str((axes, spec_before, spec_after)), SpecChange(axes, spec_before, spec_after, 0, 0, [])
        )
        groups[str((axes, spec_before, spec_after))] = dataclasses.replace(
            group,
            bytes_before=group.bytes_before + (a.bytes_per_device if a else 0),
            bytes_after=group.bytes_after + (b.bytes_per_device if b else 0),
            parameters=[*group.parameters, path],
        )
    return sorted(groups.values(), key=lambda change: -max(change.bytes_before, change.bytes_after))


def _collectives(plan: Plan) -> dict[str, float]:
    seconds: dict[str, float] = defaultdict(float)
    for collective in plan.cost.collectives:
        seconds[f"{collective.kind}, {collective.cause}"] += collective.seconds
    return dict(seconds)
