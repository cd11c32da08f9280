"""Reviews a hand-written configuration: its findings, the smallest edit that leaves no error, and the best plan."""

import contextlib
import dataclasses
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.config import PlanConfig
from shardplan.config.arguments import check_config
from shardplan.errors import ConfigError, InfeasibleError, check_argument
from shardplan.levanter_config.levanter_file import LevanterFile
from shardplan.lint.file.lint_file import lint_file
from shardplan.lint.file.prepare import PreparedFile
from shardplan.lint.findings import Finding, Severity
from shardplan.lint.lint import LintResult, LintTarget
from shardplan.lint.smallest_edit import Repair, SearchLimit, find_smallest_edit, plan_seconds, result_seconds
from shardplan.plan.displayed import Displayed
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import with_details
from shardplan.search.make_plan import make_plan

SEARCH_SECONDS = 60.0
"""Default limit, in seconds, of the search for edits."""


@dataclass(frozen=True)
class Review(Displayed):
    """A hand-written configuration with its findings, its repair, and the best plan to compare with."""

    path: str
    lint: LintResult
    """The result of the lint, including findings on the other sections of the file."""
    assumed: list[str]
    """Settings that the prediction takes from shardplan's configuration, because the file omits them."""
    repair: Repair | None
    """The smallest edit that leaves no error; None if there is no error, or no such edit was found."""
    best: Plan | None
    why_no_best: str = ""
    converted: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Section -> its content for today's Levanter, for sections of levanter 1.2."""
    stopped_after: float | None = None
    """Seconds after which the search for edits was stopped; None if it ended by itself."""


def review(path: str, config: PlanConfig, report: Callable[[str], None] = lambda _: None) -> Review:
    """Lint the Levanter configuration `path`, and search for its smallest repair and for the best plan.

    Args:
        report: called with a description of each stage before it starts; all take up to a minute.

    Raises:
        ConfigError: the configuration cannot be read.
    """
    check_argument("review", "path", path, (str, os.PathLike), "the path of a Levanter configuration")
    check_config("review", config)
    report("asking Levanter's parser")
    linted = lint_file(path, config)
    prepared, target, result = linted.prepared, linted.target, linted.result
    report("planning the best layout")
    best, why_no_best = _best_plan(result, target)
    limit = SearchLimit(float(getattr(config, "lint_seconds", SEARCH_SECONDS)))
    repair = None
    if best is not None or target.extras.is_other_step:  # if no plan fits, no edit does
        repair = _find_repair(result, prepared, target, report, limit)
    if best is not None:
        best = _fastest_plan(best, repair, lambda batch: _plan_batch(result, target, batch))
        if result.plan and not result.errors and result_seconds(result) <= plan_seconds(best):
            best = result.plan  # the search takes plans that tie for one, and prefers the smallest memory
    if result.plan is not None:  # of all plans of the search for edits, the page shows this one
        result = dataclasses.replace(result, plan=with_details(result.plan, target.model))
    elif repair is not None and repair.lint.plan is not None:
        lint = dataclasses.replace(repair.lint, plan=with_details(repair.lint.plan, target.model))
        repair = dataclasses.replace(repair, lint=lint)
    whole = _with_findings(result, prepared)
    return Review(
        path,
        _in_file(whole, prepared.file),
        linted.assumed,
        _repair_in_file(repair, prepared.file),
        best,
        why_no_best,
        _nest(prepared.converted, prepared.file),
        limit.seconds if limit.has_stopped else None,
    )


def _best_plan(result: LintResult, target: LintTarget) -> tuple[Plan | None, str]:
    """Return the best plan for the file's batch, or the reason why there is none."""
    if target.extras.is_other_step:
        return None, "no best plan: a plan is made for training all parameters on single sequences"
    try:
        return _plan_batch(result, target, result.subject.workload.batch), ""
    except (ConfigError, InfeasibleError) as error:
        return None, str(error)


def _plan_batch(result: LintResult, target: LintTarget, batch: int) -> Plan:
    """Plan the file's workload with another batch, and with any number of microbatches unless the user sets it."""
    config, work = target.config, dataclasses.replace(result.subject.workload, batch=batch)
    is_given = "workload.microbatches" in config.given and config.workload.microbatches is not None
    if work.is_training and (result.subject.section.microbatch or not is_given):  # edits change them too
        work = dataclasses.replace(work, microbatches=None)
    return make_plan(dataclasses.replace(config, workload=work), target.model, own_attention=True)


def _find_repair(
    result: LintResult, prepared: PreparedFile, target: LintTarget, report: Callable[[str], None], limit: SearchLimit
) -> Repair | None:
    """Find the smallest edit that leaves no error in the trainer section, and add the corrections of all sections."""
    if not prepared.corrected.is_complete:
        return None
    if not result.errors:
        return _with_corrections(Repair(0, [], result), prepared) if prepared.corrected.lines else None
    return _with_corrections(find_smallest_edit(result, target, report=report, limit=limit), prepared)


def _with_corrections(repair: Repair | None, prepared: PreparedFile) -> Repair | None:
    """Add the corrections that Levanter's parser requires to a repair of the trainer section."""
    if repair is None:
        return None
    corrected = prepared.corrected
    return dataclasses.replace(repair, edits=repair.edits + corrected.edits, lines=[*corrected.lines, *repair.lines])


def _fastest_plan(best: Plan, repair: Repair | None, plan_batch: Callable[[int], Plan]) -> Plan:
    """Return the fastest plan per sequence: `best`, the best plan for the repair's batch, or the repair itself.

    The repair may have another batch than the file, or sharding that no plan has.
    """
    plan = repair.lint.plan if repair else None
    if plan is None or not plan.memory.fits:
        return best
    plans = [best]
    if plan.workload.batch != best.workload.batch:
        with contextlib.suppress(ConfigError, InfeasibleError):
            plans.append(plan_batch(plan.workload.batch))
    return min((*plans, plan), key=plan_seconds)


def _with_findings(result: LintResult, prepared: PreparedFile) -> LintResult:
    """Add the file's findings to the trainer section's, errors first, but none on keys where the section has errors."""
    known = {finding.where for finding in result.errors}
    added = [finding for finding in prepared.findings if finding.where not in known]
    findings = sorted((*added, *result.findings), key=lambda finding: finding.severity != Severity.ERROR)
    return dataclasses.replace(result, findings=tuple(findings))


def _in_file(result: LintResult, file: LevanterFile) -> LintResult:
    """Prefix keys with the section of the file that contains Levanter's configuration."""
    if not file.inside:
        return result
    findings = [_finding_in_file(finding, file) for finding in result.findings]
    return dataclasses.replace(result, findings=tuple(findings))


def _nest(converted: Mapping[str, Any], file: LevanterFile) -> Mapping[str, Any]:
    """Put converted sections into the section that contains Levanter's configuration."""
    for name in reversed(file.inside if converted else ()):
        converted = {name: converted}
    return converted


def _finding_in_file(finding: Finding, file: LevanterFile) -> Finding:
    return dataclasses.replace(finding, where=tuple(file.key(key) for key in finding.where))


def _repair_in_file(repair: Repair | None, file: LevanterFile) -> Repair | None:
    if repair is None or not file.inside:
        return repair
    lines = [f"{line[0]}{file.key(line[1:])}" for line in repair.lines]
    return dataclasses.replace(repair, lines=lines, lint=_in_file(repair.lint, file))
