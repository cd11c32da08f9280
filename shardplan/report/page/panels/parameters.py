"""Every parameter with its PartitionSpec."""

import math
from dataclasses import dataclass

from shardplan.plan.mapping import axes_text, shard_count
from shardplan.plan.plan import Plan
from shardplan.report.page.labels import STACKED
from shardplan.report.plan.tables import spec_text


@dataclass(frozen=True)
class ParameterRow:
    """One parameter."""

    stack: str
    """What its path begins with: the stack of layers that it belongs to, if any."""
    name: str
    """The rest of its path."""
    axes: str
    elements: int
    spec: str
    shards: int
    bytes_per_device: int


def parameter_rows(plan: Plan) -> list[ParameterRow]:
    """The parameters of a plan, in the order of the model."""
    return [
        ParameterRow(
            stack="".join(each.path.rpartition(STACKED)[:2]),
            name=each.path.rpartition(STACKED)[2],
            axes=axes_text(each.axes),
            elements=math.prod(each.axes.values()),
            spec=spec_text(each.spec),
            shards=shard_count(plan.mesh, each.spec),
            bytes_per_device=each.bytes_per_device,
        )
        for each in plan.parameters
    ]
