"""Finds the smallest edit of a hand-written trainer section that leaves no error, and the best plan to compare with."""

import contextlib
import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.config import PlanConfig
from shardplan.config.arguments import check_config
from shardplan.cost.calibration import usable_bytes
from shardplan.errors import ConfigError, InfeasibleError, check_argument
from shardplan.hardware import parse_slice
from shardplan.levanter_config.levanter_file import read_sections
from shardplan.levanter_config.model_section import parse_model_section
from shardplan.levanter_config.writer import section_yaml
from shardplan.lint.corrections import correct_attention_backend, correct_keys, parse_nearest
from shardplan.lint.edits import TRAINER_PREFIX, candidate_edits, diff_trainers
from shardplan.lint.findings import FindingKind
from shardplan.lint.lint import LintResult, LintTarget, assumptions, lint_trainer, target_of
from shardplan.plan.displayed import Displayed
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import flatten
from shardplan.search.make_plan import make_plan
from shardplan.search.ranking import TIME_RESOLUTION

MAX_EDITS = 8
BEAM_WIDTH = 100
"""How many of the unfinished trainer sections are edited further, for each number of edits."""
NEAR_BEST = 1.1
"""A step is near the best plan's if it takes at most this many times as long."""


@dataclass(frozen=True)
class Repair:
    """A trainer section without errors, a few edits away from one with errors."""

    edits: int
    """Number of keys that were changed, added, removed or renamed."""
    lines: list[str]
    """The keys that differ, as lines of a unified diff."""
    lint: LintResult
    """The result for the edited section: it may have warnings."""

    @property
    def trainer_yaml(self) -> str:
        """The edited trainer section, as text to paste."""
        return section_yaml(dict(self.lint.trainer))


@dataclass(frozen=True)
class Review(Displayed):
    """A hand-written trainer section with its findings, its repair, and the best plan to compare with."""

    path: str
    lint: LintResult
    assumed: list[str]
    """What the prediction takes from shardplan's configuration because the file omits it."""
    repair: Repair | None
    """The smallest edit that leaves no error; None if there is no error, or no such edit was found."""
    faster: Repair | None
    """If the step is not `NEAR_BEST`: the smallest edit after which it is, or else the fastest result of any edit."""
    best: Plan | None
    why_no_best: str = ""


def review(path: str, config: PlanConfig, report: Callable[[str], None] = lambda _: None) -> Review:
    """Lint the Levanter configuration `path` for the model, slice and workload of `config`, and look for better ones.

    Args:
        report: called with what is done next, for it takes up to a minute.

    Raises:
        ConfigError: it cannot be read.
    """
    check_argument("review", "path", path, (str, os.PathLike), "the path of a Levanter configuration")
    check_config("review", config)
    sections = read_sections(path)
    try:
        parse_nearest(sections["trainer"], parse_slice(config.hardware.slice))  # before the model is built
        levanter_model = parse_model_section(sections)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    target = target_of(config, levanter_model)
    result = lint_trainer(sections["trainer"], target)
    assumed = assumptions(result, target)
    work = result.subject.workload
    is_given = "workload.microbatches" in config.given and config.workload.microbatches is not None
    if work.is_training and (result.subject.section.microbatch or not is_given):  # edits change them too
        work = dataclasses.replace(work, microbatches=None)

    def plan_batch(batch: int) -> Plan:
        changed = dataclasses.replace(config, workload=dataclasses.replace(work, batch=batch))
        return make_plan(changed, target.model, own_attention=True)

    report("planning the best layout")
    try:
        best = plan_batch(work.batch)
    except (ConfigError, InfeasibleError) as error:  # if no plan fits, no edit does
        return Review(path, result, assumed, None, None, None, str(error))
    repair = find_smallest_edit(result, target, report=report) if result.errors else None
    best = _fastest_plan(best, repair, plan_batch)
    runnable = repair.lint if repair else result
    faster, near = None, NEAR_BEST * _plan_seconds(best)
    if runnable.plan and _seconds(runnable) > near:
        faster = find_smallest_edit(result, target, near, report)
        if faster and _seconds(faster.lint) * NEAR_BEST > _seconds(runnable):
            faster = None  # too small a gain
    return Review(path, result, assumed, repair, faster, _fastest_plan(best, faster, plan_batch))


def _fastest_plan(best: Plan, repair: Repair | None, plan_batch: Callable[[int], Plan]) -> Plan:
    """Return the fastest per sequence of `best`, the best plan for the batch of the repair, and the repair itself.

    The repair may have another batch than the file, or sharding that no plan has.
    """
    plan = repair.lint.plan if repair else None
    if plan is None or not plan.memory.fits:
        return best
    plans = [best]
    if plan.workload.batch != best.workload.batch:
        with contextlib.suppress(ConfigError, InfeasibleError):
            plans.append(plan_batch(plan.workload.batch))
    return min((*plans, plan), key=_plan_seconds)


def find_smallest_edit(
    start: LintResult, target: LintTarget, max_seconds: float = math.inf, report: Callable[[str], None] = lambda _: None
) -> Repair | None:
    """Find the fewest edits that leave no error and take at most `max_seconds` per sequence.

    If none are that fast, this returns the fastest repair that was seen; if none removes all errors, None. Among
    repairs with the same number of edits, those with the fewest warnings about the edited keys win; then the fastest
    per sequence, since edits can change the batch; and among those that tie to `TIME_RESOLUTION`, the lowest peak.

    Names that Levanter does not have are corrected first, since no repair keeps them. Then the beam search goes by
    number of edits. While there are errors, it tries only edits of an axis of the first one, since one of those has to
    change. It edits further only the `BEAM_WIDTH` sections that are closest to done, so a repair of many edits may not
    be the smallest.
    """
    target, lines = _correct_model_section(target)
    trainer, unknown_keys = correct_keys(start.trainer, target.hardware)
    corrections = len(unknown_keys) + bool(lines)
    states = [lint_trainer(trainer, target) if corrections else start]
    seen = {_identity(trainer)}
    usable = usable_bytes(target.hardware)
    fastest: Repair | None = None
    for edits in range(corrections, corrections + MAX_EDITS + 1):
        finished = [state for state in states if _fits(state) and _seconds(state) <= max_seconds]
        runnable = finished or [state for state in states if not state.errors]
        if runnable:
            best = _choose(start, runnable)
            if fastest is None or _seconds(best) < _seconds(fastest.lint):
                fastest = Repair(edits, [*lines, *diff_trainers(start.trainer, best.trainer)], best)
        if finished:
            return fastest
        goal = "removes all errors" if max_seconds == math.inf else "is nearly as fast as the best plan"
        report(f"looking for an edit that {goal}: number of edits {edits + 1}, layouts checked {len(seen)}")
        beam = sorted(states, key=lambda state: _distance(state, usable))[:BEAM_WIDTH]
        states = list(_lint_edits(beam, seen, target))
    return fastest


def _correct_model_section(target: LintTarget) -> tuple[LintTarget, list[str]]:
    """Correct the model section of `target`, and list the change as lines of a unified diff."""
    section = target.model_section
    backend, findings = correct_attention_backend(section.attention_backend)
    if not findings:
        return target, []
    (key,) = findings[0].where
    lines = [f"-{key}: {section.attention_backend}", *([f"+{key}: {backend}"] if backend else [])]
    return dataclasses.replace(target, model_section=dataclasses.replace(section, attention_backend=backend)), lines


def _lint_edits(states: Iterable[LintResult], seen: set[str], target: LintTarget) -> Iterator[LintResult]:
    """Yield the result of every single edit of `states` that is not in `seen`, and add it there."""
    for state in states:
        for trainer in _edit(state):
            identity = _identity(trainer)
            if identity in seen:
                continue
            seen.add(identity)
            with contextlib.suppress(ConfigError):
                yield lint_trainer(trainer, target)


def _choose(start: LintResult, results: list[LintResult]) -> LintResult:
    """Return the result with fewest new warnings and, among the fastest of these, least memory."""
    warnings = [_new_warnings(start, result) for result in results]
    results = [result for result, count in zip(results, warnings, strict=True) if count == min(warnings)]
    tied = min(map(_seconds, results)) * (1 + TIME_RESOLUTION)
    return min(
        (result for result in results if _seconds(result) <= tied),
        key=lambda result: (result.needed_bytes, _seconds(result), len(result.findings)),
    )


def _new_warnings(start: LintResult, state: LintResult) -> int:
    """Number of warnings about keys that the edits after `start` wrote, for example an unused mesh axis."""
    before = flatten(start.trainer, TRAINER_PREFIX)
    after = flatten(state.trainer, TRAINER_PREFIX)
    written = {key for key, value in after.items() if key not in before or before[key] != value}
    # a LOADING finding depends on the size of the model, whatever key it names
    return sum(bool(written & {*f.where}) for f in state.findings if f.kind != FindingKind.LOADING)


def _fits(state: LintResult) -> bool:
    return not state.errors and state.plan is not None and state.plan.memory.fits


def _seconds(state: LintResult) -> float:
    """Predicted time per sequence."""
    return _plan_seconds(state.plan) if state.plan else math.inf


def _plan_seconds(plan: Plan) -> float:
    return plan.cost.step_seconds / plan.workload.batch


def _edit(state: LintResult) -> Iterable[dict[str, Any]]:
    axes = state.errors[0].axes if state.errors else None
    for edit in candidate_edits(state.trainer, state.subject):
        if not axes or axes & edit.axes:
            yield edit.apply(state.trainer)


def _identity(trainer: Mapping[str, Any]) -> str:
    return repr(sorted(flatten(trainer).items(), key=lambda item: item[0]))


def _distance(state: LintResult, usable: float) -> tuple[int, float]:
    """Distance from done: the number of errors, counting too much memory as one, then the bytes; or else the time."""
    if _fits(state):
        return 0, _seconds(state)
    needed = state.needed_bytes
    return sum(bool(error.axes) for error in state.errors) + (needed > usable), needed
