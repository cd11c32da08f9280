"""Every parameter with its PartitionSpec."""

import math
from dataclasses import dataclass

from shardplan.plan.mapping import axes_text, shard_count
from shardplan.plan.plan import Plan
from shardplan.report.page.labels import STACKED
from shardplan.report.plan.parameter_groups import group_parameters
from shardplan.report.plan.tables import spec_text


@dataclass(frozen=True)
class ParameterRow:
    """A row of the table: one parameter, or several equal ones."""

    stack: str
    """Beginning of the path: the stack of layers that the parameter belongs to; empty without one."""
    name: str
    """Remainder of the path."""
    count: int
    """Number of parameters in the row."""
    axes: str
    elements: int
    """Elements of all parameters in the row."""
    spec: str
    shards: int
    bytes_per_device: int
    """Bytes per device of all parameters in the row."""


def parameter_rows(plan: Plan) -> list[ParameterRow]:
    """Return the rows of a plan's parameters, in the order of the model."""
    return [
        ParameterRow(
            stack="".join(group.path.rpartition(STACKED)[:2]),
            name=group.path.rpartition(STACKED)[2],
            count=len(group.parameters),
            axes=axes_text(group.first.axes),
            elements=len(group.parameters) * math.prod(group.first.axes.values()),
            spec=spec_text(group.first.spec),
            shards=shard_count(plan.mesh, group.first.spec),
            bytes_per_device=group.bytes_per_device,
        )
        for group in group_parameters(plan.parameters)
    ]
