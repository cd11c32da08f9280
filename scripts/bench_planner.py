"""python scripts/bench_planner.py --output docs/benchmarks/planner.md

Measures solve times of the planner; compares predicted with compiled memory, bytes and time; and compares compiled step
times of the plan, of the next best plans, and of the usual mapping of 405B on v4-256. Needs no TPU.
Compiling everything takes an hour on 2 cores; planner.json, beside the tables, keeps the results, and a program in
it is compiled again only if package versions or the code have changed.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_page import page_parser, write_page
from planner_record import (
    MIN_PART,
    PLANNER,
    CompiledResult,
    Errors,
    compile_cases,
    errors_by_family,
    read_records,
    record_key,
    write_records,
)

from shardplan import config as configuration
from shardplan.config import PlanConfig
from shardplan.errors import InfeasibleError
from shardplan.hardware import GIB, parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import Model, build_model
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan, rank_plans
from shardplan.verify.case import Case

POSITION = 4096
EVAL_DEVICES_PER_SEQUENCE = 8
SEARCHES = 10
"""Searches of which the table of solve times has the fastest."""
ALTERNATIVES = 4

SOLVE = (
    "llama-3.1-405b v4-256 eval 16", "llama-3.1-405b v5p-1024 train 512", "llama-3.1-405b v4-8192 eval 512",
    "llama-3.1-405b v5p-8192 train 4096", "llama-3.1-70b v6e-256 train 256", "llama-3.1-70b v4-8192 train 4096",
    "mixtral-8x7b v5p-8192 train 4096", "qwen3-32b v5p-2048 train 1024", "olmo2-32b v5p-8192 eval 512",
    "gemma-7b v5p-8192 train 4096", "mistral-7b-v0.3 v5p-8192 train 4096", "llama-3.1-8b 16xv6e-256 train 4096",
)  # fmt: skip
"""Model, slice, step, batch. v4-8192 and v5p-8192 are 4096 devices."""

ESTIMATES = {
    "llama-3.1-70b": "v5e-256 tpu7x-128",
    "llama-3.1-405b": "v6e-256",
    "mixtral-8x7b": "v5p-64",
    "olmo2-32b": "v4-128",
    "gemma-7b": "v6e-16",
    "mistral-7b-v0.3": "v5e-16",
}
"""Model -> slices, for evaluation and training each."""
MICROBATCHED = ("llama-3.1-8b v5p-16 32 4", "llama-3.1-8b v5e-64 256 8", "llama-3.1-70b v6e-64 256 4")
"""Model, slice, batch, microbatches: training."""

REGRET = (
    "llama-3.1-405b v4-256 eval 16", "llama-3.1-70b v6e-64 eval 8", "llama-3.1-70b v4-128 eval 8",
    "llama-3.1-8b v5e-32 eval 8", "qwen3-32b v5p-64 eval 8", "gemma-7b v4-32 eval 8", "llama-3.1-8b v5p-16 train 8",
    "mistral-7b-v0.3 v5e-16 eval 8",
)  # fmt: skip

LAYOUTS = {
    "llama-3.1-70b v5e-64 eval": ("fsdp of outputs", "tensor parallelism of 8"),
    "mixtral-8x7b v5e-64 eval": ("tensor parallelism of 8", "two mesh axes"),
    "olmo2-32b v6e-32 eval": ("tensor parallelism of 2", "two mesh axes"),
    "mistral-7b-v0.3 v4-32 eval": ("replicated over replica", "fsdp"),
    "llama-3.1-8b tpu7x-16 eval": ("tensor parallelism of 2", "replicated over replica"),
    "gemma-7b v5p-32 train": ("fsdp", "tensor parallelism of 8"),
    "qwen3-32b v4-64 train": ("fsdp of outputs", "two mesh axes"),
    "llama-3.1-8b v5e-32 train": ("replicated over replica", "tensor parallelism of 2"),
    "mixtral-8x7b v6e-32 train": ("fsdp of outputs", "fsdp"),
}
"""Model, slice, step, with one sequence per device -> names in STYLES; each style has three programs."""
TENSOR_PARALLEL = ("mlp", "heads", "kv_head", "vocab")
STYLES: dict[str, tuple[int, int, dict[str, list[str]]]] = {
    "fsdp": (1, 1, {"embed": ["data"]}),
    "fsdp of outputs": (1, 1, {"mlp": ["data"], "head_size": ["data"], "vocab": ["data"]}),
    "tensor parallelism of 2": (1, 2, {"embed": ["data"]}),
    "tensor parallelism of 8": (1, 8, {"embed": ["data"]}),
    "replicated over replica": (4, 1, {"embed": ["data"]}),
    "two mesh axes": (2, 2, {"embed": ["data"], "mlp": ["replica"], "head_size": ["replica"], "vocab": ["replica"]}),
}
"""Layout written by hand -> sizes of replica and model, and what shards parameters beyond the compute mapping."""


def load(
    model: str, slice_name: str, kind: str, batch: int, position: int = POSITION, model_class: str | None = LEVANTER
) -> PlanConfig:
    """The configuration of a training step in one microbatch, stored in float32, or of an evaluation in bfloat16.

    Args:
        model_class: computes the model; None for the class that commands take.
    """
    settings = {
        "model.config": model,
        "hardware.slice": slice_name,
        "workload.kind": kind,
        "workload.batch": batch,
        "workload.position": position,
        "workload.param_dtype": "float32" if kind == "train" else "bfloat16",
        "workload.microbatches": 1,
    }
    if model_class is not None:
        settings["model.levanter_class"] = model_class
    return configuration.parse_config([f"--{key}={value}" for key, value in settings.items()])


def usual_batch(slice_name: str, kind: str) -> int:
    """Number of sequences: one per device for training, one per EVAL_DEVICES_PER_SEQUENCE for evaluation."""
    devices = parse_slice(slice_name).devices
    return devices if kind == "train" else max(8, devices // EVAL_DEVICES_PER_SEQUENCE)


def planned_case(label: str, config: PlanConfig) -> Case:
    """The plan as a case to compile; if none fits, the plan with the smallest peak memory."""
    hf_config, built = build(config)
    plan = make_plan(config, built, nearest_miss=True)
    return Case(label, plan, hf_config, options=plan.compiler_options)


def build(config: PlanConfig) -> tuple[dict, Model]:
    hf_config = read_config(config.model.config, None, config.model_class)
    return hf_config, build_model(hf_config, config.workload.position)


@dataclass
class Bench:
    """A run of this script."""

    jobs: int | None
    """Compiles at a time."""
    only: str
    """Text that the label of a case must contain."""
    path: Path = PLANNER
    """The file of records."""
    used: set[str] = field(default_factory=set)
    """Keys of the records that the tables use."""

    def compile(self, cases: Sequence[Case]) -> list[CompiledResult]:
        """Compile the cases that the file does not hold yet, add each result to it, and return all results."""
        self.used |= {record_key(case) for case in cases}
        return [record.result for record in compile_cases(cases, self.path, self.jobs)]

    def drop_unused(self) -> None:
        """Leave out of the file the records that no table uses."""
        write_records((each for key, each in read_records(self.path).items() if key in self.used), self.path)


ERROR_COLUMNS = (
    "peak GiB predicted", "compiled", "error", "GiB received predicted", "compiled", "error", "step s predicted",
    "modelled", "error",
)  # fmt: skip
"""What is compared of an estimate and of what the compiler made of it."""


def solve_times(bench: Bench) -> str:
    lines = table("devices", "trace s", "search s", "step s", "proven optimal")
    for text in SOLVE:
        model, slice_name, kind, batch = text.split()
        config = load(model, slice_name, kind, int(batch))
        _, built = build(config)
        started = time.perf_counter()
        try:
            plan = make_plan(config, built)
        except InfeasibleError:
            lines.append(row(model, slice_name, kind, batch, "", "", "", "does not fit", ""))
            continue
        trace, search = time.perf_counter() - started - plan.search.seconds, plan.search
        # another program on the machine can only make it slower
        fastest = min(search.seconds, *(make_plan(config, built).search.seconds for _ in range(SEARCHES - 1)))
        numbers = (f"{trace:.2f}", f"{fastest:.2f}", f"{plan.cost.step_seconds:.3g}", search.proven_optimal)
        lines.append(row(model, slice_name, kind, batch, plan.hardware.devices, *numbers))
    return "\n".join(lines)


def estimates(bench: Bench) -> str:
    settings = []
    for kind in ("eval", "train"):
        for model, slices in ESTIMATES.items():
            for slice_name in slices.split():
                batch = usual_batch(slice_name, kind)
                settings.append((f"{model} {slice_name} {kind}", load(model, slice_name, kind, batch)))
    for text in MICROBATCHED:
        model, slice_name, sequences, parts = text.split()
        config = load(model, slice_name, "train", int(sequences))
        work = replace(config.workload, microbatches=int(parts))
        settings.append((f"{model} {slice_name} train, {parts} microbatches", replace(config, workload=work)))
    return estimates_table([planned_case(label, config) for label, config in settings if bench.only in label], bench)


def layouts(bench: Bench) -> str:
    """Hand-written layouts, most of them far from the best: a search decides by the errors of these as well."""
    cases = []
    for text, styles in LAYOUTS.items():
        model, slice_name, kind = text.split()
        devices = parse_slice(slice_name).devices
        config = load(model, slice_name, kind, devices)
        hf_config, built = build(config)
        for name in styles:
            replica, groups, params = STYLES[name]
            shape = {"replica": replica, "data": devices // replica // groups, "model": groups}
            compute = {"batch": [axis for axis in ("replica", "data") if shape[axis] > 1]}
            compute |= {axis: ["model"] for axis in TENSOR_PARALLEL if groups > 1}
            axes = (axis for axis in {**compute, **params} if axis != "batch")
            stored = {axis: [*compute.get(axis, ()), *params.get(axis, ())] for axis in axes}
            plan = plan_given_mappings(config, built, shape, compute, stored)
            cases.append(Case(f"{text}, {name}", plan, hf_config, options=plan.compiler_options))
    return estimates_table([case for case in cases if bench.only in case.label], bench)


def estimates_table(cases: Sequence[Case], bench: Bench) -> str:
    """A row for each case with estimated and compiled memory, bytes and time."""
    lines = table("mesh", "predicted to fit", "verdict", *ERROR_COLUMNS)
    for case, result in zip(cases, bench.compile(cases), strict=True):
        plan, (model, slice_name, kind) = case.plan, case.label.split(maxsplit=2)
        cells = [mesh(plan), "yes" if plan.memory.fits else "no", result.outcome, *error_cells(case, result)]
        lines.append(row(model, slice_name, kind, plan.workload.batch, *cells))
    return "\n".join(lines)


def error_cells(case: Case, result: CompiledResult) -> list[str]:
    """The cells of `ERROR_COLUMNS` for a case, as far as the compiler got."""
    plan, cells = case.plan, []
    seconds = plan.cost.step_seconds if case.options == plan.compiler_options else None
    errors = Errors.of(plan, seconds, result)
    if result.peak:
        cells += [f"{plan.memory.peak / GIB:.2f}", f"{result.peak / GIB:.2f}", error_text(errors.peak)]
    if result.seconds:
        received = [sum(each.bytes for each in plan.cost.collectives), sum(each[2] for each in result.collectives)]
        cells += [*(f"{size / GIB:.2f}" for size in received), error_text(errors.received)]
        cells += [f"{plan.cost.step_seconds:.3g}", f"{result.step_seconds:.3g}", error_text(errors.step)]
    return cells


def accuracy() -> str:
    """Errors by family, of the plans that the search chose and of all other layouts of planner.json."""
    lines = [
        row("family", "layouts", "memory", "worst", "bytes by kind", "bytes of all kinds, worst", "step", "worst"),
        row(*["---"] * 8),
    ]
    families = errors_by_family(read_records(PLANNER).values())
    everything = [errors for members in families.values() for errors in members]
    for family, errors in [*sorted(families.items()), ("all", everything)]:
        sizes = [abs(e.peak) for e in errors if e.peak is not None]
        kinds = [abs(error) for e in errors for error in e.by_kind.values()]
        totals = [abs(e.received) for e in errors if e.received is not None]
        steps = [abs(e.step) for e in errors if e.step is not None]
        numbers = [*median_and_worst(sizes), median_and_worst(kinds)[0], median_and_worst(totals)[1]]
        lines.append(row(family, len(errors), *numbers, *median_and_worst(steps)))
    return "\n".join(lines)


def median_and_worst(errors: Sequence[float]) -> tuple[str, str]:
    """Return two cells of a table; dashes where no program has this error."""
    return (f"{statistics.median(errors):.1%}", f"{max(errors):.1%}") if errors else ("-", "-")


def error_text(error: float | None) -> str:
    return "-" if error is None else f"{error:+.1%}"


def regret(bench: Bench) -> str:
    lines = table("plan: mesh", "modelled s", "predicted s", "fastest: mesh", "modelled s", "regret", "compiled")
    for text in REGRET:
        if bench.only not in text:
            continue
        model, slice_name, kind, batch = text.split()
        config = load(model, slice_name, kind, int(batch))
        hf_config, built = build(config)
        plans = rank_plans(config, 1 + ALTERNATIVES, built)
        cases = [
            Case(f"{text} {i} {mesh(plan)}", plan, hf_config, options=plan.compiler_options)
            for i, plan in enumerate(plans)
        ]
        times = [result.step_seconds if result.fits else math.inf for result in bench.compile(cases)]
        best, mine = min(times), times[0]
        winner, predicted = mesh(plans[times.index(best)]), plans[0].cost.step_seconds
        numbers = (f"{mine:.4g}", f"{predicted:.4g}", winner, f"{best:.4g}", f"{mine / best - 1:.1%}")
        lines.append(row(model, slice_name, kind, batch, mesh(plans[0]), *numbers, len(cases)))
    return "\n".join(lines)


def usual(bench: Bench) -> str:
    """405B on v4-256: FSDP on embed with tensor parallelism of 8, and the plan, each with two sets of options."""
    config = load("llama-3.1-405b", "v4-256", "eval", 16)
    hf_config, built = build(config)
    compute = {"batch": ["data"], "mlp": ["model"], "heads": ["model"], "kv_head": ["model"], "vocab": ["model"]}
    params = {**compute, "embed": ["data"]}
    by_hand = plan_given_mappings(config, built, {"replica": 1, "data": 16, "model": 8}, compute, params)
    plan = make_plan(config, built)
    cases = [
        Case(label, each, hf_config, options=options)
        for label, each, options in (
            ("usual, default options", by_hand, {}),
            ("usual, the plan's options", by_hand, plan.compiler_options),
            ("plan, default options", plan, {}),
            ("plan", plan, plan.compiler_options),
        )
    ]
    lines = [
        row("", "mesh", "peak GiB", "modelled step s", "compute s", "exposed transfers s", "MFU"),
        row(*["---"] * 7),
    ]
    results = bench.compile(cases)
    for case, result in zip(cases, results, strict=True):
        assert result.peak and result.seconds
        step, computing, mfu = result.seconds
        numbers = (f"{each:.3g}" for each in (step, computing, step - computing))
        lines.append(row(case.label, mesh(case.plan), f"{result.peak / GIB:.2f}", *numbers, f"{mfu:.1%}"))
    slow, fast = results[0].step_seconds, results[-1].step_seconds
    sums = [each[2:] for each in results[-1].collectives if each[:2] == ["all-reduce", "model"]]
    positions = " x ".join(plan.compute_mapping["position"])
    count, gib = sum(number for _, number in sums), sum(size for size, _ in sums) / GIB
    text = (
        f"The plan takes {fast / slow:.0%} of the time of the first row: it is {slow / fast - 1:.0%} faster. Its\n"
        f"exposed transfers are all-reduces over `model`: {count} of them, with {gib:.0f} GiB received by every\n"
        f"device; the next matmul needs their results. Positions are sharded over `{positions}`, and attention\n"
        "gathers keys and values (sequence parallelism), so that `model` has half the size that it has in the usual\n"
        "mapping, and these all-reduces have less than half the bytes."
    )
    return "\n".join([*lines, "", text])


def table(*columns: str) -> list[str]:
    """The header lines of a table whose rows begin with model, slice, step and batch."""
    names = ("model", "slice", "step", "batch", *columns)
    return [row(*names), row(*("---" for _ in names))]


def row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def mesh(plan: Plan) -> str:
    """Text of the sizes of the mesh axes, and of the mesh axes that shard positions."""
    along = [axis for axis in plan.compute_mapping.get(plan.model.position, ()) if plan.mesh[axis] > 1]
    sizes = " x ".join(map(str, plan.mesh.values()))
    return f"{sizes}, positions on {' x '.join(along)}" if along else sizes


def seconds(result: CompiledResult) -> str:
    return f"{result.step_seconds:.3g}" if result.seconds else "-"


TABLES: dict[str, Callable[[Bench], str]] = {
    "solve": solve_times,
    "usual": usual,
    "regret": regret,
    "estimates": estimates,
    "layouts": layouts,
}


def main() -> None:
    parser = page_parser(__doc__, compiles=True)
    parser.add_argument("--parts", default=" ".join(TABLES), help="which tables")
    parser.add_argument("--only", default="", help="only the cases whose 'model slice ...' contains this text")
    arguments = parser.parse_args()
    bench = Bench(arguments.jobs, arguments.only)
    parts = arguments.parts.split()
    made = {name: make(bench) if name in parts else LEFT_OUT for name, make in TABLES.items()}
    if not arguments.only and set(parts) == set(TABLES):
        bench.drop_unused()
    text = TEMPLATE.format(
        **made,
        accuracy=accuracy(),
        parts=" ".join(parts),
        alternatives=ALTERNATIVES,
        position=POSITION,
        min_part=MIN_PART,
        each=EVAL_DEVICES_PER_SEQUENCE,
        searches=SEARCHES,
    )
    write_page(text, arguments.output)


LEFT_OUT = "Not made in this run."

TEMPLATE = """# The planner, judged by the TPU compiler

Made by `python scripts/bench_planner.py --parts "{parts}" --output docs/benchmarks/planner.md`
with libtpu on a CPU machine with 2 cores.

Steps are those that `shardplan.verify` models ([beside measured ones](published.md)), compiled with the plan's options
unless a row names others. Models are Levanter's classes ([the decoder beside them](decoder.md)). A mesh is replica x
data x model; positions are sharded over the mesh axes named after it.

## Solve time

Without imports. The step is traced once per model and workload; the search is the shortest of {searches}.

{solve}

## 405B on v4-256, batch 16 x 4096, against the usual mapping

The usual mapping is FSDP on embed and tensor parallelism of 8 on heads, mlp and vocab. The last row has the plan's own
compiler options.

{usual}

## Regret

The plan and the {alternatives} next best candidates with another mesh, batch mapping or storage sharding of the
residual axis, all compiled. Regret: how much slower the plan is than the fastest.

{regret}

## Memory, bytes and time

Sequences of {position} tokens: one per device for training (AdamW, float32, computed in bfloat16), one per {each}
devices, at least 8, for evaluation (bfloat16).

{estimates}

## Layouts written by hand

Two for each of nine slices, one sequence of {position} tokens per device. Most are far from the best; the search
compares such layouts, too.

{layouts}

## Errors by family

All programs of this page; medians unless "worst". Bytes by kind: kinds of collectives with more than {min_part:.0%} of
a step's bytes. Bytes and steps of programs that are predicted not to fit are left out, because the compiler makes some
of them fit by computing and gathering again, and so are steps with other options than the estimates are for. A ring's
hops are priced as measured on v5p, elsewhere by the compiler's cycles ([the log](../log.md#attention)). Of the programs
that [the factors](calibration.md) are fitted to, three on tpu7x are worse in memory, all too low: 8B on tpu7x-32 stored
along outputs by 58%, Mistral 7B on two mesh axes of tpu7x-32 by 21%, and the training of Mixtral on tpu7x-64 by 9%;
[why](../log.md#memory).

{accuracy}
"""

if __name__ == "__main__":
    main()
