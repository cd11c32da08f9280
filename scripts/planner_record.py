"""Layouts that JSON files in docs/benchmarks keep with what the compiler made of them, and their estimates.

A record has all that decides a program, so that the planner can estimate it again without a search: the unit test
tests/unit/test_accuracy.py does so for every record, and fails if a change of the cost model makes a family worse.
"""

import dataclasses
import json
import math
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from shardplan import config as configuration
from shardplan.config.sections import CompilerConfig
from shardplan.cost.calibration import load_calibration
from shardplan.cost.roofline import step_tasks
from shardplan.cost.sharding import ShardingAssignment
from shardplan.experts.method import ExpertMethod
from shardplan.experts.planned_model import with_planned_experts
from shardplan.hardware import parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model, build_model
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.plan.plan import Plan
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import Step
from shardplan.report.plan.verdicts import reason_text
from shardplan.search.given_plan import assignment_of, plan_given_mappings
from shardplan.search.result.compiler_options import EARLY_HOST_COPIES, TILE_MEMORY
from shardplan.verify.cache import code_digest, digest
from shardplan.verify.case import Case
from shardplan.verify.run import verify
from shardplan.verify.verdict import Outcome, Verdict

BENCHMARKS = Path(__file__).parents[1] / "docs" / "benchmarks"
PLANNER = BENCHMARKS / "planner.json"
"""Programs of scripts/bench_planner.py."""
PUBLISHED = BENCHMARKS / "published.json"
"""Programs of scripts/bench_published.py."""
EXPERTS = BENCHMARKS / "experts.json"
"""Programs of scripts/bench_experts.py."""
CALIBRATION = BENCHMARKS / "calibration.json"
"""Programs of scripts/fit_planner.py, to which the factors of the cost model are fitted."""
READING = ("verify/**/*", "hardware/*")
"""Modules of shardplan that read what the compiler returns, as glob patterns of their paths without suffix."""
COMPILE_SECONDS = 7200
"""Time limit of one compile: large tiles take the compiler long on a slow machine."""
RING_FAMILY = "ring attention"
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
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json in which the model differs from the bundled one."""
    experts: dict[str, Any] | None = None
    """How routed experts are computed; None for a model without, and for Levanter's own blocks."""

    @classmethod
    def of(cls, case: Case) -> "Layout":
        """The layout of a case of a bundled model, or of a model that differs from it in numbers."""
        plan = case.plan
        assert plan.model.config is not None
        bundled = read_config(plan.model.config, None)
        changes = {key: value for key, value in case.hf_config.items() if bundled.get(key) != value}
        attention = dataclasses.asdict(plan.attention)
        parts = plan.mesh, plan.compute_mapping, plan.param_mapping, attention, dict(case.options)
        experts = None if plan.experts is None else vars(plan.experts)
        return cls(case.label, plan.model.config, plan.hardware.slice, vars(plan.workload), *parts, changes, experts)

    @property
    def text(self) -> str:
        """All of it as text, to compare."""
        return json.dumps(dataclasses.asdict(self))

    @property
    def hf_config(self) -> dict[str, Any]:
        """The model's config.json."""
        return {**read_config(self.model, None), **self.changes}

    @property
    def family(self) -> str:
        """The kind of program, by which errors are reported: ring attention, experts, or dense with the kind of step.

        Experts are those of Levanter's own blocks, which are not sharded, or sharded ones.

        The price of a ring's hops is that of measured runs, which the compiler's cycles exceed (docs/log.md).
        """
        if self.attention["ring"] > 1 and self.attention["strategy"] in (Strategy.RING, Strategy.HYBRID):
            return RING_FAMILY
        if self.experts is not None:
            return "sharded experts"
        return "experts" if "num_experts_per_tok" in self.hf_config else f"dense {self.workload['kind']}"

    @cached_property
    def estimate(self) -> Plan:
        """What the planner estimates of the layout."""
        sections = {"model": {"config": self.model}, "hardware": {"slice": self.slice}, "workload": self.workload}
        config, model = configuration.load_config(**sections), self.model_of_step
        kinds = {name: AttentionPlan(**kind) for name, kind in self.attention["kinds"].items()}
        attention = AttentionPlan(**{**self.attention, "kinds": kinds})
        experts = None if self.experts is None else ExpertMethod(**self.experts)
        return plan_given_mappings(config, model, self.mesh, self.compute, self.params, attention, experts)

    @property
    def model_of_step(self) -> Model:
        """The model, with experts as they are computed."""
        model = _model(json.dumps(self.hf_config), self.workload["position"])
        return model if self.experts is None else with_planned_experts(model)

    @cached_property
    def step(self) -> Step:
        """The traced step."""
        return plan_step(self.model_of_step, self.estimate.workload.resolve())

    @cached_property
    def assignment(self) -> ShardingAssignment:
        """The sharding of every array of the step."""
        return assignment_of(self.estimate, self.step)

    @property
    def estimated_seconds(self) -> float | None:
        """What the planner estimates for a step; None if the program has other options than its plan.

        Programs that were compiled with the compiler's own tiles are estimated for these. When copies of hosts start
        has no price.
        """
        planned, own = (_without(each, *EARLY_HOST_COPIES) for each in (self.estimate.compiler_options, self.options))
        if own == planned:
            return self.estimate.cost.step_seconds
        if own != _without(planned, TILE_MEMORY):
            return None
        hardware = parse_slice(self.slice)
        factors = load_calibration(hardware.generation.name, larger_tiles=False).of(self.step)
        return sum(seconds.total for *_, seconds in step_tasks(self.step, self.assignment, hardware, factors))


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
    host: int | None = None
    """Bytes of a device's temporaries in the memory of its host; None in records of before this was kept."""

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
            memory.host if memory else None,
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

    key: str
    """Digest of the program and of the code that reads what the compiler made of it, see `record_key`."""
    layout: Layout
    result: CompiledResult


@dataclass(frozen=True)
class Errors:
    """Estimated over compiled values, less 1; None where the compiler gave none."""

    peak: float | None
    """Of the peak memory of a device."""
    received: float | None
    """Of the bytes that a device receives in a step; None too where the estimate does not fit, because the compiler
    then recomputes and gathers again until its program fits."""
    by_kind: dict[str, float]
    """Kind of collective with at least `MIN_PART` of the bytes -> error of its bytes."""
    step: float | None
    """Of the time of a step; None likewise, and where no estimate is for the compiler options."""

    @classmethod
    def of(cls, plan: Plan, seconds: float | None, result: CompiledResult) -> "Errors":
        """The errors of the estimates of `plan` against what was compiled.

        Args:
            seconds: the estimate of the step; None if there is none for the options that were compiled with.
        """
        peak = plan.memory.peak / result.peak - 1 if result.peak else None
        if result.seconds is None or not plan.memory.fits:
            return cls(peak, None, {}, None)
        predicted = by_kind((each.kind, each.bytes) for each in plan.cost.collectives)
        compiled = by_kind((kind, size) for kind, _, size, _ in result.collectives)
        total = sum(compiled.values())
        large = [kind for kind in compiled if compiled[kind] > MIN_PART * total]
        step = None if seconds is None else seconds / result.step_seconds - 1
        return cls(
            peak,
            sum(predicted.values()) / total - 1 if total else None,
            {kind: predicted[kind] / compiled[kind] - 1 for kind in large},
            step,
        )


def read_records(path: Path) -> dict[str, Record]:
    """Read a file of records: key -> record."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return {key: Record(key, Layout(**row["layout"]), CompiledResult(**row["result"])) for key, row in rows.items()}


def write_records(records: Iterable[Record], path: Path) -> None:
    """Write a file of records, a line for each; programs that exceeded a limit of this machine are left out."""
    decided = {record.key: record for record in records if record.result.outcome != Outcome.UNDECIDED}
    lines = []
    for key in sorted(decided):
        row = {"layout": dataclasses.asdict(decided[key].layout), "result": dataclasses.asdict(decided[key].result)}
        lines.append(f"{json.dumps(key)}: {json.dumps(row)}")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def record_key(case: Case) -> str:
    """Digest of the program of a case, and of the code that reads what the compiler made of it."""
    return f"{digest(case)[:24]} {code_digest(READING)[:8]}"


def record_keys(cases: Sequence[Case], records: Mapping[str, Record], takes_earlier: bool) -> list[str]:
    """The key of each case: of the program, or of an earlier result that counts for it.

    Args:
        takes_earlier: whether a result of the same layout counts that was compiled by earlier code or packages.
    """
    keys = [record_key(case) for case in cases]
    if not takes_earlier:
        return keys
    by_layout = {record.layout.text: record.key for record in records.values()}
    return [
        key if key in records else by_layout.get(Layout.of(case).text, key)
        for key, case in zip(keys, cases, strict=True)
    ]


def find_records(cases: Sequence[Case], path: Path) -> list[Record | None]:
    """The results that the file `path` holds of cases, those of earlier code too; None where there is none."""
    records = read_records(path)
    return [records.get(key) for key in record_keys(cases, records, takes_earlier=True)]


def compile_cases(cases: Sequence[Case], path: Path, jobs: int | None, takes_earlier: bool = False) -> list[Record]:
    """Compile the cases that the file `path` does not hold yet, add each result to it, and return all their records.

    Args:
        jobs: compiles at a time.
        takes_earlier: whether a result of the same layout counts that was compiled by earlier code or packages.
    """
    records = read_records(path)
    keys = {id(case): key for case, key in zip(cases, record_keys(cases, records, takes_earlier), strict=True)}
    lock = threading.Lock()

    def keep(case: Case, verdict: Verdict) -> None:
        _report(case, verdict)
        with lock:
            key = keys[id(case)]
            records[key] = Record(key, Layout.of(case), CompiledResult.of(verdict))
            write_records(records.values(), path)

    compiler = CompilerConfig(jobs=jobs, seconds=COMPILE_SECONDS)
    verify([case for case in cases if keys[id(case)] not in records], compiler, keep)
    return [records[keys[id(case)]] for case in cases]


def _report(case: Case, verdict: Verdict) -> None:
    time_text = f"{verdict.time.step_seconds:.4g} of {case.plan.cost.step_seconds:.4g} s" if verdict.time else ""
    reason = reason_text(verdict.reason)[:80]
    print(f"{case.label}: {verdict.outcome} {time_text} {reason}", file=sys.stderr, flush=True)


def errors_by_family(records: Iterable[Record]) -> dict[str, list[Errors]]:
    """Estimate every layout anew: family -> errors of its layouts."""
    families: defaultdict[str, list[Errors]] = defaultdict(list)
    for record in records:
        layout = record.layout
        families[layout.family].append(Errors.of(layout.estimate, layout.estimated_seconds, record.result))
    return families


def by_kind(collectives: Iterable[tuple[str, int]]) -> Counter[str]:
    """Bytes by kind of collective; permutes count as all-gathers, which the compiler has split into them."""
    sums: Counter[str] = Counter()
    for kind, size in collectives:
        sums["all-gather" if kind == "collective-permute" else kind] += size
    return sums


def _without(options: Mapping[str, str], *names: str) -> dict[str, str]:
    return {name: value for name, value in options.items() if name not in names}


@lru_cache
def _model(hf_config: str, position: int) -> Model:
    """Build a model, of its config.json as text, for sequences of `position` tokens."""
    return build_model(json.loads(hf_config), position)
