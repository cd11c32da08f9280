"""python scripts/bench_prefill.py --output docs/benchmarks/prefill.md

Plans long prompts and compiles the plans with the TPU compiler: 405B with 128K tokens on v4-256, and the architecture
of 8B with 1M tokens on v5p-128. Shorter prompts use the mesh and mappings of the longest one, so that the table shows
how memory grows. Needs no TPU; takes ten minutes on 2 cores.
"""

import os
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")

from bench_page import page_parser, write_page
from bench_planner import mesh, row

from shardplan import config as configuration
from shardplan.config.sections import CompilerConfig
from shardplan.hardware import GIB
from shardplan.model.huggingface.hf_config import read_config
from shardplan.model.registry import build_model
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.make_plan import make_plan
from shardplan.verify.case import Case
from shardplan.verify.run import verify

PROMPTS = ("405b-128k", "8b-1m")
LENGTH_DIVISORS = (8, 4, 2, 1)
"""The prompt's length is divided by each of these."""
COLUMNS = (
    "model", "slice", "tokens", "mesh", "attention", "verdict", "peak GiB predicted", "compiled",
    "KiB per further token of a device", "step s predicted", "modelled", "MFU",
)  # fmt: skip


def prompt_table(jobs: int | None) -> str:
    """Return the table of prompts; at most `jobs` compile at once."""
    lines = [row(*COLUMNS), row(*("---" for _ in COLUMNS))]
    for name in PROMPTS:
        config = configuration.parse_config(["--config", f"configs/{name}.yaml"])
        plan = make_plan(config)
        cases = []
        for divisor in LENGTH_DIVISORS:
            position = config.workload.position // divisor
            hf_config = read_config(config.model.config, None, config.model_class)
            model = build_model(hf_config, position)
            shorter = plan_given_mappings(
                replace(config, workload=replace(config.workload, position=position)),
                model, plan.mesh, plan.compute_mapping, plan.param_mapping, plan.attention,
            )  # fmt: skip
            cases.append(Case(f"{name} {position}", shorter, hf_config, options=plan.compiler_options))
        previous: tuple[int, int] | None = None
        for case, verdict in zip(cases, verify(cases, CompilerConfig(jobs=jobs)), strict=True):
            assert verdict.memory and verdict.time, verdict.reason
            case_plan, method, tokens = case.plan, case.plan.attention, case.plan.workload.position
            peak = verdict.memory.peak
            shard = tokens // (method.ulysses * method.ring)
            growth = f"{(peak - previous[1]) / (shard - previous[0]) / 2**10:.1f}" if previous else ""
            previous = shard, peak
            lines.append(
                row(
                    Path(str(config.model.config)).stem, config.hardware.slice, tokens, mesh(case_plan),
                    f"{method.strategy} {method.layout}, ulysses {method.ulysses} x ring {method.ring}",
                    verdict.outcome, f"{case_plan.memory.peak / GIB:.2f}", f"{peak / GIB:.2f}", growth,
                    f"{case_plan.cost.step_seconds:.3g}", f"{verdict.time.step_seconds:.3g}", f"{verdict.time.mfu:.1%}",
                )
            )  # fmt: skip
    return "\n".join(lines)


TEMPLATE = """# Long prompts, judged by the TPU compiler

Made by `python scripts/bench_prefill.py --output docs/benchmarks/prefill.md` with libtpu {libtpu} on a CPU machine with
2 cores.

One prompt at a time, bfloat16. Shorter prompts use the mesh and mappings of the longest one. The memory per further
token, relative to the row above, differs between rows: the peak of shorter prompts may be at another point of the
program, where weights are gathered. Step times are modelled from the compiler's cycles, with attention kernels at the
peak of the matrix unit for the blocks that the mask leaves to the slowest device; they have not been compared with a
TPU. A mesh is replica x data x model; positions are sharded over the mesh axes named after it.

{prompts}
"""


def main() -> None:
    arguments = page_parser(__doc__, compiles=True).parse_args()
    text = TEMPLATE.format(libtpu=version("libtpu"), prompts=prompt_table(arguments.jobs))
    write_page(text, arguments.output)


if __name__ == "__main__":
    main()
