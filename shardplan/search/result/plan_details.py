"""Builds the `Details` of a Plan."""

from collections import defaultdict
from collections.abc import Sequence

from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.calibration import calibration_of
from shardplan.cost.memory import memory_by_part, point_bytes, stored_buffers
from shardplan.cost.roofline import exposed_parts, step_tasks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import Slice, place_mesh
from shardplan.plan.file.details import (
    AttentionCost,
    Details,
    EvaluatedCandidate,
    LiveArray,
    LivePoint,
    TimedTask,
    TimedTransfer,
)
from shardplan.program.live_buffers import LiveBuffer
from shardplan.program.named_arrays import TracedArray
from shardplan.program.tasks import Step
from shardplan.search.ranking import Candidate

MAX_ARRAYS = 12
"""Maximum number of listed arrays at the peak."""
MAX_CANDIDATES = 300
"""Maximum number of listed candidates."""


def plan_details(
    step: Step,
    assignment: ShardingAssignment,
    hardware: Slice,
    evaluated: Sequence[Candidate],
    attention: list[AttentionCost],
) -> Details:
    """Return the details of the plan of `assignment`.

    Args:
        evaluated: the candidates of its search, the fastest first.
        attention: see `shardplan.search.result.attention_costs`.
    """
    candidates = _evaluated_candidates(evaluated)
    return Details(
        live=_live_points(step, assignment),
        largest=_largest_at_peak(step, assignment),
        tasks=_timed_tasks(step, assignment, hardware),
        attention=attention,
        candidates=candidates,
        slower_candidates=len(evaluated) - len(candidates),
    )


def _evaluated_candidates(evaluated: Sequence[Candidate]) -> list[EvaluatedCandidate]:
    """Return the fastest candidates of a search, in the form in which a Plan lists them."""
    return [
        EvaluatedCandidate(
            mesh=list(each.mesh.values()),
            batch=list(each.compute.get(each.space.batch, ())),
            positions=list(each.compute.get(each.space.position, ())),
            stored=list(each.params.get(each.space.residual, ())),
            step_seconds=each.seconds,
            peak=round(each.peak_bytes),
        )
        for each in evaluated[:MAX_CANDIDATES]
    ]


def _live_points(step: Step, assignment: ShardingAssignment) -> list[LivePoint]:
    return [
        LivePoint(
            label.text, label.executions, {part.value: round(size) for part, size in parts.items() if round(size)}
        )
        for label, parts in zip(step.point_labels, memory_by_part(step, assignment), strict=True)
    ]


def _largest_at_peak(step: Step, assignment: ShardingAssignment) -> list[LiveArray]:
    """Return the largest arrays that are live at the peak; arrays with the same axes and role are one entry."""
    sizes: defaultdict[LiveBuffer, float] = defaultdict(float)
    counts: defaultdict[LiveBuffer, int] = defaultdict(int)
    peak = max(step.points, key=lambda point: point_bytes(point, assignment))
    # a point does not list what is live at all of them
    for buffer, count in (*((each, 1) for each in stored_buffers(step)), *peak):
        sizes[buffer] += count * buffer_bytes(buffer, assignment)
        counts[buffer] += count
    largest = sorted(sizes, key=lambda buffer: -sizes[buffer])[:MAX_ARRAYS]
    return [
        LiveArray(_array_text(buffer.array), buffer.role, round(sizes[buffer]), counts[buffer])
        for buffer in largest
        if sizes[buffer]  # zero for what the host has, and for what the compiler does not make
    ]


def _array_text(array: TracedArray) -> str:
    """Return the path of a parameter, or else the axes of an array with their sizes."""
    return array.weight or ", ".join(f"{name or 'unnamed'} {size}" for name, size in array.factors)


def _timed_tasks(step: Step, assignment: ShardingAssignment, hardware: Slice) -> list[TimedTask]:
    calibration, placement = calibration_of(step, hardware), place_mesh(hardware, assignment.mesh)
    return [
        TimedTask(
            label=task.label,
            kind=task.kind,
            executions=task.executions,
            compute_seconds=seconds.compute,
            flops=cost.matmul.flops * cost.unmasked_fraction,
            hbm_bytes=cost.memory_bytes,
            transfers=[
                TimedTransfer(
                    traffic.kind, list(traffic.mesh_axes), traffic.cause, round(traffic.bytes), total, exposed
                )
                for traffic, (total, exposed) in zip(
                    cost.traffic, exposed_parts(task, cost, placement, calibration, seconds.compute), strict=True
                )
            ],
        )
        for task, cost, seconds in step_tasks(step, assignment, hardware, calibration)
    ]
