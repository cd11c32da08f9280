"""The smallest edit of a hand-written configuration that leaves no error, and the best plan beside it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.config import Config, leaves
from shardplan.cost.calibration import usable_bytes
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import parse_slice
from shardplan.levanter_config.model_section import model_section
from shardplan.levanter_config.trainer_section import read_file
from shardplan.lint.edits import ROOT, candidate_edits, difference
from shardplan.lint.lint import Lint, Target, assumptions, lint, readable, target_of
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import make_plan
from shardplan.search.ranking import TIME_RESOLUTION

MOST_EDITS = 8
FRONTIER = 100
"""Unfinished configurations that are edited further, of every number of edits."""
NEAR = 1.1
"""A step at most this many times as long as the best plan's is good enough."""


@dataclass(frozen=True)
class Repair:
    """A configuration without errors, near one with errors."""

    edits: int
    """Keys that were changed, added, removed or renamed."""
    lines: list[str]
    """The keys that differ, as a unified diff."""
    lint: Lint
    """What there still is to say of it: warnings."""


@dataclass(frozen=True)
class Review:
    """A configuration, what is wrong with it, and what could be instead."""

    path: str
    lint: Lint
    assumed: list[str]
    """What is taken from shardplan's configuration, for the file does not say it."""
    repair: Repair | None
    """The smallest edit that leaves no error; None where there is none to leave, or no edit was found."""
    faster: Repair | None
    """Where the step is not `NEAR` the best plan's: the smallest edit after which it is, or the fastest seen."""
    best: Plan | None
    why_no_best: str = ""


def review(path: str, config: Config) -> Review:
    """Lint the Levanter configuration `path` for the model, slice and workload of `config`, and look for better ones.

    Raises:
        ConfigError: it cannot be read.
    """
    values = read_file(path)
    readable(values["trainer"], parse_slice(config.hardware.slice))  # complain before the model is built
    target = target_of(config, model_section(values))
    found = lint(values["trainer"], target)
    assumed = assumptions(found, target)
    best, why, work = None, "", found.subject.workload
    is_asked = "workload.microbatches" in config.given and config.workload.microbatches is not None
    if work.kind == "train" and (found.subject.layout.microbatch or not is_asked):  # edits change them too
        work = dataclasses.replace(work, microbatches=None)
    try:
        best = make_plan(dataclasses.replace(config, workload=work), target.model, own_attention=True)
    except (ConfigError, InfeasibleError) as error:
        why = str(error)
    if best is None:  # where no plan fits no edit does
        return Review(path, found, assumed, None, None, None, why)
    repair = smallest_edit(found, target) if found.errors else None
    runs = repair.lint if repair else found
    faster, near = None, NEAR * _pace(best)
    if runs.plan and _seconds(runs) > near:
        faster = smallest_edit(found, target, near)
        if faster and _seconds(faster.lint) * NEAR > _seconds(runs):
            faster = None  # not worth it
    return Review(path, found, assumed, repair, faster, best)


def smallest_edit(start: Lint, target: Target, most_seconds: float = math.inf) -> Repair | None:
    """The fewest edits that leave no error, and at most `most_seconds` a sequence, or else the fastest that was seen.

    Of as many edits those that leave the fewest warnings about what they wrote; of these the fastest per sequence, for
    edits can change the batch; and among those that are equally fast to the model's resolution the lowest peak.

    Searched by number of edits. Where there are errors only edits of an axis that the first one is about are made, for
    one of those has to change. Only the `FRONTIER` unfinished configurations that are closest to done are edited
    further, so that of many edits a smaller number may be missed.
    """
    frontier, seen = [start], {_identity(start.trainer)}
    usable = usable_bytes(target.hardware)
    fastest: Repair | None = None
    for edits in range(1, MOST_EDITS + 1):
        found: list[Lint] = []
        unfinished: list[Lint] = []
        for state in frontier:
            for trainer in _edited(state):
                identity = _identity(trainer)
                if identity in seen:
                    continue
                seen.add(identity)
                try:
                    child = lint(trainer, target)
                except ConfigError:
                    continue
                (found if _fits(child) and _seconds(child) <= most_seconds else unfinished).append(child)
        runs = found or [state for state in unfinished if not state.errors]
        if runs:
            best = _choose(start, runs)
            if fastest is None or _seconds(best) < _seconds(fastest.lint):
                fastest = Repair(edits, difference(start.trainer, best.trainer), best)
        if found:
            return fastest
        frontier = sorted(unfinished, key=lambda state: _distance(state, usable))[:FRONTIER]
    return fastest


def _choose(start: Lint, found: list[Lint]) -> Lint:
    own = [_own_warnings(start, f) for f in found]
    found = [f for f, warnings in zip(found, own, strict=True) if warnings == min(own)]
    equal = min(map(_seconds, found)) * (1 + TIME_RESOLUTION)
    return min((f for f in found if _seconds(f) <= equal), key=lambda f: (f.needed_bytes, _seconds(f), len(f.findings)))


def _own_warnings(start: Lint, state: Lint) -> int:
    """How many warnings there are about what the edits after `start` wrote, as of a mesh axis with nothing on it."""
    before = leaves(start.trainer, ROOT)
    written = {key for key, value in leaves(state.trainer, ROOT).items() if key not in before or before[key] != value}
    # Levanter's loader is about the model's size, whatever key it is said at
    return sum(bool(written & {*finding.where}) for finding in state.findings if finding.kind != "loading")


def _fits(state: Lint) -> bool:
    return not state.errors and state.plan is not None and state.plan.memory.fits


def _seconds(state: Lint) -> float:
    """Per sequence."""
    return _pace(state.plan) if state.plan else math.inf


def _pace(plan: Plan) -> float:
    return plan.cost.step_seconds / plan.workload.batch


def _edited(state: Lint) -> Iterable[dict[str, Any]]:
    axes = state.errors[0].axes if state.errors else None
    for edit in candidate_edits(state.trainer, state.subject):
        if not axes or axes & edit.axes:
            yield edit.apply(state.trainer)


def _identity(trainer: Mapping[str, Any]) -> str:
    return repr(sorted(leaves(trainer).items(), key=lambda item: item[0]))


def _distance(state: Lint, usable: float) -> tuple[int, float]:
    """How far from done: how many errors, too much memory being one, and how much memory; without errors, how slow."""
    if _fits(state):
        return 0, _seconds(state)
    needed = state.needed_bytes
    return sum(bool(error.axes) for error in state.errors) + (needed > usable), needed
