"""python scripts/bench_levanter.py [--output docs/benchmarks/levanter.md] [--only llama8b,gemma7b]

Lints ten training configurations for Levanter (configs/levanter/training), and has the TPU compiler compile each: the
program has the loss of the installed Levanter. Needs no TPU; takes twenty minutes to two hours on 2 cores, and a
compile that was made before is read from the cache of `shardplan verify`.
"""

import os
import statistics
import sys
from importlib import metadata
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_page import page_parser, write_page

from shardplan import config as configuration
from shardplan.config.plan_config import CompilingConfig
from shardplan.config.sections import CompilerConfig
from shardplan.hardware import GIB
from shardplan.lint.file.lint_file import lint_file
from shardplan.plan.plan import Plan
from shardplan.report.plan.verdicts import reason_text
from shardplan.verify.case import Case
from shardplan.verify.run import verify
from shardplan.verify.select_cases import build_case
from shardplan.verify.verdict import Verdict

COMMAND = "python scripts/bench_levanter.py --output docs/benchmarks/levanter.md"
FOLDER = Path(__file__).parents[1] / "configs" / "levanter" / "training"
FILES = {
    "llama8b": ("v5p-16", "llama-3.1-8b"),
    "gemma7b": ("v4-64", "gemma-7b"),
    "mistral7b": ("v6e-32", "mistral-7b-v0.3"),
    "qwen3-32b": ("v5p-128", "qwen3-32b"),
    "olmo2-32b": ("v4-256", "olmo2-32b"),
    "mixtral": ("v5p-64", "mixtral-8x7b"),
    "llama70b": ("v5p-256", "llama-3.1-70b"),
    "schedule": ("v5e-64", "llama-3.1-8b"),
    "bfloat16-lion": ("v5p-16", "llama-3.1-8b"),
    "average-float32": ("v5p-32", "gemma-7b"),
}
"""Configuration -> slice, and the bundled model that its section `model` describes."""
COMPILE_SECONDS = 3600.0


def linted_case(name: str) -> Case:
    """The layout of a configuration, with what the lint estimates."""
    hardware, model = FILES[name]
    config = configuration.load_config(model={"config": model}, hardware={"slice": hardware})
    compiling = CompilingConfig(model=config.model, hardware=config.hardware, workload=config.workload)
    plan = lint_file(str(FOLDER / f"{name}.yaml"), config).result.plan
    assert plan is not None
    return build_case(compiling, plan, name)


def error(plan: Plan, verdict: Verdict) -> float | None:
    """Predicted over compiled peak memory, less 1."""
    return plan.memory.peak / verdict.memory.peak - 1 if verdict.memory else None


def row(case: Case, verdict: Verdict) -> str:
    """A line of the table."""
    plan, work = case.plan, case.plan.workload
    off = error(plan, verdict)
    lint = "fits" if plan.memory.fits else "may not fit" if plan.memory.may_fit else "out of memory"
    columns = [
        f"[{case.label}](../../configs/levanter/training/{case.label}.yaml)", str(plan.model.config),
        plan.hardware.slice, f"{work.batch} x {work.position}", str(work.microbatches), lint,
        str(verdict.outcome), f"{plan.memory.peak / GIB:.2f}",
        f"{verdict.memory.peak / GIB:.2f}" if verdict.memory else "-", "-" if off is None else f"{off:+.1%}",
        f"{plan.cost.step_seconds:.3g}", f"{verdict.time.step_seconds:.3g}" if verdict.time else "-",
        reason_text(verdict.reason)[:120].replace("|", "/"),
    ]  # fmt: skip
    return f"| {' | '.join(columns)} |"


def page(cases: list[Case], verdicts: list[Verdict]) -> str:
    """The page with the table, its median and its worst row."""
    errors = {
        case.label: off
        for case, verdict in zip(cases, verdicts, strict=True)
        if (off := error(case.plan, verdict)) is not None
    }
    worst = max(errors, key=lambda name: abs(errors[name]))
    median = statistics.median(abs(off) for off in errors.values())
    columns = (
        "file", "model", "slice", "batch", "microbatches", "lint", "compiler", "predicted GiB", "compiled GiB", "error",
        "estimated step s", "compiled step s", "reason",
    )  # fmt: skip
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("marin-levanter", "jax", "libtpu"))
    lines = [
        "# Training files for Levanter, against the compiler",
        "",
        f"```\n{COMMAND}\n```",
        "",
        f"With {versions}. Peak memory of a device in each file's step of training, as `plan --lint` predicts",
        "it, and as the TPU compiler needs it for the step with Levanter's own loss. Of a schedule it is the step with",
        "most sequences.",
        "",
        f"Memory: median error {median:.1%}, worst {errors[worst]:+.1%} ({worst}), of {len(errors)} files.",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(row(case, verdict) for case, verdict in zip(cases, verdicts, strict=True)),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = page_parser(__doc__)
    parser.add_argument("--only", default=",".join(FILES), help="names of files, separated by commas")
    arguments = parser.parse_args()
    cases = [linted_case(name) for name in arguments.only.split(",")]
    verdicts = verify(
        cases,
        CompilerConfig(jobs=1, seconds=COMPILE_SECONDS),
        lambda case, verdict: print(row(case, verdict), file=sys.stderr, flush=True),
    )
    text = page(cases, verdicts)
    write_page(text, arguments.output)


if __name__ == "__main__":
    main()
