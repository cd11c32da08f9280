"""Prints the review of a hand-written layout, and converts it to JSON."""

from collections.abc import Container
from typing import Any

from rich.console import Console
from rich.text import Text

from shardplan.hardware import GIB
from shardplan.levanter_config.writer import batch_divisor, sections_yaml, trainer_section, trainer_yaml
from shardplan.lint.edits import explain_lines
from shardplan.lint.findings import Finding, FindingKind, Severity
from shardplan.lint.repair import Review
from shardplan.lint.smallest_edit import Repair
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.plan.summary import print_estimate, speed_text
from shardplan.report.plan.tables import workload_text
from shardplan.report.text import print_wrapped
from shardplan.search.reasons import describe_trace

_COLOURS = {Severity.ERROR: "red", Severity.WARNING: "yellow"}


def print_review(review: Review, out: Console) -> None:
    """Print the verdict, then the findings, errors first, then the smallest edit, and the best plan."""
    subject = review.lint.subject
    _print_outcome(review, out)
    about = f" on {subject.hardware.name}, mesh {mesh_text(subject.section.mesh)} · {workload_text(subject.workload)}"
    print_wrapped(about, out, Text(review.path, "bold"), indent="  ")
    if review.assumed:
        print_wrapped(f"assumed, not in the file: {'; '.join(review.assumed)}", out, indent="  ")
    for limit in describe_trace(subject.step):
        print_wrapped(f"limit of the prediction: {limit}", out, indent="  ")
    for finding in review.lint.findings:
        _print_finding(finding, subject.default_keys, out)
    if not review.lint.findings:
        out.print("no findings")
    if review.converted:
        out.print()
        print_wrapped(":", out, Text("the same for the installed Levanter", "bold"))
        out.print(sections_yaml(review.converted).rstrip(), markup=False, highlight=False, soft_wrap=True)
    if review.stopped_after is not None:
        out.print()
        print_wrapped(stopped_text(review), out, indent="  ")
    elif review.best and needs_edit(review) and review.repair is None:
        out.print()
        print_wrapped(": start from the best plan", out, Text("no small edit removes all errors", "bold"), indent="  ")
    if review.repair is not None:
        of = "of the converted section " if review.converted else ""
        _print_repair(f"the smallest edit {of}that removes all errors", review.repair, out)
    if review.best is None:
        out.print()
        print_wrapped(review.why_no_best, out)
    else:
        out.print()
        print_wrapped(f": {_estimate_text(review.best)}", out, Text("the best plan", "bold"), indent="  ")
        text = trainer_yaml(review.best, kept_schedule(review, review.best))
        out.print(text, markup=False, highlight=False, soft_wrap=True)


def needs_edit(review: Review) -> bool:
    """Return whether there are errors that the converted section does not remove."""
    return any(error.kind != FindingKind.SCHEMA for error in review.lint.errors)


def kept_schedule(review: Review, plan: Plan) -> list[dict[str, int]] | None:
    """Return the file's batch schedule for `plan`, with each stage rounded to a multiple that the plan needs.

    None if the file has no schedule.
    """
    stages, divisor = review.lint.subject.section.stages, batch_divisor(plan)
    if not stages:
        return None
    return [{"start": stage.start, "value": -(-stage.size // divisor) * divisor} for stage in stages]


def stopped_text(review: Review) -> str:
    """Explain that the search for edits was stopped, and what remains unknown."""
    seconds = f"{review.stopped_after:.0f} s (lint_seconds)"
    if review.repair is None:
        return f"the search for an edit that removes all errors was stopped after {seconds}, before one was found"
    return f"the search for an edit with which the step fits was stopped after {seconds}: there may be one"


def _print_outcome(review: Review, out: Console) -> None:
    """Print the outcome on two lines: the file runs, or its errors; and the predicted memory and speed."""
    plan, errors = review.lint.plan, review.lint.errors
    if not errors and plan is not None:
        print_estimate(plan, out)
        return
    kinds = ", ".join(dict.fromkeys(error.kind for error in errors))
    peak = f"; {_memory_text(plan)}" if plan is not None else ""
    print_wrapped(f" on {review.lint.subject.hardware.name}: {kinds}{peak}", out, Text("cannot run", "bold red"), "  ")
    if plan is not None:
        print_wrapped(f"predicted: {speed_text(plan)}", out, indent="  ")


def review_json(review: Review) -> dict[str, Any]:
    """Return the review as JSON values; memory in bytes per device, time in seconds.

    `repair` and `best` are the fields of `Review`; null if there is none.
    """
    best = review.best
    return {
        "path": review.path,
        "assumed": review.assumed,
        "limits": describe_trace(review.lint.subject.step),
        "findings": [finding.to_json() for finding in review.lint.findings],
        "predicted": None if review.lint.plan is None else _estimate_json(review.lint.plan),
        "repair": _repair_json(review.repair),
        "why_no_best": review.why_no_best or None,
        "converted": dict(review.converted) or None,
        "search_stopped_after": review.stopped_after,
        "best": best and {**_estimate_json(best), **_best_json(review, best)},
    }


def _best_json(review: Review, best: Plan) -> dict[str, Any]:
    """Return the trainer section of the best plan."""
    schedule = kept_schedule(review, best)
    return {"trainer": trainer_section(best) | ({"train_batch_size": schedule} if schedule else {})}


def _print_finding(finding: Finding, default_keys: Container[str], out: Console) -> None:
    head = Text.assemble(
        (str(finding.severity), f"bold {_COLOURS[finding.severity]}"), " ", (str(finding.kind), "bold")
    )
    where = (f"{key} (Levanter's default)" if key in default_keys else key for key in finding.where)
    print_wrapped(f" at {', '.join(where)}", out, head, indent="    ")
    print_wrapped(finding.text, out, "  ")
    print_wrapped(f"remedy: {finding.remedy}", out, "  ")


def _print_repair(title: str, repair: Repair, out: Console) -> None:
    plan = repair.lint.plan
    assert plan is not None  # a layout without errors has a plan
    count = f"{repair.edits} {'edit' if repair.edits == 1 else 'edits'}"
    out.print()
    print_wrapped(f": {count}; {_estimate_text(plan)}", out, Text(title, "bold"), indent="  ")
    for line in explain_lines(repair.lines):
        print_wrapped(line, out, "  ", indent="    ", style="red" if line.startswith("-") else "green")


def _estimate_text(plan: Plan) -> str:
    return f"{_memory_text(plan)}, batch {plan.workload.batch}, {speed_text(plan)}"


def _memory_text(plan: Plan) -> str:
    return f"peak {plan.memory.peak / GIB:.2f} of {plan.memory.available / GIB:.2f} GiB per device"


def _estimate_json(plan: Plan) -> dict[str, Any]:
    memory = plan.memory
    return {
        "batch": plan.workload.batch,
        "peak": memory.peak,
        "available": memory.available,
        "step_seconds": plan.cost.step_seconds,
    }


def _repair_json(repair: Repair | None) -> dict[str, Any] | None:
    """Return the repair as JSON values; None without a repair."""
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
