"""The layouts that docs/benchmarks/planner.json keeps with what the compiler made of them, and their estimates.

A record has all that decides a program, so that the planner can estimate it again without a search: the unit test
tests/unit/test_accuracy.py does so for every record, and fails if a change of the cost model makes a family worse.
"""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from shardplan import config as configuration
from shardplan.model.hf_config import read_config
from shardplan.model.registry import Model, build_model
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.plan import Plan
from shardplan.plan.workload import Workload
from shardplan.report.verdicts import reason_text
from shardplan.search.given_plan import plan_given_mappings
from shardplan.verify.case import Case
from shardplan.verify.verdict import Outcome, Verdict

RECORD = Path(__file__).parents[1] / "docs" / "benchmarks" / "planner.json"
MIN_PART = 0.01
"""Part of a step's bytes below which a kind of collective is left out of the errors."""


@dataclass(frozen=True)
class Layout:
    """All that decides a program: model, workload, slice, mesh, mappings, attention and compiler options."""

    label: str
    model: str
    """Name of a bundled model."""
    slice: str
    workload: dict[str, Any]
    mesh: dict[str, int]
    compute: dict[str, list[str]]
    params: dict[str, list[str]]
    attention: dict[str, Any]
    options: dict[str, str]

    @classmethod
    def of(cls, case: Case) -> "Layout":
        """The layout of a case of a bundled model."""
        plan = case.plan
        assert plan.model.config is not None
        parts = plan.mesh, plan.compute_mapping, plan.param_mapping, vars(plan.attention), dict(case.options)
        return cls(case.label, plan.model.config, plan.hardware.slice, vars(plan.workload), *parts)

    @property
    def family(self) -> str:
        """The kind of program, by which errors are reported: experts, or dense with the kind of step."""
        return "experts" if has_experts(self.model) else f"dense {self.workload['kind']}"

    def estimate(self) -> Plan:
        """What the planner estimates of the layout."""
        workload = Workload(**self.workload)
        sections = {"model": {"config": self.model}, "hardware": {"slice": self.slice}, "workload": vars(workload)}
        config = configuration.load_config(**sections)
        model = bundled_model(self.model, workload.position)
        return plan_given_mappings(config, model, self.mesh, self.compute, self.params, AttentionPlan(**self.attention))


@dataclass(frozen=True)
class CompiledResult:
    """The part of a verdict that planner.json keeps."""

    outcome: str
    reason: str
    peak: int | None
    """Peak memory of a device, bytes."""
    seconds: list[float] | None
    """Seconds of the step, seconds of its compute, MFU."""
    collectives: list[list[Any]]
    """[kind, mesh axes, bytes, number of executions] of every kind and mesh axes."""

    @classmethod
    def of(cls, verdict: Verdict) -> "CompiledResult":
        """The part of a verdict that the tables need."""
        sums: Counter[tuple[str, str]] = Counter()
        counts: Counter[tuple[str, str]] = Counter()
        for each in verdict.collectives:
            key = each.kind, " ".join(each.mesh_axes)
            sums[key] += each.bytes
            counts[key] += each.count
        memory, time = verdict.memory, verdict.time
        return cls(
            verdict.outcome,
            reason_text(verdict.reason)[:200],
            memory.peak if memory else None,
            [time.step_seconds, time.compute_seconds, time.mfu] if time else None,
            [[*key, size, counts[key]] for key, size in sums.items()],
        )

    @property
    def fits(self) -> bool:
        """Whether the compiler accepts the program."""
        return self.outcome == Outcome.FITS

    @property
    def step_seconds(self) -> float:
        """Modelled time of the step; infinite if it was not compiled."""
        return self.seconds[0] if self.seconds else math.inf


@dataclass(frozen=True)
class Record:
    """A layout with what the compiler made of it."""

    layout: Layout
    result: CompiledResult


@dataclass(frozen=True)
class Errors:
    """Estimated over compiled values, less 1; None where the compiler gave none."""

    peak: float | None
    """Of the peak memory of a device."""
    received: float | None
    """Of the bytes that a device receives in a step."""
    by_kind: dict[str, float]
    """Kind of collective with at least `MIN_PART` of the bytes -> error of its bytes."""
    step: float | None
    """Of the time of a step; None too where the compiler options are not those that the estimate is for."""

    @classmethod
    def of(cls, plan: Plan, options: Mapping[str, str], result: CompiledResult) -> "Errors":
        """The errors of the estimates of `plan` against what was compiled with `options`."""
        peak = plan.memory.peak / result.peak - 1 if result.peak else None
        if result.seconds is None:
            return cls(peak, None, {}, None)
        predicted = by_kind((each.kind, each.bytes) for each in plan.cost.collectives)
        compiled = by_kind((kind, size) for kind, _, size, _ in result.collectives)
        total = sum(compiled.values())
        large = [kind for kind in compiled if compiled[kind] > MIN_PART * total]
        step = plan.cost.step_seconds / result.step_seconds - 1 if options == plan.compiler_options else None
        return cls(
            peak,
            sum(predicted.values()) / total - 1 if total else None,
            {kind: predicted[kind] / compiled[kind] - 1 for kind in large},
            step,
        )


def read_records() -> dict[str, Record]:
    """Read planner.json: digest of a program and of the code that reads it -> record."""
    rows = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    return {key: Record(Layout(**row["layout"]), CompiledResult(**row["result"])) for key, row in rows.items()}


def write_records(records: Mapping[str, Record]) -> None:
    """Write planner.json, a line for every record; programs that exceeded a limit of this machine are left out."""
    decided = sorted(key for key in records if records[key].result.outcome != Outcome.UNDECIDED)
    rows = (f"{json.dumps(key)}: {json.dumps(dataclasses.asdict(records[key]))}" for key in decided)
    RECORD.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")


def errors_by_family(records: Iterable[Record]) -> dict[str, list[Errors]]:
    """Estimate every layout anew: family -> errors of its layouts."""
    families: defaultdict[str, list[Errors]] = defaultdict(list)
    for record in records:
        layout = record.layout
        families[layout.family].append(Errors.of(layout.estimate(), layout.options, record.result))
    return families


def by_kind(collectives: Iterable[tuple[str, int]]) -> Counter[str]:
    """Bytes by kind of collective; permutes count as all-gathers, which the compiler has split into them."""
    sums: Counter[str] = Counter()
    for kind, size in collectives:
        sums["all-gather" if kind == "collective-permute" else kind] += size
    return sums


@lru_cache
def bundled_model(name: str, position: int) -> Model:
    """Build a bundled model for sequences of `position` tokens."""
    return build_model(read_config(name, None), position)


@lru_cache
def has_experts(name: str) -> bool:
    """Whether a bundled model is a mixture of experts."""
    return "num_experts_per_tok" in read_config(name, None)
