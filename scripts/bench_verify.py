"""python scripts/bench_verify.py --output docs/benchmarks/verify.md

Writes the TPU compiler's verdicts on hand-written configurations of Llama-3.1-405B on v4-256 (configs/levanter) in a
table. Needs no TPU; takes ten minutes on 2 cores.
"""

import dataclasses
import os
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_page import page_parser, write_page
from bench_planner import mesh

from shardplan import config as configuration
from shardplan.config.command_flags import VerifyCommand
from shardplan.config.sections import CompilerConfig
from shardplan.hardware import GIB
from shardplan.report.plan.verdicts import omission_text, reason_text
from shardplan.search.result.compiler_options import ASYNC_COLLECTIVES, NO_WINDOWED_EINSUM
from shardplan.verify.case import Case
from shardplan.verify.run import verify
from shardplan.verify.select_cases import build_cases
from shardplan.verify.verdict import Verdict

HAND_WRITTEN = (
    # file, program, options, the table's name for the program
    ("405b-heads-mlp", "load", "", "assembly, float32"),
    ("405b-q-heads", "load", "", "assembly, float32"),
    ("405b-everything-on-model", "step", "", "evaluation"),
    ("405b-head-size", "step", "", "evaluation"),
    ("405b-usual", "step", "", "evaluation"),
    ("405b-usual", "step", "no windowed einsum", "evaluation"),
    ("405b-usual", "step", "both", "evaluation"),
    ("405b-output-axes", "step", "", "evaluation"),
    ("405b-output-axes", "step", "both", "evaluation"),
    ("405b-sequence-share", "step", "both", "evaluation"),
)
OPTIONS = {
    "": {},
    "no windowed einsum": NO_WINDOWED_EINSUM,
    "both": {**NO_WINDOWED_EINSUM, **ASYNC_COLLECTIVES},
}


def hand_written(jobs: int | None) -> str:
    """The table of the configurations in configs/levanter."""
    cases = []
    for name, program, options, _ in HAND_WRITTEN:
        path = f"configs/levanter/{name}.yaml"
        settings = ["--config", "configs/405b.yaml", "--against", path, "--compiler.program", program]
        config = configuration.parse_config(settings, VerifyCommand)
        case = build_cases(config, config.options, config.against)[1]
        cases.append(dataclasses.replace(case, label=f"{name} {options}", options=OPTIONS[options]))
    verdicts = verify(cases, CompilerConfig(jobs=jobs), report)
    lines = [
        "| configuration | program | mesh | compiler options | verdict | peak GiB | modelled step s | reason |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for (name, _, options, program), case, verdict in zip(HAND_WRITTEN, cases, verdicts, strict=True):
        lines.append(
            f"| [{name}](../../configs/levanter/{name}.yaml) | {program} | {mesh(case.plan)} | "
            f"{options or 'default'} | {verdict.outcome} | {peak(verdict)} | {step(verdict)} | "
            f"{reason_text(verdict.reason)[:300].replace('|', '/')} |"
        )
    return "\n".join(lines)


def report(case: Case, verdict: Verdict) -> None:
    omissions = {omission_text(omission): count for omission, count in verdict.not_understood.items()}
    result = f"{case.label}: {verdict.outcome} {peak(verdict)} GiB, {verdict.compile_seconds:.0f} s {omissions}"
    print(result, file=sys.stderr, flush=True)


def peak(verdict: Verdict) -> str:
    return f"{verdict.memory.peak / GIB:.2f}" if verdict.memory else "-"


def step(verdict: Verdict) -> str:
    return f"{verdict.time.step_seconds:.3g}" if verdict.time else "-"


def main() -> None:
    arguments = page_parser(__doc__, compiles=True).parse_args()
    text = TEMPLATE.format(hand_written=hand_written(arguments.jobs))
    write_page(text, arguments.output)


TEMPLATE = """# Verdicts of the TPU compiler

Made by `python scripts/bench_verify.py --output docs/benchmarks/verify.md` with libtpu on a CPU machine.

The step time is modelled: the compiler's cycles, and transfers, at the bandwidth of their links, that do not overlap
with them; [published runs](published.md) compare such steps with measured ones. Verdicts on plans are in
[the planner's page](planner.md).

## Hand-written configurations of Llama-3.1-405B on v4-256

`assembly` is the program that builds the model when Levanter loads a checkpoint (`--compiler.program load`): every
tensor of the state dict is sharded over all mesh axes but `replica`, and one jit stacks the layers. In the first row
the mapping does not shard `kv_head`, `q_heads_per_group` and `head_size`: every device gets a whole stacked projection
of 126 x 16384 x 16384 x 4 bytes. The last rows compile other mappings and compiler options for the same chips.

{hand_written}
"""

if __name__ == "__main__":
    main()
