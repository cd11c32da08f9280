"""python scripts/bench_decoder.py --output docs/benchmarks/decoder.md

Compares shardplan's decoder with Levanter's classes: plans the cases of the regret table and of the gallery with both,
and compiles both plans. Then plans released models, and compares predicted with compiled memory and time. Needs no TPU;
decoder.json, beside the page, keeps the compiled results, as planner.json does for the planner.
"""

import os
import time
from dataclasses import dataclass, replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_page import page_parser, write_page
from bench_planner import REGRET, Bench, error_text, load, mesh, row
from planner_record import BENCHMARKS, CompiledResult, Errors

from shardplan import config as configuration
from shardplan.config import PlanConfig
from shardplan.decoder.families import FAMILIES
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.model_class import DECODER, LEVANTER
from shardplan.model.registry import build_model
from shardplan.plan.plan import Plan
from shardplan.search.make_plan import make_plan
from shardplan.verify.case import Case

RECORDS = BENCHMARKS / "decoder.json"
GALLERY = ("405b", "8b-1m", "mixtral-8x7b")
"""Configurations of the plans in docs/gallery, except the plan for training."""
RELEASED = (
    "pythia-12b v5p-64 32 2048", "gemma-3-27b v5p-64 32 8192", "gemma-3-27b v5p-64 1 131072",
    "olmo-3-32b v5p-64 32 4096", "phi-4 v5p-64 32 4096", "command-a v5p-64 32 4096", "llama-3.3-70b v5p-64 32 4096",
)  # fmt: skip
"""Released model, slice, batch and tokens of a sequence, for evaluations in bfloat16."""
FULL = {"layer_types": ["full_attention"] * 62}
"""Keys of config.json that remove the windows of Gemma 3 27B."""


@dataclass(frozen=True)
class Planned:
    """A planned case, and the seconds of planning before the search."""

    case: Case
    trace_seconds: float

    @property
    def plan(self) -> Plan:
        """The plan."""
        return self.case.plan


def plan_case(label: str, config: PlanConfig, **changes: object) -> Planned:
    """Plan a configuration, and measure how long it takes without the search.

    Args:
        changes: keys of config.json to change.
    """
    hf_config = {**read_config(config.model.config, None, config.model_class), **changes}
    model = build_model(hf_config, config.workload.position)
    started = time.perf_counter()
    plan = make_plan(config, model)
    seconds = time.perf_counter() - started - plan.search.seconds
    return Planned(Case(label, plan, hf_config, options=plan.compiler_options), seconds)


def comparison(bench: Bench) -> str:
    """Return the table with a row for each case that both the decoder and a class of Levanter can compute."""
    settings: list[tuple[str, PlanConfig]] = []
    for text in REGRET:
        model, slice_name, kind, batch = text.split()
        settings.append((text, load(model, slice_name, kind, int(batch))))
    for name in GALLERY:
        settings.append((f"configs/{name}.yaml", configuration.parse_config(["--config", f"configs/{name}.yaml"])))
    lines = [
        row("case", "mesh, Levanter's class", "s", "GiB", "mesh, decoder", "s", "GiB", "time"),
        row(*["---"] * 8),
    ]
    for label, config in settings:
        if bench.only not in label:
            continue
        pair = [_with_class(config, name) for name in (LEVANTER, DECODER)]
        cases = [plan_case(f"{label}, {each.model.levanter_class}", each).case for each in pair]
        theirs, ours = bench.compile(cases)
        ratio = ours.step_seconds / theirs.step_seconds
        cells = [*_cells(cases[0].plan, theirs), *_cells(cases[1].plan, ours)]
        lines.append(row(label, *cells, f"{ratio:.3f}x"))
    return "\n".join(lines)


def _with_class(config: PlanConfig, name: str) -> PlanConfig:
    return replace(config, model=replace(config.model, levanter_class=name))


def _cells(plan: Plan, result: CompiledResult) -> tuple[str, str, str]:
    return mesh(plan), f"{result.step_seconds:.4g}", f"{(result.peak or 0) / GIB:.2f}"


def released(bench: Bench) -> str:
    """Return the table with a row for each released model."""
    columns = (
        "model", "batch x tokens", "mesh", "attention", "lines", "trace s", "search s", "GiB predicted", "compiled",
        "error", "s predicted", "compiled", "error", "MFU",
    )  # fmt: skip
    lines = [row(*columns), row(*["---"] * len(columns))]
    settings = [(*text.split(), {}) for text in RELEASED]
    settings.append((*RELEASED[2].split(), FULL))
    for name, slice_name, batch, position, changes in settings:
        label = f"{name}{', no windows' if changes else ''}"
        if bench.only not in label:
            continue
        config = load(name, slice_name, "eval", int(batch), int(position), DECODER)
        planned = plan_case(f"{label} {slice_name} {batch} x {position}", config, **changes)
        (result,), plan = bench.compile([planned.case]), planned.plan
        errors = Errors.of(plan, plan.cost.step_seconds, result)
        assert result.peak and result.seconds
        numbers = (
            f"{planned.trace_seconds:.1f}", f"{plan.search.seconds:.1f}",
            f"{plan.memory.peak / GIB:.2f}", f"{result.peak / GIB:.2f}", error_text(errors.peak),
            f"{plan.cost.step_seconds:.3g}", f"{result.step_seconds:.3g}", error_text(errors.step),
            f"{result.seconds[2]:.1%}",
        )  # fmt: skip
        shape = f"{batch} x {int(position):,}"
        lines.append(row(label, shape, mesh(plan), _methods(plan), _lines_of_family(planned.case), *numbers))
    return "\n".join(lines)


def _methods(plan: Plan) -> str:
    """Return the strategy of each kind of attention as text."""
    kinds = [each.kind for each in plan.details.attention] if plan.details else []
    strategies = [str(plan.attention.of(kind).strategy) for kind in kinds] or [str(plan.attention.strategy)]
    return " / ".join(strategies)


def _lines_of_family(case: Case) -> int:
    """Count the lines of the file that has a model's family."""
    module = FAMILIES[case.hf_config["model_type"]].read.__module__
    path = Path(__file__).parents[1] / f"{module.replace('.', '/')}.py"
    return len(path.read_text(encoding="utf-8").splitlines())


TEMPLATE = """# The decoder, judged by the TPU compiler

Made by `python scripts/bench_decoder.py --output docs/benchmarks/decoder.md` with libtpu on a CPU machine with 2 cores.
`shardplan.verify` models the time of a step, as in [the planner's page](planner.md).

## Beside Levanter's classes

Each case is planned with Levanter's class and with the decoder, and both plans are compiled. "time" is the step time
with the decoder / the step time with Levanter's class. A mesh is replica x data x model.

{comparison}

## Released models

On v5p-64, in bfloat16. "lines" counts the lines of the family's file; "attention" has the strategy of each kind of
attention, most work first. The last row is Gemma 3 27B with full attention in all layers.

{released}
"""


def main() -> None:
    """Write the page."""
    parser = page_parser(__doc__, compiles=True)
    parser.add_argument("--only", default="", help="only the cases whose label contains this text")
    arguments = parser.parse_args()
    bench = Bench(arguments.jobs, arguments.only, RECORDS)
    text = TEMPLATE.format(comparison=comparison(bench), released=released(bench))
    if not arguments.only:
        bench.drop_unused()
    write_page(text, arguments.output)


if __name__ == "__main__":
    main()
