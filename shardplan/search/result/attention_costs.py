"""The kinds of attention in a model: the layers and the cost of each."""

from collections import Counter, defaultdict
from collections.abc import Sequence

from shardplan.cost.attention import kind_of
from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.calibration import calibration_of
from shardplan.cost.roofline import model_flops_by_kind, step_tasks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import Slice
from shardplan.model.registry import Model
from shardplan.plan.file.details import AttentionCost
from shardplan.plan.workload.workload import Workload
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.named_arrays import is_scores
from shardplan.program.step_trace import forward_workload, plan_step
from shardplan.program.tasks import Step, Task, TaskKind


def attention_costs(
    model: Model, workload: Workload, step: Step, assignment: ShardingAssignment, hardware: Slice
) -> list[AttentionCost]:
    """Return the kinds of attention in `step` with their layers and costs, the kind with the most work first.

    Args:
        step: the step of the workload.
    """
    compute, exposed, received = (defaultdict[AttentionKind, float](float) for _ in range(3))
    tasks: defaultdict[AttentionKind, list[Task]] = defaultdict(list)
    for task, cost, seconds in step_tasks(step, assignment, hardware, calibration_of(step, hardware)):
        if task.kind == TaskKind.ATTENTION:
            kind = kind_of(task)
            tasks[kind].append(task)
            compute[kind] += seconds.compute
            exposed[kind] += seconds.exposed
            received[kind] += sum(traffic.bytes for traffic in cost.traffic)
    # of the forward pass of one batch: the loop over microbatches of a training step has each layer several times
    calls = plan_step(model, forward_workload(workload)).attention_calls
    # then the number of a call is that of its layer
    are_layers = len(calls) == getattr(model.config, "num_layers", None)
    numbers = {kind: [i for i, call in enumerate(calls) if call == kind] for kind in step.attention_kinds}
    flops, extra = model_flops_by_kind(model, workload), _extra_bytes(step, assignment)
    return [
        AttentionCost(
            kind=kind.name,
            layers=len(numbers[kind]),
            layer_numbers=numbers[kind] if are_layers else [],
            compute_seconds=compute[kind],
            exposed_seconds=exposed[kind],
            model_flops=flops.get(kind, 0.0),
            received_bytes=round(received[kind]),
            live_bytes=round(_local_bytes(tasks[kind], assignment) + extra[kind]),
        )
        for kind in step.attention_kinds
    ]


def _local_bytes(tasks: Sequence[Task], assignment: ShardingAssignment) -> float:
    """Return the bytes that a layer of one kind reads and writes for a device's own positions, in the larger pass.

    In the forward pass these are queries, keys, values and the output; in the backward pass their gradients too. Scores
    are left out: a kernel has few of them in memory at a time.
    """
    sizes, calls = defaultdict[bool, float](float), Counter[bool]()
    for task in tasks:
        if is_scores(task.results[0]):  # a call has one such matmul in each pass
            calls[task.is_backward] += task.executions
        for array in (*task.operands, *task.results):
            if not is_scores(array):
                sizes[task.is_backward] += task.executions * assignment.bytes(array, assignment.compute)
    return max((sizes[is_backward] / count for is_backward, count in calls.items()), default=0.0)


def _extra_bytes(step: Step, assignment: ShardingAssignment) -> defaultdict[AttentionKind, float]:
    """Return kind of attention -> the most bytes that a device has at once for positions of other devices."""
    most: defaultdict[AttentionKind, float] = defaultdict(float)
    for point in step.points:
        here: defaultdict[AttentionKind, float] = defaultdict(float)
        for buffer, count in point:
            if buffer.attention is not None:
                here[buffer.attention] += count * buffer_bytes(buffer, assignment)
        for kind, size in here.items():
            most[kind] = max(most[kind], size)
    return most
