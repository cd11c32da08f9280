"""python scripts/bench_verify.py --output docs/benchmarks/verify.md

Writes the TPU compiler's verdicts in two tables: hand-written configurations of Llama-3.1-405B on v4-256
(configs/levanter), and the plans of four models on five generations, evaluation and training. Needs no TPU; takes an
hour on 2 cores.
"""

import argparse
import dataclasses
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_planner import EVAL_DEVICES_PER_SEQUENCE, POSITION, load, mesh, planned_case, usual_batch

from shardplan import config as configuration
from shardplan.config import PlanConfig
from shardplan.config.command_flags import VerifyCommand
from shardplan.config.sections import CompilerConfig
from shardplan.hardware import GIB
from shardplan.report.plan.verdicts import omission_text, reason_text
from shardplan.search.result.compiler_options import ASYNC_COLLECTIVES, NO_WINDOWED_EINSUM
from shardplan.verify.case import Case
from shardplan.verify.run import verify
from shardplan.verify.select_cases import build_cases
from shardplan.verify.verdict import OutOfMemory, Verdict

SLICES = {
    "llama-3.1-8b": "v4-16 v4-64 v5e-32 v5e-64 v5p-16 v5p-64 v6e-16 v6e-64 tpu7x-16 tpu7x-64",
    "llama-3.1-70b": "v4-128 v4-512 v5e-128 v5e-256 v5p-128 v5p-512 v6e-64 v6e-256 tpu7x-128 tpu7x-256",
    "llama-3.1-405b": "v4-256 v4-1024 v5e-256 2xv5e-256 v5p-256 v5p-1024 v6e-256 2xv6e-256 tpu7x-256 tpu7x-512",
    "mixtral-8x7b": "v4-64 v4-128 v5e-64 v5e-128 v5p-64 v5p-128 v6e-32 v6e-64 tpu7x-64 tpu7x-128",
}
"""Model -> slices; v4, v5p and tpu7x are named by cores, v5e and v6e by chips."""
KINDS = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")

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


def plans(jobs: int | None, only: str) -> str:
    """The table of the plans for SLICES."""
    cases = [
        planned_case(f"{model} {slice_name} {kind}", with_own_attention(model, slice_name, kind))
        for kind in ("eval", "train")
        for model, slices in SLICES.items()
        for slice_name in slices.split()
        if only in f"{model} {slice_name} {kind}"
    ]
    verdicts = verify(cases, CompilerConfig(jobs=jobs), report)
    lines = [
        "| model | slice | step | batch | mesh | verdict | predicted GiB | peak GiB | modelled step s | MFU | "
        + " | ".join(KINDS)
        + " | reason |",
        "|---|---|---|---|---|---|---|---|---|---|" + "---|" * (len(KINDS) + 1),
    ]
    for case, verdict in zip(cases, verdicts, strict=True):
        model, slice_name, kind = case.label.split(" ")
        moved: Counter[str] = Counter()
        for collective in verdict.collectives:
            moved[collective.kind] += collective.bytes
        columns = [f"{moved[kind] / GIB:.2f}" if verdict.time else "-" for kind in KINDS]
        mfu = f"{verdict.time.mfu:.1%}" if verdict.time else "-"
        lines.append(
            f"| {model} | {slice_name} | {kind} | {case.plan.workload.batch} | {mesh(case.plan)} | "
            f"{verdict.outcome} | {case.plan.memory.peak / GIB:.2f} | {peak(verdict)} | {step(verdict)} | {mfu} | "
            f"{' | '.join(columns)} | {short_reason(verdict)} |"
        )
    return "\n".join(lines)


def with_own_attention(model: str, slice_name: str, kind: str) -> PlanConfig:
    """The configuration for Levanter's attention, which requires unsharded positions; training plans have these."""
    config = load(model, slice_name, kind, usual_batch(slice_name, kind))
    return dataclasses.replace(config, forbid=("position",)) if kind == "eval" else config


def report(case: Case, verdict: Verdict) -> None:
    result = f"{case.label}: {verdict.outcome} {peak(verdict)} GiB {short_reason(verdict)}"
    omissions = {omission_text(omission): count for omission, count in verdict.not_understood.items()}
    print(f"{result}, {verdict.compile_seconds:.0f} s {omissions}", file=sys.stderr, flush=True)


def peak(verdict: Verdict) -> str:
    return f"{verdict.memory.peak / GIB:.2f}" if verdict.memory else "-"


def step(verdict: Verdict) -> str:
    return f"{verdict.time.step_seconds:.3g}" if verdict.time else "-"


def short_reason(verdict: Verdict) -> str:
    reason = verdict.reason
    if isinstance(reason, OutOfMemory):
        reason = dataclasses.replace(reason, largest=[])
    return reason_text(reason)[:160].replace("|", "/")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="Markdown file to write; default: stdout")
    parser.add_argument("--jobs", type=int, help="compiles at a time")
    parser.add_argument("--only", default="", help="only the plans whose 'model slice step' contains this text")
    arguments = parser.parse_args()
    started = time.perf_counter()
    text = TEMPLATE.format(
        hand_written="" if arguments.only else hand_written(arguments.jobs),
        plans=plans(arguments.jobs, arguments.only),
        devices_per_sequence=EVAL_DEVICES_PER_SEQUENCE,
        position=POSITION,
    )
    print(f"{time.perf_counter() - started:.0f} s", file=sys.stderr)
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    else:
        print(text)


TEMPLATE = """# Verdicts of the TPU compiler

Made by `python scripts/bench_verify.py --output docs/benchmarks/verify.md` with libtpu on a CPU machine.

The step time is modelled: the compiler's cycles, and transfers, at the bandwidth of their links, that do not overlap
with them; [published runs](published.md) compare such steps with measured ones. MFU counts the FLOPs that the model
needs, without recomputation and without the masked half of attention.

## Hand-written configurations of Llama-3.1-405B on v4-256

`assembly` is the program that builds the model when Levanter loads a checkpoint (`--compiler.program load`): every
tensor of the state dict is sharded over `data` alone, and one jit stacks the layers. In the first row `data` has one
device, so that every device holds all tensors unsharded, and the mapping does not shard `kv_head`, `q_heads_per_group`
and `head_size`: a stacked projection takes 126 x 16384 x 16384 x 4 bytes. The last rows compile other mappings and
compiler options for the same chips.

{hand_written}

## Plans

Batch in sequences of {position} tokens: one per device for training (AdamW; parameters, gradients and moments in
float32, compute in bfloat16), one per {devices_per_sequence} devices, at least 8, for evaluation (bfloat16). The mesh
is replica x data x model; the columns of collectives are GiB that one device receives in a step. If no plan was
predicted to fit, the plan with the smallest peak memory was compiled. Positions are not sharded (`--forbid position`),
as Levanter's own attention requires.

{plans}
"""

if __name__ == "__main__":
    main()
