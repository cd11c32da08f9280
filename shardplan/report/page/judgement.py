"""A verdict in words together with its plan's estimate, as `verify --json` writes it and the page shows it."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shardplan.errors import ConfigError, one_line
from shardplan.plan.plan import Plan
from shardplan.plan.serialization import decode
from shardplan.report.plan.verdicts import omission_text, reason_text
from shardplan.verify.verdict import CompiledCollective, CompiledMemory, CompiledTime, Outcome, Verdict


@dataclass(frozen=True)
class Estimate:
    """A plan's predictions for its step."""

    step_seconds: float
    tokens: int
    peak: int
    """Bytes per device."""
    usable: int
    """Bytes per device that the peak may use."""


@dataclass(frozen=True)
class Judgement:
    """The verdict on one program, reason and omissions as text, and the estimate of its plan.

    It comes from a verdict of this process, or from a file that another process has written.
    """

    label: str
    outcome: Outcome
    reason: str
    program: str
    slice: str
    mesh: dict[str, int]
    options: dict[str, str]
    attention: str
    compile_seconds: float
    versions: dict[str, str]
    memory: CompiledMemory | None = None
    time: CompiledTime | None = None
    collectives: list[CompiledCollective] = field(default_factory=list)
    not_understood: dict[str, int] = field(default_factory=dict)
    estimate: Estimate | None = None
    """The estimate; None in files of older versions."""

    def is_of(self, plan: Plan) -> bool:
        """Return whether the verdict's program is the step of `plan` with its compiler options, as far as is known."""
        own = plan.hardware.slice, plan.mesh, plan.compiler_options, plan.workload.kind
        is_same = (self.slice, self.mesh, self.options, self.program) == own
        return is_same and self.estimate in (None, estimate_of(plan))


def estimate_of(plan: Plan) -> Estimate:
    """Return the estimate of a plan."""
    return Estimate(plan.cost.step_seconds, plan.workload.tokens, plan.memory.peak, plan.memory.usable)


def judge(label: str, plan: Plan, verdict: Verdict) -> Judgement:
    """Return the verdict on a plan in words, with the plan's estimate."""
    return Judgement(
        label=label,
        outcome=verdict.outcome,
        reason=reason_text(verdict.reason),
        program=verdict.program,
        slice=verdict.slice,
        mesh=verdict.mesh,
        options=verdict.options,
        attention=verdict.attention,
        compile_seconds=verdict.compile_seconds,
        versions=verdict.versions,
        memory=verdict.memory,
        time=verdict.time,
        collectives=verdict.collectives,
        not_understood={omission_text(omission): count for omission, count in verdict.not_understood.items()},
        estimate=estimate_of(plan),
    )


def judgement_json(label: str, plan: Plan, verdict: Verdict) -> dict[str, Any]:
    """Return the verdict on a plan as JSON values; bytes are per device."""
    return asdict(judge(label, plan, verdict))


def load_judgements(path: str) -> list[Judgement]:
    """Read the verdicts that `verify --json` wrote.

    Raises:
        ConfigError: the file does not exist, or has no verdicts.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"verdicts {path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"verdicts {path} is not JSON: {one_line(error)}") from error
    if not isinstance(values, dict) or not isinstance(values.get("verdicts"), list):
        raise ConfigError(f"verdicts {path} has no verdicts; name a file that verify --json wrote")
    try:
        return [decode(Judgement, each) for each in values["verdicts"]]
    except ConfigError as error:
        raise ConfigError(f"verdicts {path}: {error}") from error


def own_judgement(plan: Plan, judgements: Sequence[Judgement]) -> Judgement | None:
    """Return the first verdict on the step of `plan`; None without a verdict."""
    return next((each for each in judgements if each.is_of(plan)), None)
