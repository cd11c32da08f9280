"""Finds the smallest edit of a hand-written trainer section that removes its errors."""

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.cost.calibration import usable_bytes
from shardplan.errors import ConfigError
from shardplan.levanter_config.writer import section_yaml
from shardplan.lint.corrections import correct_attention_backend, correct_keys
from shardplan.lint.edits import TRAINER_PREFIX, candidate_edits, diff_trainers
from shardplan.lint.findings import FindingKind
from shardplan.lint.lint import LintResult, LintTarget, lint_trainer
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import flatten
from shardplan.search.tolerances import TIME_RESOLUTION

MAX_EDITS = 8
BEAM_WIDTH = 100
"""Number of unfinished trainer sections, per number of edits, that are edited further."""


class SearchLimit:
    """A time limit for a search."""

    def __init__(self, seconds: float = math.inf) -> None:
        self.seconds = seconds
        self._deadline = time.monotonic() + seconds
        self.has_stopped = False
        """Whether this limit has stopped the search."""

    def stops(self) -> bool:
        """Return whether the time is over; if so, record that the search was stopped."""
        self.has_stopped = self.has_stopped or time.monotonic() > self._deadline
        return self.has_stopped


@dataclass(frozen=True)
class Repair:
    """A trainer section without errors, and the few edits that lead to it."""

    edits: int
    """Number of keys that were changed, added, removed or renamed."""
    lines: list[str]
    """The keys that differ, as lines of a unified diff."""
    lint: LintResult
    """The lint of the edited section, which may have warnings."""

    @property
    def trainer_yaml(self) -> str:
        """The edited trainer section, as text to paste."""
        return section_yaml(dict(self.lint.trainer))


def find_smallest_edit(
    start: LintResult,
    target: LintTarget,
    report: Callable[[str], None] = lambda _: None,
    limit: SearchLimit | None = None,
) -> Repair | None:
    """Find the fewest edits of a trainer section that leave no error; None if there are none.

    A repair that exceeds the memory by less than the estimate's error counts if no repair fits. Repairs with the same
    number of edits are ordered by the number of warnings about edited keys, then by seconds per sequence (edits can
    change the batch), and those that tie to `TIME_RESOLUTION` by peak memory.

    Names that Levanter does not have are corrected first, since no repair keeps them. Then a beam search adds one edit
    at a time. While there are errors, it tries only edits of the axes that the first error names, since one of these
    has to change. After each edit it keeps only the `BEAM_WIDTH` sections that are closest to a repair, so a repair of
    many edits may not be the smallest. When `limit` stops the search, it returns the best repair found so far.
    """
    limit = limit or SearchLimit()
    target, lines = _correct_model_section(target)
    trainer, unknown_keys = correct_keys(start.trainer, target.hardware)
    corrections = len(unknown_keys) + bool(lines)
    states = [lint_trainer(trainer, target) if corrections else start]
    seen = {_identity(trainer)}
    usable = usable_bytes(target.hardware)
    repair: Repair | None = None
    for edits in range(corrections, corrections + MAX_EDITS + 1):
        repaired = [state for state in states if not state.errors]
        fitting = [state for state in repaired if state.plan is not None and state.plan.memory.fits]
        if fitting or (repaired and repair is None):
            best = _choose(start, fitting or repaired)
            repair = Repair(edits, [*lines, *diff_trainers(start.trainer, best.trainer)], best)
        if fitting or limit.has_stopped:
            return repair
        report(f"looking for an edit that removes all errors: number of edits {edits + 1}, layouts checked {len(seen)}")
        beam = sorted(states, key=lambda state: _distance(state, usable))[:BEAM_WIDTH]
        states = list(_lint_edits(beam, seen, target, limit))
    return repair


def _correct_model_section(target: LintTarget) -> tuple[LintTarget, list[str]]:
    """Correct the model section of `target`, and list the change as lines of a unified diff."""
    section = target.model_section
    backend, findings = correct_attention_backend(section.attention_backend)
    if not findings:
        return target, []
    (key,) = findings[0].where
    lines = [f"-{key}: {section.attention_backend}", *([f"+{key}: {backend}"] if backend else [])]
    return dataclasses.replace(target, model_section=dataclasses.replace(section, attention_backend=backend)), lines


def _lint_edits(
    states: Iterable[LintResult], seen: set[str], target: LintTarget, limit: SearchLimit
) -> Iterator[LintResult]:
    """Lint every single edit of `states` that is not in `seen`, add it there, and yield its result; end at `limit`."""
    for state in states:
        for trainer in _edit(state):
            identity = _identity(trainer)
            if identity in seen:
                continue
            if limit.stops():
                return
            seen.add(identity)
            with contextlib.suppress(ConfigError):
                yield lint_trainer(trainer, target)


def _choose(start: LintResult, results: list[LintResult]) -> LintResult:
    """Return the best result: fewest new warnings, then fewest seconds per sequence, then least memory."""
    warnings = [_new_warnings(start, result) for result in results]
    results = [result for result, count in zip(results, warnings, strict=True) if count == min(warnings)]
    tied = min(map(result_seconds, results)) * (1 + TIME_RESOLUTION)
    return min(
        (result for result in results if result_seconds(result) <= tied),
        key=lambda result: (result.needed_bytes, result_seconds(result), len(result.findings)),
    )


def _new_warnings(start: LintResult, state: LintResult) -> int:
    """Return the number of warnings on keys that the edits after `start` wrote, for example an unused mesh axis."""
    before = flatten(start.trainer, TRAINER_PREFIX)
    after = flatten(state.trainer, TRAINER_PREFIX)
    written = {key for key, value in after.items() if key not in before or before[key] != value}
    # a LOADING finding depends on the size of the model, whatever key it names
    return sum(bool(written & {*f.where}) for f in state.findings if f.kind != FindingKind.LOADING)


def result_seconds(state: LintResult) -> float:
    """Return the predicted seconds per sequence."""
    return plan_seconds(state.plan) if state.plan else math.inf


def plan_seconds(plan: Plan) -> float:
    return plan.cost.step_seconds / plan.workload.batch


def _edit(state: LintResult) -> Iterable[dict[str, Any]]:
    axes = state.errors[0].axes if state.errors else None
    for edit in candidate_edits(state.trainer, state.subject):
        if not axes or axes & edit.axes:
            yield edit.apply(state.trainer)


def _identity(trainer: Mapping[str, Any]) -> str:
    return repr(sorted(flatten(trainer).items(), key=lambda item: item[0]))


def _distance(state: LintResult, usable: float) -> tuple[int, float]:
    """Return a sort key for the distance to a repair: (number of errors, plus one if memory is exceeded; bytes)."""
    # a path to a repair may lead through sections without a prediction, such as a duplicate mesh axis, of which the
    # stored bytes decide: by the number of errors alone it is not found (docs/log.md)
    needed = state.needed_bytes
    return sum(bool(error.axes) for error in state.errors) + (needed > usable), needed
