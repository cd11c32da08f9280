"""Other candidates: the time and memory of everything that was weighed, and of layouts that were compiled beside."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.hardware import GIB
from shardplan.plan.details import WeighedCandidate
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import Judgement
from shardplan.report.page.units import LogAxis, Tick, gib_text, linear_ticks, seconds_text
from shardplan.report.summary import percent_text
from shardplan.verify.verdict import Outcome

PLAN, RUNNER_UP, WEIGHED, OTHER = "plan", "runner-up", "weighed", "other"
HEADROOM = 1.08
"""Factor of free space around the points."""


@dataclass(frozen=True)
class Point:
    """One candidate on the chart."""

    kind: str
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class Layout:
    """A row of the table: one layout, and why it is not the plan."""

    name: str
    mesh: str
    seconds: float | None
    """Of a step, estimated; None for a verdict of an older version."""
    peak: int | None
    """Bytes per device, estimated."""
    compiled_seconds: float | None
    compiled_peak: int | None
    why_not: str


@dataclass(frozen=True)
class CandidatesPanel:
    """Candidates by time and memory."""

    points: list[Point]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    limit: float
    """Percent of the height at which the usable memory is."""
    limit_text: str
    layouts: list[Layout]
    is_compiled: bool
    """Whether any layout was compiled."""
    has_others: bool
    """Whether layouts of others are on the chart."""
    rejected: list[tuple[str, int]]
    slower: int
    missing: str


def candidates_panel(plan: Plan, judgements: Sequence[Judgement]) -> CandidatesPanel:
    """Place all candidates of a plan's search, and the plans of all verdicts."""
    weighed = plan.details.candidates if plan.details is not None else []
    others = [each for each in judgements if not each.is_of(plan)]
    own = next((each for each in judgements if each.is_of(plan)), None)
    drawn = [each.estimate for each in others if each.estimate and each.estimate.tokens == plan.workload.tokens]
    seconds = [plan.cost.step_seconds, *(c.step_seconds for c in weighed), *(e.step_seconds for e in drawn)]
    x_axis = LogAxis(min(seconds) / HEADROOM, max(seconds) * HEADROOM)
    top = HEADROOM * max([plan.memory.peak, plan.memory.usable, *(c.peak for c in weighed), *(e.peak for e in drawn)])

    def point(kind: str, seconds: float, peak: int, name: str) -> Point:
        tip = f"{name}: {seconds_text(seconds)} a step, {gib_text(peak)}"
        return Point(kind, x_axis.at(seconds), 100 - 100 * peak / top, tip)

    points = [
        point(_kind(plan, each), each.step_seconds, each.peak, _candidate_text(plan, each))
        for each in weighed
        if not _is_plan(plan, each)
    ]
    points += [
        point(OTHER, each.estimate.step_seconds, each.estimate.peak, each.label)
        for each in others
        if each.estimate and each.estimate.tokens == plan.workload.tokens
    ]
    points.sort(key=lambda each: each.kind == RUNNER_UP)  # drawn over those at the same place
    points.append(point(PLAN, plan.cost.step_seconds, plan.memory.peak, "this plan"))
    return CandidatesPanel(
        points=points,
        x_ticks=x_axis.ticks(),
        y_ticks=linear_ticks(top / GIB),
        limit=100 - 100 * plan.memory.usable / top,
        limit_text=f"usable memory, {gib_text(plan.memory.usable)}",
        layouts=[
            _plan_layout(plan, own),
            *_runner_up_layout(plan, weighed),
            *(_layout(plan, own, each) for each in others),
        ],
        is_compiled=bool(judgements),
        has_others=bool(drawn),
        rejected=[(reason, count) for reason, count in plan.search.rejected.items() if count],
        slower=plan.details.slower_candidates if plan.details is not None else 0,
        missing=_missing(plan, weighed),
    )


def _missing(plan: Plan, weighed: list[WeighedCandidate]) -> str:
    if weighed:
        return ""
    if plan.search.given:
        return "The mesh and the mappings were given: nothing was searched."
    if plan.details is None:
        return (
            "This Plan was written by an older version: it does not list the candidates that were weighed. Plan again."
        )
    return "No candidate fits."


def _is_plan(plan: Plan, candidate: WeighedCandidate) -> bool:
    is_mesh = candidate.mesh == list(plan.mesh.values())
    same = math.isclose(candidate.step_seconds, plan.cost.step_seconds) and abs(candidate.peak - plan.memory.peak) <= 1
    return is_mesh and same


def _kind(plan: Plan, candidate: WeighedCandidate) -> str:
    other = plan.search.runner_up
    is_runner_up = (
        other is not None
        and candidate.mesh == list(other.mesh.values())
        and math.isclose(candidate.step_seconds, other.step_seconds)
    )
    return RUNNER_UP if is_runner_up else WEIGHED


def _candidate_text(plan: Plan, candidate: WeighedCandidate) -> str:
    """The mesh of a candidate, and what its main axes are sharded over."""
    mesh = mesh_text(dict(zip(plan.mesh, candidate.mesh, strict=True)))
    parts = {"batch": candidate.batch, "positions": candidate.positions, "stored": candidate.stored}
    return f"{mesh}; " + ", ".join(f"{name} over {' x '.join(axes) or 'nothing'}" for name, axes in parts.items())


def _plan_layout(plan: Plan, own: Judgement | None) -> Layout:
    return Layout(
        "this plan", mesh_text(plan.mesh), plan.cost.step_seconds, plan.memory.peak,
        own.time.step_seconds if own and own.time else None, own.memory.peak if own and own.memory else None,
        own.outcome if own and own.outcome != Outcome.FITS else "",
    )  # fmt: skip


def _runner_up_layout(plan: Plan, weighed: list[WeighedCandidate]) -> list[Layout]:
    other = plan.search.runner_up
    if other is None:
        return []
    peaks = [each.peak for each in weighed if _kind(plan, each) == RUNNER_UP]
    slower = percent_text(other.step_seconds / plan.cost.step_seconds - 1) if plan.cost.step_seconds else "same"
    why = f"{slower} time a step"
    if peaks and peaks[0] != plan.memory.peak:
        why += f", {gib_text(abs(peaks[0] - plan.memory.peak))} {'more' if peaks[0] > plan.memory.peak else 'less'}"
    return [
        Layout("runner-up", mesh_text(other.mesh), other.step_seconds, peaks[0] if peaks else None, None, None, why)
    ]


def _layout(plan: Plan, own: Judgement | None, judgement: Judgement) -> Layout:
    estimate, time, memory = judgement.estimate, judgement.time, judgement.memory
    why = f"{judgement.outcome}: {judgement.reason}" if judgement.reason else ""
    if not why and estimate is not None and plan.cost.step_seconds:
        tokens = estimate.tokens / plan.workload.tokens
        if own is not None and own.time is not None and time is not None and own.time.step_seconds:
            why = f"{percent_text(time.step_seconds / tokens / own.time.step_seconds - 1)} time a token by the compiler"
        else:
            ratio = estimate.step_seconds / tokens / plan.cost.step_seconds
            why = f"{percent_text(ratio - 1)} time a token by the estimate"
    return Layout(
        judgement.label, mesh_text(judgement.mesh),
        estimate.step_seconds if estimate else None, estimate.peak if estimate else None,
        time.step_seconds if time else None, memory.peak if memory else None, why,
    )  # fmt: skip
