"""python scripts/bench_experts.py --output docs/benchmarks/experts.md

Compiles plans of models with routed experts for several generations, layouts of them written by hand, and for six cases
the plan with its 15 next best candidates: MFU, predicted against compiled memory, bytes and time, and regret. Needs no
TPU. Compiling everything takes two hours on 2 cores; experts.json, beside the tables, keeps the results, and a program
in it is compiled again only if package versions or the code have changed.
"""

import math
import os
from collections.abc import Callable, Sequence
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_page import page_parser, write_page
from bench_planner import ERROR_COLUMNS, POSITION, Bench, error_cells, load, median_and_worst, mesh, row, table
from planner_record import EXPERTS, RING_FAMILY, Errors, errors_by_family, read_records

from shardplan.config import PlanConfig
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import Model
from shardplan.plan.plan import Plan
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import build_configured, make_plan, rank_plans
from shardplan.verify.case import Case

ALTERNATIVES = 15
TARGETS = (
    "mixtral-8x7b v5p-64 eval 32", "mixtral-8x7b v5p-64 train 32", "mixtral-8x7b v6e-64 eval 64",
    "qwen3-235b-a22b v5p-64 eval 32", "deepseek-v3 v5p-128 eval 64", "kimi-k2 v5p-256 eval 64",
    "gpt-oss-120b v5p-64 eval 32",
)  # fmt: skip
"""Model, slice, step and batch of plans whose use of the devices is in the first table."""
PLANS = (
    "mixtral-8x7b v4-64 eval 32", "mixtral-8x22b v5p-128 eval 64", "qwen3-30b-a3b v4-64 eval 32",
    "qwen3-30b-a3b v6e-32 train 32", "qwen3-30b-a3b v5p-32 train 32", "gpt-oss-20b v5e-16 eval 16",
    "gpt-oss-120b v6e-64 eval 64", "deepseek-v2-lite v5e-32 eval 32", "glm-4.5-air tpu7x-64 eval 32",
)  # fmt: skip
"""Further plans."""
LAYOUTS = (
    "mixtral-8x7b v5p-64 eval 32 1x8x4 data model gather_tokens",
    "mixtral-8x7b v5p-64 eval 32 4x8x1 data - exchange_tokens",
    "mixtral-8x7b v5p-64 eval 32 4x8x1 - data gather_tokens",
    "mixtral-8x7b v6e-64 eval 64 8x8x1 data - gather_tokens",
    "mixtral-8x7b v4-64 eval 32 4x8x1 data replica gather_tokens",
    "qwen3-30b-a3b v5p-32 eval 32 2x8x1 data - exchange_tokens",
    "qwen3-30b-a3b v5p-32 eval 32 2x8x1 data - gather_weights",
    "mixtral-8x7b v5p-64 eval 32 4x8x1 data - gather_weights",
    "qwen3-30b-a3b v4-64 eval 32 4x8x1 data - gather_weights",
    "qwen3-30b-a3b v6e-32 eval 32 4x8x1 data - gather_weights",
    "qwen3-30b-a3b v4-64 eval 32 1x32x1 data - gather_tokens",
    "qwen3-30b-a3b v6e-32 eval 32 4x8x1 data replica gather_tokens",
    "qwen3-30b-a3b v5p-32 train 32 1x16x1 data - gather_tokens",
    "gpt-oss-20b v5p-16 eval 16 1x8x1 data - exchange_tokens",
    "gpt-oss-20b v6e-16 eval 16 2x8x1 data - gather_tokens",
    "deepseek-v2-lite v5p-32 eval 32 2x8x1 data - gather_tokens",
    "olmoe-1b-7b v5e-16 eval 16 2x8x1 data - gather_tokens",
    "olmoe-1b-7b v5p-16 train 16 1x8x1 data - exchange_tokens",
)
"""Model, slice, step, batch, replica x data x model, mesh axes of experts and of their hidden states (- for none), and
strategy; the batch is sharded over replica and data, and other parameters are stored along data."""
REGRET = (
    "mixtral-8x7b v5p-64 eval 32", "qwen3-30b-a3b v5p-32 eval 32", "gpt-oss-20b v6e-16 eval 16",
    "deepseek-v2-lite v5p-16 eval 16", "olmoe-1b-7b v4-16 eval 16", "qwen3-30b-a3b v5p-32 train 32",
)  # fmt: skip
"""Cases whose next best candidates are compiled, too."""


def load_case(text: str) -> tuple[PlanConfig, str]:
    """The configuration of 'model slice step batch', and what follows them."""
    model, slice_name, kind, batch, *others = text.split()
    return load(model, slice_name, kind, int(batch), model_class=None), " ".join(others)


def build(config: PlanConfig) -> tuple[dict[str, Any], Model]:
    """The config.json of the model, and the model: for training of Mixtral, Levanter's with blocks of shardplan."""
    hf_config = read_config(config.model.config, None, config.model_class)
    return hf_config, build_configured(config, hf_config)


def planned(texts: Sequence[str]) -> list[Case]:
    """The plan of each text; if none fits, the one with the smallest peak memory."""
    cases = []
    for text in texts:
        config, _ = load_case(text)
        hf_config, model = build(config)
        plan = make_plan(config, model, nearest_miss=True)
        cases.append(Case(text, plan, hf_config, options=plan.compiler_options))
    return cases


def written_by_hand(texts: Sequence[str]) -> list[Case]:
    """The layouts of `LAYOUTS`."""
    cases = []
    for text in texts:
        config, layout = load_case(text)
        sizes, experts, hidden, strategy = layout.split()
        hf_config, model = build(config)
        shape = dict(zip(("replica", "data", "model"), map(int, sizes.split("x")), strict=True))
        compute = {"batch": [axis for axis in ("replica", "data") if shape[axis] > 1]}
        sharded = {"experts": experts, "expert_mlp": hidden}
        block = {axis: [mesh_axis] for axis, mesh_axis in sharded.items() if mesh_axis != "-"}
        method = ExpertMethod(ExpertStrategy(strategy))
        plan = plan_given_mappings(config, model, shape, compute | block, {"embed": ["data"], **block}, experts=method)
        cases.append(Case(text, plan, hf_config, options=plan.compiler_options))
    return cases


def targets(bench: Bench) -> str:
    lines = table("mesh", "experts", "peak GiB", "step s predicted", "modelled", "MFU")
    cases = [case for case in planned(TARGETS) if bench.only in case.label]
    for case, result in zip(cases, bench.compile(cases), strict=True):
        plan, cells = case.plan, ["-"] * 4
        if result.seconds and result.peak:
            cells = [f"{result.peak / GIB:.2f}", f"{plan.cost.step_seconds:.3g}", f"{result.step_seconds:.3g}"]
            cells.append(f"{result.seconds[2]:.1%}")
        lines.append(row(*case.label.split(), mesh(plan), sharding(plan), *cells))
    return "\n".join(lines)


def estimates(bench: Bench) -> str:
    cases = [*planned([*TARGETS, *PLANS]), *written_by_hand(LAYOUTS)]
    return estimates_table([case for case in cases if bench.only in case.label], bench)


def estimates_table(cases: Sequence[Case], bench: Bench) -> str:
    """A row for each case with predicted and compiled memory, bytes and time."""
    lines = table("mesh", "experts", "verdict", *ERROR_COLUMNS)
    for case, result in zip(cases, bench.compile(cases), strict=True):
        cells = [*case.label.split()[:4], mesh(case.plan), sharding(case.plan), result.outcome]
        lines.append(row(*cells, *error_cells(case, result)))
    return "\n".join(lines)


def regret(bench: Bench) -> str:
    lines = table("plan", "modelled s", "fastest", "modelled s", "regret", "compiled")
    for text in REGRET:
        if bench.only not in text:
            continue
        config, _ = load_case(text)
        hf_config, model = build(config)
        plans = rank_plans(config, 1 + ALTERNATIVES, model)
        cases = [Case(f"{text} {i}", plan, hf_config, options=plan.compiler_options) for i, plan in enumerate(plans)]
        times = [result.step_seconds if result.fits else math.inf for result in bench.compile(cases)]
        best = min(times)
        fastest = plans[times.index(best)]
        cells = [f"{mesh(plans[0])} {sharding(plans[0])}", f"{times[0]:.4g}"]
        cells += [f"{mesh(fastest)} {sharding(fastest)}", f"{best:.4g}", f"{times[0] / best - 1:.1%}"]
        lines.append(row(*text.split(), *cells, len(cases)))
    return "\n".join(lines)


def accuracy() -> str:
    """Median and worst errors of the programs of the second table, and of the candidates of the third."""
    columns = (
        "programs",
        "attention",
        "number",
        "peak, median",
        "worst",
        "bytes, median",
        "worst",
        "step, median",
        "worst",
    )
    lines = [row(*columns), row(*["---"] * len(columns))]
    for (name, attention), errors in expert_errors().items():
        cells: list[str] = []
        for quantity in ("peak", "received", "step"):
            cells += median_and_worst([abs(value) for e in errors if (value := getattr(e, quantity)) is not None])
        lines.append(row(name, attention, len(errors), *cells))
    return "\n".join(lines)


def expert_errors() -> dict[tuple[str, str], list[Errors]]:
    """Return (programs, attention) of the table of errors -> errors."""
    records = read_records(EXPERTS).values()
    candidates = [record for record in records if is_candidate(record.layout.label)]
    others = [record for record in records if not is_candidate(record.layout.label)]
    errors = {}
    for name, group in (("plans and layouts by hand", others), ("candidates", candidates)):
        for family, found in sorted(errors_by_family(group).items(), reverse=True):
            errors[name, "ring" if family == RING_FAMILY else "not a ring"] = found
    return errors


def is_candidate(label: str) -> bool:
    """Whether a case is a candidate of the table of regret, whose label ends with its number.

    >>> is_candidate("mixtral-8x7b v5p-64 eval 32 7"), is_candidate("mixtral-8x7b v5p-64 eval 32")
    (True, False)
    """
    return len(label.split()) == 5


def sharding(plan: Plan) -> str:
    """How experts are sharded and computed."""
    assert plan.experts is not None
    parts = [plan.experts.strategy.value]
    for axis in ("experts", "expert_mlp"):
        mesh_axes = [name for name in plan.compute_mapping.get(axis, ()) if plan.mesh[name] > 1]
        if mesh_axes:
            parts.append(f"{axis} over {' x '.join(mesh_axes)}")
    return ", ".join(parts)


TABLES: dict[str, Callable[[Bench], str]] = {"targets": targets, "estimates": estimates, "regret": regret}


def main() -> None:
    parser = page_parser(__doc__, compiles=True)
    parser.add_argument("--parts", default=" ".join(TABLES), help="which tables")
    parser.add_argument("--only", default="", help="only the cases whose 'model slice ...' contains this text")
    arguments = parser.parse_args()
    bench = Bench(arguments.jobs, arguments.only, EXPERTS)
    parts = arguments.parts.split()
    made = {name: make(bench) if name in parts else "Not made in this run." for name, make in TABLES.items()}
    if not arguments.only and set(parts) == set(TABLES):
        bench.drop_unused()
    text = TEMPLATE.format(
        **made, accuracy=accuracy(), parts=" ".join(parts), alternatives=ALTERNATIVES, position=POSITION
    )
    write_page(text, arguments.output)


TEMPLATE = """# Routed experts, judged by the TPU compiler

Made by `python scripts/bench_experts.py --parts "{parts}" --output docs/benchmarks/experts.md` with libtpu on a CPU
machine with 2 cores.

Steps are those that `shardplan.verify` models, with kernels of grouped matmuls at the roofline of their tiles and
lookups of rows at HBM bandwidth. Experts get equally many rows. Sequences have {position} tokens; evaluation is in
bfloat16, training with AdamW and everything stored in float32. A mesh is replica x data x model.

## How well devices are used

MFU: FLOPs of the model, each token with its own experts, relative to the peak of all devices.

{targets}

## Predicted against compiled

Plans, then layouts written by hand, most of them far from the best.

{estimates}

## Regret

The plan and the {alternatives} next best candidates with another mesh, batch mapping or storage sharding of the
residual axis, all compiled. Regret: how much slower the plan is than the fastest.

{regret}

## Errors

Without bytes and steps of programs that are predicted not to fit. Hops of rings are priced as measured, which the
compiler's cycles exceed. Candidates that are plans or layouts of the second table count there. The worst errors of
bytes are of an embedding and an output head stored along two mesh axes, and of few bytes.

Constants for exchanges, biases, gradients and gathered weights were chosen by programs of the second table (gpt-oss-20b
on v6e-16 and v5p-16; Qwen3-30B exchanging, gathering weights and training; OLMoE training). Candidates were compiled
afterwards: their row says what to expect.

{accuracy}
"""

if __name__ == "__main__":
    main()
