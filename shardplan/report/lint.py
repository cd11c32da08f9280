"""What a lint found, as text and as JSON."""

from typing import Any

from rich.console import Console
from rich.markup import escape

from shardplan.hardware import GIB
from shardplan.levanter_config.writer import mesh_trainer_section, trainer_python, trainer_section, trainer_yaml
from shardplan.lint.findings import ERROR, Finding
from shardplan.lint.repair import NEAR, Repair, Review
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.tables import workload_text


def print_review(review: Review, out: Console) -> None:
    """The findings, errors first; what is predicted; the smallest edit; the best plan."""
    subject = review.lint.subject
    mesh = mesh_text(subject.layout.mesh)
    out.print(
        f"[bold]{escape(review.path)}[/bold] on {subject.hardware.name}, mesh {mesh} · "
        + workload_text(subject.workload),
        soft_wrap=True,
    )
    if review.assumed:
        out.print(f"the file does not say: {'; '.join(review.assumed)}", markup=False, highlight=False, soft_wrap=True)
    for finding in review.lint.findings:
        _print_finding(finding, out)
    if not review.lint.findings:
        out.print("nothing found")
    if review.lint.plan is not None:
        out.print(f"predicted: {_predicted(review.lint.plan)}", highlight=False, soft_wrap=True)
    if review.best and review.lint.errors and review.repair is None:
        out.print("\n[bold]no small edit leaves no error[/bold]: start from the best plan")
    if review.repair is not None:
        _print_repair("the smallest edit that leaves no error", review.repair, out)
    if review.faster is not None:
        _print_repair(f"to come near the best plan's step (at most {NEAR:g} times it, if possible)", review.faster, out)
    if review.best is None:
        out.print(f"\n{review.why_no_best}", markup=False, soft_wrap=True)
    else:
        out.print(f"\n[bold]the best plan[/bold]: {_predicted(review.best)}", highlight=False, soft_wrap=True)
        out.print(trainer_yaml(review.best, subject.is_flat), markup=False, highlight=False, soft_wrap=True)


def review_json(review: Review) -> dict[str, Any]:
    """The same as JSON values; memory in bytes per device, time in seconds."""
    best = review.best
    return {
        "path": review.path,
        "assumed": review.assumed,
        "findings": [finding.to_json() for finding in review.lint.findings],
        "predicted": None if review.lint.plan is None else _numbers(review.lint.plan),
        "repair": _repair_json(review.repair),
        "faster": _repair_json(review.faster),
        "best": None if best is None else {**_numbers(best), **_trainer_json(best, review.lint.subject.is_flat)},
    }


def _trainer_json(plan: Plan, is_flat: bool) -> dict[str, Any]:
    section = None if is_flat else mesh_trainer_section(plan)
    if section is not None:
        return {"trainer": section, "python": None}
    return {"trainer": trainer_section(plan), "python": trainer_python(plan)}


def _print_finding(finding: Finding, out: Console) -> None:
    colour = "red" if finding.severity == ERROR else "yellow"
    where = ", ".join(finding.where)
    out.print(f"[bold {colour}]{finding.severity}[/bold {colour}] [bold]{finding.kind}[/bold] at {escape(where)}")
    out.print(f"  {finding.text}", markup=False, highlight=False, soft_wrap=True)
    out.print(f"  remedy: {finding.remedy}", markup=False, highlight=False, soft_wrap=True)


def _print_repair(title: str, repair: Repair, out: Console) -> None:
    plan = repair.lint.plan
    assert plan is not None  # without errors it was measured
    count = f"{repair.edits} {'edit' if repair.edits == 1 else 'edits'}"
    out.print(f"\n[bold]{title}[/bold]: {count}; {_predicted(plan)}", highlight=False, soft_wrap=True)
    for line in repair.lines:
        out.print(f"  {line}", style="red" if line.startswith("-") else "green", markup=False, highlight=False)


def _predicted(plan: Plan) -> str:
    memory = plan.memory
    return (
        f"peak {memory.peak / GIB:.2f} of {memory.available / GIB:.2f} GiB per device, a step of about "
        f"{plan.cost.step_seconds:.3g} s"
    )


def _numbers(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {"peak": memory.peak, "available": memory.available, "step_seconds": plan.cost.step_seconds}


def _repair_json(repair: Repair | None) -> dict[str, Any] | None:
    if repair is None:
        return None
    plan = repair.lint.plan
    assert plan is not None  # without errors it was measured
    return {
        "edits": repair.edits,
        "changes": repair.lines,
        "trainer": repair.lint.trainer,
        "predicted": _numbers(plan),
        "findings": [finding.to_json() for finding in repair.lint.findings],
    }
