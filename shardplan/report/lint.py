"""Prints the review of a hand-written layout, and turns it into JSON."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from shardplan.hardware import GIB
from shardplan.levanter_config.schema import TrainerSchema
from shardplan.levanter_config.writer import flat_trainer_section, mesh_trainer_section, trainer_python, trainer_yaml
from shardplan.lint.findings import Finding, Severity
from shardplan.lint.repair import NEAR_BEST, Repair, Review
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.tables import workload_text

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


def print_review(review: Review, out: Console) -> None:
    """Print the findings, errors first, then the prediction, the smallest edit, and the best plan."""
    subject = review.lint.subject
    mesh = mesh_text(subject.section.mesh)
    out.print(
        f"[bold]{escape(review.path)}[/bold] on {subject.hardware.name}, mesh {mesh} · "
        + workload_text(subject.workload),
        soft_wrap=True,
    )
    if review.assumed:
        assumed = "; ".join(review.assumed)
        out.print(f"assumed, not in the file: {assumed}", markup=False, highlight=False, soft_wrap=True)
    for finding in review.lint.findings:
        _print_finding(finding, out)
    if not review.lint.findings:
        out.print("no findings")
    if review.lint.plan is not None:
        out.print(f"predicted: {_estimate_text(review.lint.plan)}", highlight=False, soft_wrap=True)
    if review.best and review.lint.errors and review.repair is None:
        out.print("\n[bold]no small edit removes all errors[/bold]: start from the best plan")
    if review.repair is not None:
        _print_repair("the smallest edit that removes all errors", review.repair, out)
    if review.faster is not None:
        _print_repair(
            f"the smallest edit for a step within {NEAR_BEST:g} times the best plan's, if possible", review.faster, out
        )
    if review.best is None:
        out.print(f"\n{review.why_no_best}", markup=False, soft_wrap=True)
    else:
        out.print(f"\n[bold]the best plan[/bold]: {_estimate_text(review.best)}", highlight=False, soft_wrap=True)
        out.print(trainer_yaml(review.best, subject.schema), markup=False, highlight=False, soft_wrap=True)


def review_json(review: Review) -> dict[str, Any]:
    """The review as JSON values; memory in bytes per device, time in seconds.

    `repair`, `faster` and `best` are those of `Review`; null where there is none.
    """
    best = review.best
    return {
        "path": review.path,
        "assumed": review.assumed,
        "findings": [finding.to_json() for finding in review.lint.findings],
        "predicted": None if review.lint.plan is None else _estimate_json(review.lint.plan),
        "repair": _repair_json(review.repair),
        "faster": _repair_json(review.faster),
        "best": best and {**_estimate_json(best), **_trainer_json(best, review.lint.subject.schema)},
    }


def _trainer_json(plan: Plan, schema: TrainerSchema) -> dict[str, Any]:
    """Return the trainer section and the Python that it needs; in the flat schema if that of the mesh cannot do it."""
    mesh_section = mesh_trainer_section(plan) if schema == TrainerSchema.MESH else None
    if mesh_section is not None:
        return {"trainer": mesh_section, "python": None}
    return {"trainer": flat_trainer_section(plan), "python": trainer_python(plan)}


def _print_finding(finding: Finding, out: Console) -> None:
    colour = _COLOURS[finding.severity]
    where = ", ".join(finding.where)
    out.print(f"[bold {colour}]{finding.severity}[/bold {colour}] [bold]{finding.kind}[/bold] at {escape(where)}")
    out.print(f"  {finding.text}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"  remedy: {finding.remedy}", markup=False, highlight=False, soft_wrap=True)


def _print_repair(title: str, repair: Repair, out: Console) -> None:
    plan = repair.lint.plan
    assert plan is not None  # a layout without errors has a plan
    count = f"{repair.edits} {'edit' if repair.edits == 1 else 'edits'}"
    out.print(f"\n[bold]{title}[/bold]: {count}; {_estimate_text(plan)}", highlight=False, soft_wrap=True)
    for line in repair.lines:
        out.print(f"  {line}", style="red" if line.startswith("-") else "green", markup=False, highlight=False)


def _estimate_text(plan: Plan) -> str:
    memory = plan.memory
    return (
        f"peak {memory.peak / GIB:.2f} of {memory.available / GIB:.2f} GiB per device, a step of about "
        f"{plan.cost.step_seconds:.3g} s"
    )


def _estimate_json(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {"peak": memory.peak, "available": memory.available, "step_seconds": plan.cost.step_seconds}


def _repair_json(repair: Repair | None) -> dict[str, Any] | None:
    """Return the repair as JSON values; None if there is none."""
    if repair is None:
        return None
    plan = repair.lint.plan
    assert plan is not None  # a layout without errors has a plan
    return {
        "edits": repair.edits,
        "changes": repair.lines,
        "trainer": repair.lint.trainer,
        "predicted": _estimate_json(plan),
        "findings": [finding.to_json() for finding in repair.lint.findings],
    }
