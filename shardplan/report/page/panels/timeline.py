"""The step as a timeline: compute, collectives that it waits for, and collectives overlapped with compute."""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.plan.file.details import TimedTask
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import Judgement
from shardplan.report.page.labels import NO_DETAILS, kind_text, repeated_runs, short_cause, short_label, task_label
from shardplan.report.page.panels.memory import LoopRepeat
from shardplan.report.page.units import Tick, gib_text, linear_ticks, seconds_text

COMPUTE = "compute"
MOVING = ("lookup", "scatter-add", "reshard", "collective")
"""Kinds of tasks that move data within a device, which have one colour."""


@dataclass(frozen=True)
class Block:
    """A stretch of the timeline with one kind of work."""

    kind: str
    """Kind of the task or of the collective."""
    x: float
    width: float
    tip: str


@dataclass(frozen=True)
class TimelineCost:
    """Seconds of a step: the compute of one operation, or the collectives of one cause."""

    what: str
    kind: str
    """Kind of the task or of the collective."""
    is_transfer: bool
    mesh_axes: str
    bytes: int
    """Bytes that a device receives."""
    seconds: float
    exposed_seconds: float
    """The part of `seconds` that makes the step longer; for compute all of it."""
    part: float
    """Percent of the step that is exposed."""


@dataclass(frozen=True)
class CompiledBar:
    """The compiler's time of the step, on the axis of the timeline."""

    compute: float
    """Percent of the bar's width that is compute."""
    waiting: float
    tip: str


@dataclass(frozen=True)
class TimelinePanel:
    """The time of a step."""

    seconds: float
    ticks: list[Tick]
    core: list[Block]
    """Blocks of the device's own time: compute, and waiting for collectives."""
    links: list[Block]
    """Blocks of collectives that overlap with the compute above them."""
    repeats: list[LoopRepeat]
    compiled: CompiledBar | None
    key: list[tuple[str, str]]
    """(Kind of tasks or collectives, name of its colour)."""
    costs: list[TimelineCost]
    missing: str


def timeline_panel(plan: Plan, judgement: Judgement | None) -> TimelinePanel:
    """Lay out the time of a plan's step."""
    tasks = plan.details.tasks if plan.details is not None else []
    compiled = judgement.time if judgement else None
    length = max(plan.cost.step_seconds, compiled.step_seconds if compiled else 0.0)
    core, links = [], []
    starts = [0.0]
    for task in tasks:
        now = starts[-1]
        if task.compute_seconds:
            tip = f"{task_label(task)}: compute {seconds_text(task.compute_seconds)}{_times(task)}"
            core.append(_block(task.kind, now, task.compute_seconds, length, tip))
        start, now = now, now + task.compute_seconds  # its collectives overlap with its own compute, from the start on
        for transfer in task.transfers:
            overlapped = transfer.seconds - transfer.exposed_seconds
            about = f"{transfer.kind} over {' x '.join(transfer.mesh_axes)}, {short_cause(transfer.cause)}: "
            about += f"{gib_text(transfer.bytes)} received, {seconds_text(transfer.seconds)}"
            tip = f"{about}, of which exposed {seconds_text(transfer.exposed_seconds)}"
            if overlapped > 0:
                links.append(_block(transfer.kind, start, overlapped, length, tip))
                start += overlapped
            if transfer.exposed_seconds > 0:
                core.append(_block(transfer.kind, now, transfer.exposed_seconds, length, tip))
                now += transfer.exposed_seconds
        starts.append(now)
    return TimelinePanel(
        seconds=plan.cost.step_seconds,
        ticks=linear_ticks(length),
        core=core,
        links=links,
        repeats=[
            LoopRepeat.over(100 * starts[i] / length, 100 * starts[j + 1] / length, times)
            for i, j, times in repeated_runs([task.executions for task in tasks])
        ],
        compiled=None
        if compiled is None
        else CompiledBar(
            100 * compiled.compute_seconds / length,
            100 * (compiled.step_seconds - compiled.compute_seconds) / length,
            f"TPU compiler: {seconds_text(compiled.step_seconds)} a step, of which the core computes "
            f"{seconds_text(compiled.compute_seconds)}",
        ),
        key=_key(tasks, has_verdict=compiled is not None),
        costs=costs_of_step(plan),
        missing="" if tasks else NO_DETAILS,
    )


def costs_of_step(plan: Plan) -> list[TimelineCost]:
    """Return the costs of a step, the largest first; their exposed seconds add up to the step's.

    A Plan of an older version records how long its collectives take, but not how much of this time is exposed.
    """
    step = plan.cost.step_seconds
    tasks = plan.details.tasks if plan.details is not None else []
    costs = list(_task_costs(tasks, step)) if tasks else list(_summed_costs(plan, step))
    return sorted(costs, key=lambda cost: (-cost.exposed_seconds, -cost.seconds))


def _task_costs(tasks: list[TimedTask], step: float) -> Iterator[TimelineCost]:
    compute: defaultdict[tuple[str, str], float] = defaultdict(float)
    transfers: defaultdict[tuple[str, str, str], list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    for task in tasks:
        compute[short_label(task.label), task.kind] += task.compute_seconds
        for each in task.transfers:
            sums = transfers[short_cause(each.cause), each.kind, " x ".join(each.mesh_axes)]
            sums[0] += each.bytes
            sums[1] += each.seconds
            sums[2] += each.exposed_seconds
    for (what, kind), seconds in compute.items():
        if seconds:
            yield TimelineCost(what, kind, False, "", 0, seconds, seconds, 100 * seconds / step)
    for (what, kind, axes), (size, seconds, exposed) in transfers.items():
        yield TimelineCost(what, kind, True, axes, int(size), seconds, exposed, 100 * exposed / step)


def _summed_costs(plan: Plan, step: float) -> Iterator[TimelineCost]:
    """Yield all compute as one cost, all waiting as one cost, then collectives by cause, without exposed seconds."""
    computing = plan.cost.compute_seconds
    waiting = plan.cost.step_seconds - computing
    yield TimelineCost("all operations", COMPUTE, False, "", 0, computing, computing, 100 * computing / step)
    if waiting:
        yield TimelineCost("all causes", "collectives", True, "", 0, waiting, waiting, 100 * waiting / step)
    for each in plan.cost.collectives:
        yield TimelineCost(
            short_cause(each.cause), each.kind, True, " x ".join(each.mesh_axes), each.bytes, each.seconds, 0.0, 0.0
        )


def _key(tasks: list[TimedTask], has_verdict: bool) -> list[tuple[str, str]]:
    kinds = dict.fromkeys(task.kind for task in tasks if task.compute_seconds)
    moving = [kind for kind in kinds if kind in MOVING]
    key = [(kind, kind_text(kind)) for kind in kinds if kind not in MOVING]
    key += [(moving[0], ", ".join(moving))] if moving else []  # they have one colour
    key += [(kind, kind) for kind in dict.fromkeys(each.kind for task in tasks for each in task.transfers)]
    return [*key, ("waiting", "the compiler's waiting")] if has_verdict else key


def _block(kind: str, start: float, seconds: float, length: float, tip: str) -> Block:
    return Block(kind, 100 * start / length, 100 * seconds / length, tip)


def _times(task: TimedTask) -> str:
    return f" in {task.executions:,} executions" if task.executions > 1 else ""
