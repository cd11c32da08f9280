"""The candidates panel: time and memory of every evaluated candidate, and of compared layouts."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.hardware import GIB
from shardplan.plan.file.details import EvaluatedCandidate
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import Judgement, estimate_of, own_judgement
from shardplan.report.page.labels import NO_DETAILS
from shardplan.report.page.units import LogAxis, Tick, gib_text, linear_ticks, seconds_text
from shardplan.report.plan.summary import percent_text
from shardplan.verify.verdict import Outcome

PLAN, RUNNER_UP, EVALUATED, OTHER = "plan", "runner-up", "evaluated", "other"
HEADROOM = 1.08
"""Factor by which the axes extend beyond the smallest and largest points."""


@dataclass(frozen=True)
class CandidatePoint:
    """One candidate on the chart."""

    kind: str
    x: float
    y: float
    tip: str


@dataclass(frozen=True)
class CandidateRow:
    """A row of the table: a layout, its estimate and its verdict, and why it was not chosen."""

    name: str
    mesh: str
    seconds: float | None
    """Estimated seconds of a step; None for a verdict of an older version."""
    peak: int | None
    """Estimated peak bytes per device."""
    compiled_seconds: float | None
    compiled_peak: int | None
    why_not: str


@dataclass(frozen=True)
class CandidatesPanel:
    """Candidates by time and memory, as a chart and a table."""

    points: list[CandidatePoint]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    limit: float
    """Percent of the chart's height at which the usable memory is."""
    limit_text: str
    rows: list[CandidateRow]
    is_compiled: bool
    """Whether any layout was compiled."""
    has_others: bool
    """Whether layouts other than the plan's candidates are on the chart."""
    rejected: list[tuple[str, int]]
    slower: int
    missing: str


def candidates_panel(plan: Plan, judgements: Sequence[Judgement]) -> CandidatesPanel:
    """Place all candidates of a plan's search, and the plans of all verdicts."""
    evaluated = plan.details.candidates if plan.details is not None else []
    others = [each for each in judgements if not each.is_of(plan)]
    own = own_judgement(plan, judgements)
    # a verdict with the plan's own estimate is on its place: another program of it, or other compiler options
    drawn = [
        (each.label, each.estimate)
        for each in others
        if each.estimate not in (None, estimate_of(plan)) and each.estimate.tokens == plan.workload.tokens
    ]
    seconds = [plan.cost.step_seconds, *(c.step_seconds for c in evaluated), *(e.step_seconds for _, e in drawn)]
    x_axis = LogAxis(min(seconds) / HEADROOM, max(seconds) * HEADROOM)
    top = HEADROOM * max(
        [plan.memory.peak, plan.memory.usable, *(c.peak for c in evaluated), *(e.peak for _, e in drawn)]
    )

    def point(kind: str, seconds: float, peak: int, name: str) -> CandidatePoint:
        tip = f"{name}: {seconds_text(seconds)} a step, {gib_text(peak)}"
        return CandidatePoint(kind, x_axis.at(seconds), 100 - 100 * peak / top, tip)

    points = [
        point(_kind(plan, each), each.step_seconds, each.peak, _candidate_text(plan, each))
        for each in evaluated
        if not _is_plan(plan, each)
    ]
    points += [point(OTHER, each.step_seconds, each.peak, label) for label, each in drawn]
    points.sort(key=lambda each: each.kind == RUNNER_UP)  # drawn over those at the same place
    points.append(point(PLAN, plan.cost.step_seconds, plan.memory.peak, own_name(plan)))
    return CandidatesPanel(
        points=points,
        x_ticks=x_axis.ticks(),
        y_ticks=linear_ticks(top / GIB),
        limit=100 - 100 * plan.memory.usable / top,
        limit_text=f"usable memory, {gib_text(plan.memory.usable)}",
        rows=[
            _plan_row(plan, own),
            *_runner_up_row(plan, evaluated),
            *(_other_row(plan, own, each) for each in others),
        ],
        is_compiled=bool(judgements),
        has_others=bool(drawn),
        rejected=[(reason, count) for reason, count in plan.search.rejected.items() if count],
        slower=plan.details.slower_candidates if plan.details is not None else 0,
        missing=_missing(plan, evaluated),
    )


def _missing(plan: Plan, evaluated: list[EvaluatedCandidate]) -> str:
    if evaluated:
        return ""
    if plan.search.given:
        return "The mesh and the mappings were given: nothing was searched."
    return NO_DETAILS if plan.details is None or not plan.details.live else "No candidate fits."


def _is_plan(plan: Plan, candidate: EvaluatedCandidate) -> bool:
    is_mesh = candidate.mesh == list(plan.mesh.values())
    # the search and the pricing of its result add the same numbers in another order
    same = math.isclose(candidate.step_seconds, plan.cost.step_seconds) and abs(candidate.peak - plan.memory.peak) <= 1
    return is_mesh and same


def _kind(plan: Plan, candidate: EvaluatedCandidate) -> str:
    other = plan.search.runner_up
    is_runner_up = (
        other is not None
        and candidate.mesh == list(other.mesh.values())
        and math.isclose(candidate.step_seconds, other.step_seconds)
    )
    return RUNNER_UP if is_runner_up else EVALUATED


def _candidate_text(plan: Plan, candidate: EvaluatedCandidate) -> str:
    """Describe the mesh of a candidate, and how its main axes are sharded."""
    mesh = mesh_text(dict(zip(plan.mesh, candidate.mesh, strict=True)))
    parts = {"batch": candidate.batch, "positions": candidate.positions, "stored": candidate.stored}
    return f"{mesh}; " + ", ".join(f"{name} over {' x '.join(axes) or 'nothing'}" for name, axes in parts.items())


def own_name(plan: Plan) -> str:
    """Return the name of the page's plan among candidates: "this plan", or "this layout" if the layout was given."""
    return "this layout" if plan.search.given else "this plan"


def _plan_row(plan: Plan, own: Judgement | None) -> CandidateRow:
    return CandidateRow(
        own_name(plan), mesh_text(plan.mesh), plan.cost.step_seconds, plan.memory.peak,
        own.time.step_seconds if own and own.time else None, own.memory.peak if own and own.memory else None,
        own.outcome if own and own.outcome != Outcome.FITS else "",
    )  # fmt: skip


def _runner_up_row(plan: Plan, evaluated: list[EvaluatedCandidate]) -> list[CandidateRow]:
    other = plan.search.runner_up
    if other is None:
        return []
    peaks = [each.peak for each in evaluated if _kind(plan, each) == RUNNER_UP]
    why = f"{percent_text(other.step_seconds / plan.cost.step_seconds - 1)} time a step"
    if peaks and peaks[0] != plan.memory.peak:
        why += f", {gib_text(abs(peaks[0] - plan.memory.peak))} {'more' if peaks[0] > plan.memory.peak else 'less'}"
    return [
        CandidateRow(
            "runner-up", mesh_text(other.mesh), other.step_seconds, peaks[0] if peaks else None, None, None, why
        )
    ]


def _other_row(plan: Plan, own: Judgement | None, judgement: Judgement) -> CandidateRow:
    estimate, time, memory = judgement.estimate, judgement.time, judgement.memory
    if judgement.reason:
        why = f"{judgement.outcome}: {judgement.reason}"
    elif judgement.program != plan.workload.kind:
        why = f"another program: {judgement.program}"
    elif estimate is None:
        why = ""
    else:
        tokens = estimate.tokens / plan.workload.tokens
        if own is not None and own.time is not None and time is not None and own.time.step_seconds:
            why = f"{percent_text(time.step_seconds / tokens / own.time.step_seconds - 1)} time a token by the compiler"
        else:
            ratio = estimate.step_seconds / tokens / plan.cost.step_seconds
            why = f"{percent_text(ratio - 1)} time a token by the estimate"
    return CandidateRow(
        judgement.label, mesh_text(judgement.mesh),
        estimate.step_seconds if estimate else None, estimate.peak if estimate else None,
        time.step_seconds if time else None, memory.peak if memory else None, why,
    )  # fmt: skip
