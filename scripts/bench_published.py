"""python scripts/bench_published.py --output docs/benchmarks/published.md

Compares modelled step times with published ones that were measured on TPUs. For each run in published_runs.yaml it
compiles the program of ours that comes nearest (the same model, mesh, batch and types) and the best plan. Needs no TPU.

A program takes 6 to 16 minutes on 2 cores, and all of them half a day. So published.json, beside the table, keeps the
results; a program whose plan is unchanged is not compiled again, and with `--only` the others have the results that
they have.
"""

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
import yaml
from bench_page import page_parser, write_page
from bench_planner import TENSOR_PARALLEL, load, mesh, row, seconds
from planner_record import PUBLISHED, CompiledResult, compile_cases, find_records, write_records

from shardplan.config import PlanConfig
from shardplan.hardware import GIB, parse_slice
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import LEVANTER
from shardplan.model.registry import Model, build_model
from shardplan.plan.plan import Plan
from shardplan.plan.workload.checkpointing import NESTED, CheckpointPolicy
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan
from shardplan.search.open_choices import AUTO_CHECKPOINTING
from shardplan.verify.case import Case

RUNS = Path(__file__).with_name("published_runs.yaml")
STORED = {"embed": ("embed",), "outputs": ("mlp", "head_size", "vocab"), "nothing": ()}
"""Value of `stored` -> logical axes of stored parameters that are sharded beyond the compute mapping."""


@dataclass(frozen=True)
class Run:
    """A published run, and the program of ours that comes nearest."""

    name: str
    """Name of the model."""
    program: str
    """What it was run with."""
    source: str
    """Address of the publication."""
    published: str
    """The published figure."""
    seconds: float
    """Seconds of a step that follow from it."""
    slice: str
    mesh: tuple[int, int, int]
    """Sizes of replica, data and model."""
    sequences: int
    positions: int
    model: str
    """Bundled model that ours is made from."""
    checkpointing: str
    """What becomes of activations in the published program, as a value of `workload.gradient_checkpointing`."""
    recomputes: tuple[str, ...]
    """Matmuls of a layer that the published program computes again in the backward pass; see `layer_products`."""
    differs: str = ""
    """What the published program has besides that ours has not."""
    changes: dict[str, Any] = field(default_factory=dict)
    """Keys of config.json in which ours differs from the bundled model."""
    stored: str = "embed"
    """What shards stored parameters; see `STORED`."""
    stored_over: tuple[str, ...] = ("data",)
    """Mesh axes that shard stored parameters."""
    param_dtype: str = "float32"
    optimizer: str = "adamw"

    @property
    def label(self) -> str:
        """Model, slice and batch."""
        return f"{self.name} {self.slice} {self.sequences} x {self.positions}"

    @property
    def hf_config(self) -> dict[str, Any]:
        """config.json of ours."""
        return {**read_config(self.model, None, LEVANTER), **self.changes}

    def cases(self) -> list[Case]:
        """The published mesh, and the best plan."""
        return [self.nearest_case(), self.best_case()]

    def nearest_case(self) -> Case:
        """The program of ours that comes nearest to the published one."""
        return self._case("published", self._published())

    def best_case(self) -> Case:
        """The best plan."""
        config = self._config()
        config = replace(config, workload=replace(config.workload, gradient_checkpointing="auto", microbatches=None))
        return self._case("plan", make_plan(config, build_model(self.hf_config, self.positions)))

    def _case(self, name: str, plan: Plan) -> Case:
        return Case(f"{self.label}, {name}", plan, self.hf_config, options=plan.compiler_options)

    def _config(self) -> PlanConfig:
        config = load(self.model, self.slice, "train", self.sequences, self.positions)
        types = {"param_dtype": self.param_dtype, "optimizer": self.optimizer}
        return replace(config, workload=replace(config.workload, **types))

    def _published(self) -> Plan:
        config, model = self._config(), build_model(self.hf_config, self.positions)
        shape = dict(zip(("replica", "data", "model"), self.mesh, strict=True))
        compute = {"batch": [axis for axis in ("replica", "data") if shape[axis] > 1]}
        compute |= {axis: ["model"] for axis in TENSOR_PARALLEL if shape["model"] > 1}
        stored = {axis: [*compute.get(axis, ()), *self.stored_over] for axis in STORED[self.stored]}
        mappings = shape, compute, {**compute, **stored}
        plan = best_step(config, model, (self.checkpointing,), *mappings)
        return plan if plan.memory.fits else best_step(config, model, AUTO_CHECKPOINTING, *mappings)


def published_runs() -> list[Run]:
    """Return the runs of the table."""
    return [Run(**entry) for entry in yaml.safe_load(RUNS.read_text(encoding="utf-8"))]


def best_step(
    config: PlanConfig, model: Model, checkpointing: Sequence[str], shape: dict, compute: dict, params: dict
) -> Plan:
    """The plan of given mappings whose gradient checkpointing and microbatches are the fastest that fit.

    The plan with the lowest peak where none fits.
    """
    batch, groups = config.workload.batch, prod(shape[axis] for axis in compute["batch"])
    works = [
        replace(config.workload, gradient_checkpointing=kind, microbatches=parts)
        for kind in checkpointing
        for parts in range(1, batch // groups + 1)
        if batch % (parts * groups) == 0
    ]
    plans = [plan_given_mappings(replace(config, workload=work), model, shape, compute, params) for work in works]
    fitting = [plan for plan in plans if plan.memory.fits]
    if not fitting:
        return min(plans, key=lambda plan: plan.memory.peak)
    return min(fitting, key=lambda plan: plan.cost.step_seconds)


def layer_products(hf_config: Mapping[str, Any], positions: int) -> dict[str, float]:
    """Products for a token in the matmuls of a layer, by group; those of attention with the causal half of the keys."""
    hidden, mlp = hf_config["hidden_size"], hf_config["intermediate_size"]
    queries, keys = (hf_config[key] * hf_config["head_dim"] for key in ("num_attention_heads", "num_key_value_heads"))
    return {
        "query": hidden * queries,
        "key_value": 2 * hidden * keys,
        "attention": positions * queries,
        "output": queries * hidden,
        "gate_up": 2 * hidden * mlp,
        "down": mlp * hidden,
    }


NEEDED_AGAIN = {
    "query": {"query_proj"}, "key_value": {"key_proj", "value_proj"}, "attention": {"context"}, "output": {"attn_out"},
    "gate_up": {"gate_proj", "up_proj"},
}  # fmt: skip
"""Matmuls whose results the backward pass of a layer needs -> activations that hold them; no gradient needs the result
of the last one."""


def recomputed(checkpointing: str) -> list[str]:
    """Matmuls of a layer that a policy of ours computes again, by the names of `layer_products`."""
    policy = CheckpointPolicy.parse(checkpointing)
    if policy.kind == "save_all":
        return []
    again = [name for name, results in NEEDED_AGAIN.items() if not results <= {*policy.names}]
    return [*NEEDED_AGAIN, "down", *again] if policy.kind == NESTED else again


def step_text(plan: Plan) -> str:
    return f"{plan.workload.gradient_checkpointing}, {plan.workload.microbatches} microbatches"


@dataclass(frozen=True)
class Comparison:
    """A run, and the program of ours that comes nearest, compiled."""

    run: Run
    plan: Plan
    result: CompiledResult

    @property
    def ratio(self) -> float:
        """Modelled over measured time of a step."""
        return self.result.step_seconds / self.run.seconds

    @property
    def flops_ratio(self) -> float:
        """FLOPs of the layers of ours over those of the published program: recomputation differs."""
        products = layer_products(self.run.hf_config, self.run.positions)
        again = recomputed(self.plan.workload.gradient_checkpointing), self.run.recomputes
        ours, theirs = (3 * sum(products.values()) + sum(products[name] for name in names) for names in again)
        return ours / theirs

    @property
    def ratio_at_equal_flops(self) -> float:
        """Modelled over measured time of a step, if both computed as much."""
        return self.ratio / self.flops_ratio

    @property
    def estimated_ratio(self) -> float:
        """The planner's estimate over the measured time of a step."""
        return self.plan.cost.step_seconds / self.run.seconds

    def row(self) -> str:
        """Its row of the table."""
        run = self.run
        return row(
            f"[{run.name}]({run.source}), {run.program}", run.slice, mesh(self.plan),
            f"{run.sequences} x {run.positions}", run.published, f"{run.seconds:.4g}", step_text(self.plan),
            seconds(self.result) if self.result.seconds else self.result.outcome,
            f"{self.ratio:.2f}" if self.result.seconds else "-", f"{self.flops_ratio:.2f}",
            f"{self.ratio_at_equal_flops:.2f}" if self.result.seconds else "-", f"{self.estimated_ratio:.2f}",
            ", ".join(run.recomputes).replace("_", " "), run.differs,
        )  # fmt: skip


def statistics_table(comparisons: Sequence[Comparison]) -> str:
    """A row for all runs and one for each generation: median, spread and correlation of modelled and measured."""
    groups = {"all": list(comparisons)} if comparisons else {}
    for each in comparisons:
        groups.setdefault(parse_slice(each.run.slice).generation.name, []).append(each)
    columns = (
        "runs", "number", "modelled / measured, median", "lowest", "highest", "spread", "at equal FLOPs, median",
        "lowest", "highest", "spread", "correlation", "estimated / measured, median",
    )  # fmt: skip
    lines = [row(*columns), row(*["---"] * len(columns))]
    for name, members in groups.items():
        cells = [name, len(members)]
        for ratios in ([e.ratio for e in members], [e.ratio_at_equal_flops for e in members]):
            spread = statistics.stdev(map(math.log, ratios)) if len(ratios) > 1 else math.nan
            cells += map(figure, (statistics.median(ratios), min(ratios), max(ratios), spread))
        modelled = [each.result.seconds[2] / each.flops_ratio for each in members if each.result.seconds]
        measured = [utilisation * e.ratio_at_equal_flops for utilisation, e in zip(modelled, members, strict=True)]
        cells.append(f"{np.corrcoef(modelled, measured)[0, 1]:.2f}" if len(members) > 3 else "-")
        cells.append(f"{statistics.median(each.estimated_ratio for each in members):.2f}")
        lines.append(row(*cells))
    return "\n".join(lines)


def furthest_table(comparisons: Sequence[Comparison]) -> str:
    """The three runs that are furthest from their measurements at equal FLOPs, with the parts of the modelled step."""
    columns = (
        "run",
        "slice",
        "measured s",
        "at equal FLOPs",
        "our checkpointing",
        "modelled s",
        "compute s",
        "exposed",
    )
    lines = [row(*columns), row(*["---"] * len(columns))]
    for each in sorted(comparisons, key=lambda each: -abs(math.log(each.ratio_at_equal_flops)))[:3]:
        assert each.result.seconds
        step, computing, _ = each.result.seconds
        ratio, exposed = f"{each.ratio_at_equal_flops:.2f}", f"{1 - computing / step:.0%}"
        cells = (f"{each.run.seconds:.4g}", ratio, step_text(each.plan), f"{step:.3g}", f"{computing:.3g}", exposed)
        lines.append(row(each.run.name, each.run.slice, *cells))
    return "\n".join(lines)


def best_plans(
    comparisons: Sequence[Comparison],
    runs: Sequence[Run],
    results: Mapping[str, CompiledResult],
    plans: Mapping[str, Plan],
) -> dict[str, Any]:
    """The table of best plans, a row for each run, and its statistics."""
    own_ratios: dict[str, list[float]] = {}
    for each in comparisons:
        own_ratios.setdefault(parse_slice(each.run.slice).generation.name, []).append(each.ratio_at_equal_flops)
    columns = ("run", "slice", "measured s", "plan", "checkpointing", "modelled s", "exposed", "modelled / measured",
               "own ratio", "at the own ratio")  # fmt: skip
    lines = [row(*columns), row(*["---"] * len(columns))]
    ratios = []
    for run in runs:
        label = f"{run.label}, plan"
        result, plan = results.get(label), plans[label]
        cells = [f"{run.seconds:.4g}", mesh(plan), step_text(plan)]
        if result is None:
            cells += ["not compiled", "-", "-", "-", "-"]
        elif result.fits and result.seconds:
            ratio = result.step_seconds / run.seconds
            own = median(own_ratios.get(parse_slice(run.slice).generation.name, ()))
            ratios.append(ratio / own)
            step, computing, _ = result.seconds
            cells += [seconds(result), f"{1 - computing / step:.0%}", *map(figure, (ratio, own, ratio / own))]
        else:
            cells += ["does not fit", "-", "-", "-", "-"]
        lines.append(row(run.name, run.slice, *cells))
    known = [ratio for ratio in ratios if not math.isnan(ratio)]
    return {
        "plans": "\n".join(lines),
        "best_compiled": len(ratios),
        "best_median": figure(median(known)),
        "best_count": sum(ratio <= 1 for ratio in known),
        "best_known": len(known),
        "best_total": len(runs),
        "best_highest": figure(max(known, default=math.nan)),
        **predictions(runs, results, plans),
    }


def predictions(
    runs: Sequence[Run], results: Mapping[str, CompiledResult], plans: Mapping[str, Plan]
) -> dict[str, Any]:
    """The table of what is predicted of the best plans and what is compiled, and its statistics."""
    columns = (
        "run",
        "slice",
        "peak GiB",
        "predicted",
        "error",
        "host GiB",
        "predicted",
        "step s",
        "predicted",
        "error",
    )
    lines = [row(*columns), row(*["---"] * len(columns))]
    peak_errors, step_errors, same_host, refused = [], [], 0, 0
    for run in runs:
        label = f"{run.label}, plan"
        if label not in results:
            continue
        result, plan = results[label], plans[label]
        if not (result.fits and result.peak and result.seconds):
            refused += plan.memory.fits
            continue
        peak_errors.append(plan.memory.peak / result.peak - 1)
        step_errors.append(plan.cost.step_seconds / result.step_seconds - 1)
        same_host += plan.memory.host == result.host
        lines.append(
            row(
                run.name, run.slice, gib_text(result.peak), gib_text(plan.memory.peak), f"{peak_errors[-1]:+.1%}",
                gib_text(result.host or 0), gib_text(plan.memory.host),
                seconds(result), f"{plan.cost.step_seconds:.3g}", f"{step_errors[-1]:+.1%}",
            )
        )  # fmt: skip
    return {
        "predictions": "\n".join(lines),
        "predicted_number": len(peak_errors),
        "peak_median": median(list(map(abs, peak_errors))),
        "peak_worst": max(map(abs, peak_errors), default=math.nan),
        "step_median": median(list(map(abs, step_errors))),
        "step_worst": max(map(abs, step_errors), default=math.nan),
        "same_host": same_host,
        "refused": refused,
    }


def median(values: Sequence[float]) -> float:
    """The median; not a number where there are no values."""
    return statistics.median(values) if values else math.nan


def figure(value: float) -> str:
    """A ratio as text; a hyphen where it is not a number."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def gib_text(size: float) -> str:
    return f"{size / GIB:.2f}"


def main() -> None:
    parser = page_parser(__doc__, compiles=True)
    parser.add_argument("--only", default="", help="only the runs whose model and slice contain this text")
    arguments = parser.parse_args()
    runs = published_runs()
    cases = {run.label: run.cases() for run in runs}
    wanted = [case for run in runs if arguments.only in run.label for case in cases[run.label]]
    used = compile_cases(wanted, PUBLISHED, arguments.jobs, takes_earlier=True)
    if not arguments.only:
        write_records(used, PUBLISHED)
    every = [case for of_run in cases.values() for case in of_run]
    results = {}
    for case, record in zip(every, find_records(every, PUBLISHED), strict=True):
        if record is not None:
            results[case.label] = record.result
    plans = {case.label: case.plan for case in every}
    comparisons = [
        Comparison(run, plans[label], results[label]) for run in runs if (label := f"{run.label}, published") in results
    ]
    compiled = [each for each in comparisons if each.result.seconds]
    columns = (
        "run", "slice", "mesh", "sequences", "published", "measured s", "our checkpointing", "modelled s",
        "modelled / measured", "FLOPs, ours / published", "modelled / measured at equal FLOPs",
        "estimated / measured", "the published program recomputes", "what it has besides that ours has not",
    )  # fmt: skip
    table = [row(*columns), row(*["---"] * len(columns)), *(each.row() for each in comparisons)]
    single, several = (
        [e for e in compiled if (e.plan.workload.microbatches == 1) is wanted] for wanted in (True, False)
    )
    logarithms = [[math.log(e.result.step_seconds) for e in compiled], [math.log(e.run.seconds) for e in compiled]]
    text = TEMPLATE.format(
        runs="\n".join(table),
        statistics=statistics_table(compiled),
        log_correlation=np.corrcoef(*logarithms)[0, 1] if len(compiled) > 1 else math.nan,
        compiled=len(compiled),
        total=len(runs),
        single=figure(median([each.ratio_at_equal_flops for each in single])),
        singles=len(single),
        several=figure(median([each.ratio_at_equal_flops for each in several])),
        severals=len(several),
        furthest=furthest_table(compiled),
        **best_plans(compiled, runs, results, plans),
    )
    write_page(text, arguments.output)


TEMPLATE = """# Modelled steps against measured ones

Made by `python scripts/bench_published.py --output docs/benchmarks/published.md`; the runs and their sources are in
`scripts/published_runs.yaml`.

Each row is a published training run that was measured on TPUs, and the program of ours that comes nearest: the same
numbers of the model, mesh, batch, types and [policy of gradient checkpointing](../howto/levanter.md), splash attention,
with the step that `shardplan.verify` models. "Estimated" is what the planner predicts without the compiler. Where the
published policy does not fit, ours is the fastest that does by that estimate, and so are the microbatches.
Published FLOP/s become seconds by the publication's own count. Models without a released config.json are Llamas with
the published numbers; an MLP without gate becomes one with gate and as many parameters.

"FLOPs" is what our layers compute over what theirs do; the next column is the ratio of times divided by it. Ours keeps
what a kernel needs beside the result of attention, so that it is not computed again where the result is kept.

{runs}

## Statistics

Spread is the standard deviation of the logarithm; correlation is between utilisations of the FLOPs that both compute.
Logarithms of step times correlate with {log_correlation:.3f}, since they differ a hundredfold.

{statistics}

## What the numbers say

- {compiled} of {total} are compiled. With equal FLOPs and without microbatches the model is {single} times the measured
  time (median of {singles} runs), with microbatches {several} times (median of {severals}). Ours needs them, with
  gathers of parameters and sums of gradients for each, where published programs shard activations over `tensor`.
- Models of 2023 on v4, v5e and v5p have MLPs without gate, while ours has one, with a further elementwise pass. What
  that costs was not measured.
- Gathers over 512 devices of v5p are modelled as all-reduces of zero-padded shards, because this compiler makes them
  so; whether the compiler of the publication did is not known.

The three furthest at equal FLOPs:

{furthest}

## The best plan

For each run, the plan with `workload.gradient_checkpointing auto` on the same slice, for the same batch and types: the
mesh, what becomes of activations, and microbatches are the planner's. {best_compiled} of {best_total} are compiled.
"Own ratio" is the median of the model at equal FLOPs for the generation, in the table of statistics: what the model
takes for a program that is measured as 1. Divided by it, the {best_known} plans that have one are {best_median} times
as long as the published runs in the median; {best_count} of them are at most as long, and the longest is
{best_highest} times.

{plans}

"Exposed" is the part of the modelled step in which a device waits for transfers. [The log](../log.md#activations) has
what the plans above 1.00 wait for.

## What is predicted of these plans

{predicted_number} of them, with what they keep, move to the host, and compute again. The peak of a device is
{peak_median:.1%} off in the median and {peak_worst:.1%} at worst, the step {step_median:.1%} and {step_worst:.1%};
bytes in the memory of the host are exact in {same_host}. The compiler refuses {refused} that are predicted to fit.

{predictions}
"""

if __name__ == "__main__":
    main()
