"""A hand-written layout: the lint's findings on it, its repairs, and the best plan."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardplan.levanter_config.writer import trainer_yaml
from shardplan.lint.edits import explain_lines
from shardplan.lint.findings import Severity
from shardplan.lint.repair import Review
from shardplan.lint.smallest_edit import Repair
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.plan.lint import kept_schedule, needs_edit, stopped_text
from shardplan.report.plan.tables import MEMORY_PARTS
from shardplan.search.reasons import describe_trace

AS_IT_IS = "the file as it is"


@dataclass(frozen=True)
class Defect:
    """One finding, in words."""

    severity: Severity
    kind: str
    where: str
    text: str
    remedy: str


@dataclass(frozen=True)
class ComparedLayout:
    """One of the layouts compared: the file's, an edited one, or the best plan."""

    name: str
    outcome: str
    is_good: bool
    """Whether the layout can run."""
    mesh: str
    lines: list[str]
    """The edits, as lines of a unified diff."""
    batch: int = 0
    step_seconds: float = 0.0
    """Seconds of a step; 0 if they cannot be predicted."""
    tokens_per_second: float = 0.0
    peak: int = 0
    """Peak bytes per device."""
    parts: dict[str, int] | None = None
    """Field of `MemoryPlan` -> bytes per device at the peak; None if nothing can be predicted."""


@dataclass(frozen=True)
class RepairPanel:
    """A hand-written layout and its repairs."""

    path: str
    slice: str
    shown: str
    """Name of the layout that the other panels show."""
    notes: list[str]
    """Notes on what the prediction assumes and leaves out, and why a repair or the best plan is missing."""
    defects: list[Defect]
    """Findings, errors first."""
    layouts: list[ComparedLayout]
    usable: int
    """Bytes per device that the peak may use."""
    section: str
    """The trainer section of the best plan; empty if there is none."""
    compiler_options: dict[str, str]
    """The compiler options of the best plan; empty if there is none."""


def repair_panel(review: Review) -> tuple[Plan, RepairPanel] | None:
    """Lay out a review of a file; the page's plan is the plan of the file, else of its repair, else the best plan.

    None if there is no plan at all.
    """
    layouts, result = list(_layouts(review)), review.lint
    shown = next(((name, plan) for name, _, plan in layouts if plan is not None), None)
    if shown is None:
        return None
    name, plan = shown
    notes = [f"assumed, not in the file: {'; '.join(review.assumed)}"] if review.assumed else []
    notes += [f"limit of the prediction: {limit}" for limit in describe_trace(result.subject.step)]
    if review.best is None:
        notes.append(review.why_no_best)
    if review.stopped_after is not None:
        notes.append(stopped_text(review))
    elif review.best is not None and needs_edit(review) and review.repair is None:
        notes.append("no small edit removes all errors: start from the best plan")
    return plan, RepairPanel(
        path=review.path,
        slice=result.subject.hardware.name,
        shown=name,
        notes=notes,
        defects=[
            Defect(each.severity, each.kind, ", ".join(each.where), each.text, each.remedy) for each in result.findings
        ],
        layouts=[_compare(review, *each) for each in layouts],
        usable=plan.memory.usable,
        section=_best_section(review) if review.best is not None else "",
        compiler_options=review.best.compiler_options if review.best is not None else {},
    )


def _best_section(review: Review) -> str:
    """Write the trainer section of the best plan, with the file's batch schedule."""
    assert review.best is not None
    return trainer_yaml(review.best, kept_schedule(review, review.best))


def _layouts(review: Review) -> Iterator[tuple[str, Repair | None, Plan | None]]:
    """Yield (name, edits, plan) of each layout: of the file itself, of its smallest edit, and of the best plan."""
    yield AS_IT_IS, None, review.lint.plan
    if review.repair is not None:
        yield "the smallest edit without errors", review.repair, review.repair.lint.plan
    if review.best is not None:
        yield "the best plan", None, review.best


def _compare(review: Review, name: str, repair: Repair | None, plan: Plan | None) -> ComparedLayout:
    errors = review.lint.errors if name == AS_IT_IS else []
    fits = plan is not None and plan.memory.fits
    kinds = ", ".join(dict.fromkeys(error.kind for error in errors))
    outcome = f"cannot run ({kinds})" if errors else "fits" if fits else "does not fit"
    lines = explain_lines(repair.lines) if repair is not None else []
    if plan is None:
        return ComparedLayout(name, outcome, False, mesh_text(review.lint.subject.section.mesh), lines)
    seconds, parts = plan.cost.step_seconds, {part: getattr(plan.memory, part) for part in MEMORY_PARTS}
    return ComparedLayout(
        name, outcome, fits and not errors, mesh_text(plan.mesh), lines, plan.workload.batch, seconds,
        plan.workload.tokens / seconds, plan.memory.peak, parts,
    )  # fmt: skip
