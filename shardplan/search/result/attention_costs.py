"""The kinds of attention in a model: which layers have each, and what a step spends on it."""

from collections import defaultdict

from shardplan.cost.attention import kind_of
from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.calibration import load_calibration
from shardplan.cost.roofline import model_flops_by_kind, step_tasks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import Slice
from shardplan.model.registry import Model
from shardplan.plan.details import AttentionCost
from shardplan.plan.workload.workload import Workload
from shardplan.program.attention_kind import AttentionKind
from shardplan.program.step_trace import forward_workload, plan_step
from shardplan.program.tasks import Step, TaskKind


def attention_costs(
    model: Model, workload: Workload, step: Step, assignment: ShardingAssignment, hardware: Slice
) -> list[AttentionCost]:
    """The kinds of attention in `step`, the one with most work first, with their layers and costs.

    Args:
        step: of the workload.
    """
    compute, exposed, received = (defaultdict[AttentionKind, float](float) for _ in range(3))
    for task, cost, seconds in step_tasks(step, assignment, hardware, load_calibration(hardware.generation.name)):
        if task.kind == TaskKind.ATTENTION:
            kind = kind_of(task)
            compute[kind] += seconds.compute
            exposed[kind] += seconds.exposed
            received[kind] += sum(traffic.bytes for traffic in cost.traffic)
    calls = plan_step(model, forward_workload(workload)).attention_calls
    # then the number of a call is that of its layer
    are_layers = len(calls) == getattr(model.config, "num_layers", None)
    numbers = {kind: [i for i, call in enumerate(calls) if call == kind] for kind in step.attention_kinds}
    flops, live = model_flops_by_kind(model, workload), _live_bytes(step, assignment)
    return [
        AttentionCost(
            kind=kind.name,
            layers=len(numbers[kind]),
            layer_numbers=numbers[kind] if are_layers else [],
            compute_seconds=compute[kind],
            exposed_seconds=exposed[kind],
            model_flops=flops.get(kind, 0.0),
            received_bytes=round(received[kind]),
            live_bytes=round(live[kind]),
        )
        for kind in step.attention_kinds
    ]


def _live_bytes(step: Step, assignment: ShardingAssignment) -> defaultdict[AttentionKind, float]:
    """Return kind -> most bytes of its buffers that are live at one point."""
    most: defaultdict[AttentionKind, float] = defaultdict(float)
    for point in step.points:
        here: defaultdict[AttentionKind, float] = defaultdict(float)
        for buffer, count in point:
            if buffer.attention is not None:
                here[buffer.attention] += count * buffer_bytes(buffer, assignment)
        for kind, size in here.items():
            most[kind] = max(most[kind], size)
    return most
