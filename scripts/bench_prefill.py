"""python scripts/bench_prefill.py --output docs/benchmarks/prefill.md

Long prompts, planned, and judged by the TPU compiler: 405B with 128K tokens on v4-256, and the architecture of 8B with
1M on v5p-128. The plan is that of the whole prompt; shorter ones are laid out the same way, to see what grows with
them. Needs no TPU; takes ten minutes on 2 cores.
"""

import argparse
import os
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_planner import mesh, row

from shardplan import config as configuration
from shardplan.config import CompilerConfig
from shardplan.hardware import GIB
from shardplan.model import build_model, read_config
from shardplan.search.make_plan import make_plan, plan_layout
from shardplan.verify.run import Case, verify

PROMPTS = ("405b-128k", "8b-1m")
SHORTER = (8, 4, 2, 1)
COLUMNS = (
    "model", "slice", "tokens", "mesh", "attention", "verdict", "peak GiB predicted", "compiled",
    "KiB more per token of a device", "step s predicted", "modelled", "MFU",
)  # fmt: skip


def prompts(jobs: int | None) -> str:
    lines = [row(*COLUMNS), row(*("---" for _ in COLUMNS))]
    for name in PROMPTS:
        config = configuration.load(["--config", f"configs/{name}.yaml"], "bench")
        plan = make_plan(config)
        cases = []
        for part in SHORTER:
            position = config.workload.position // part
            hf_config = read_config(config.model.config, None)
            model = build_model(hf_config, position)
            shorter = plan_layout(
                replace(config, workload=replace(config.workload, position=position)),
                model, plan.mesh, plan.compute_mapping, plan.param_mapping, plan.attention,
            )  # fmt: skip
            cases.append(Case(f"{name} {position}", shorter, model, hf_config, options=plan.compiler_options))
        before: tuple[int, int] | None = None
        for case, verdict in zip(cases, verify(cases, CompilerConfig(jobs=jobs)), strict=True):
            assert verdict.memory and verdict.time, verdict.reason
            found, method, tokens = case.plan, case.plan.attention, case.plan.workload.position
            peak = verdict.memory.peak
            shard = tokens // (method.ulysses * method.ring)
            grown = f"{(peak - before[1]) / (shard - before[0]) / 2**10:.1f}" if before else ""
            before = shard, peak
            lines.append(
                row(
                    Path(str(config.model.config)).stem, config.hardware.slice, tokens, mesh(found),
                    f"{method.strategy} {method.layout}, ulysses {method.ulysses} x ring {method.ring}",
                    verdict.outcome, f"{found.memory.peak / GIB:.2f}", f"{peak / GIB:.2f}", grown,
                    f"{found.cost.step_seconds:.3g}", f"{verdict.time.step_seconds:.3g}", f"{verdict.time.mfu:.1%}",
                )
            )  # fmt: skip
    return "\n".join(lines)


TEMPLATE = """# Long prompts, judged by the TPU compiler

Made by `python scripts/bench_prefill.py --output docs/benchmarks/prefill.md` with libtpu on a CPU machine with 2 cores.

One prompt at a time, bfloat16. The plan is that of the whole prompt; shorter ones are laid out the same way. What more
a token takes of the memory of its device, beside the row above, is not the same in all rows: of shorter prompts the
peak may be at another moment, where weights are gathered.
Steps are modelled by the compiler's cycles, and attention's kernels at the matrix unit's peak for the blocks
that the mask leaves to the slowest device; they have not been compared with a TPU.

{prompts}
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", help="Markdown file to write; default: stdout")
    parser.add_argument("--jobs", type=int, help="compiles at a time")
    arguments = parser.parse_args()
    text = TEMPLATE.format(prompts=prompts(arguments.jobs))
    if arguments.output:
        Path(arguments.output).write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
