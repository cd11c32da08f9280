"""python scripts/bench_published_memory.py --output docs/benchmarks/published_memory.md

Compares the memory that the TPU compiler assigns to the best plans for published runs with what is predicted. The
compiler is ended once it has assigned memory, which takes half a minute for each, so that no step has a time; see
bench_published.py for those. Needs no TPU.
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from bench_page import page_parser, write_page
from bench_planner import mesh, row
from bench_published import Run, gib_text, published_runs, step_text

from shardplan.config.sections import CompilerConfig
from shardplan.plan.plan import Plan
from shardplan.verify.run import verify
from shardplan.verify.verdict import CompiledMemory


@dataclass(frozen=True)
class Comparison:
    """The memory of the best plan for a run, predicted and as the compiler assigned it."""

    run: Run
    plan: Plan
    fits: bool
    """Whether the compiler says that the plan fits, as the plan does."""
    memory: CompiledMemory | None
    """None if the compiler assigned none."""

    @property
    def live(self) -> int:
        """Bytes that are live at once, without the gaps between buffers."""
        assert self.memory is not None
        return max(each.bytes for each in self.memory.live)

    @property
    def error(self) -> float:
        """Predicted over compiled peak, less 1."""
        assert self.memory is not None
        return self.plan.memory.peak / self.memory.peak - 1

    @property
    def gaps(self) -> float:
        """The part of the peak that is gaps between buffers; negative where buffers that share memory count twice."""
        assert self.memory is not None
        return 1 - self.live / self.memory.peak

    def row(self) -> str:
        """Its row of the table."""
        plan, name = self.plan, f"{self.run.name} {self.run.slice}"
        if self.memory is None:
            return row(name, mesh(plan), step_text(plan), *["does not compile"] * 6)
        sizes = self.memory.peak, self.live, plan.memory.peak, self.memory.host, plan.memory.host
        peak, live, predicted, host, predicted_host = map(gib_text, sizes)
        fits = "yes" if self.fits else "no"
        return row(name, mesh(plan), step_text(plan), fits, peak, live, predicted, f"{self.error:+.1%}", host,
                   predicted_host)  # fmt: skip


def compare(runs: Sequence[Run], jobs: int | None) -> list[Comparison]:
    """Compile the best plan of every run as far as memory is assigned."""
    cases = [run.best_case() for run in runs]
    verdicts = verify(cases, CompilerConfig(jobs=jobs, memory_only=True))
    return [
        Comparison(run, case.plan, verdict.fits, verdict.memory)
        for run, case, verdict in zip(runs, cases, verdicts, strict=True)
    ]


def errors_text(comparisons: Sequence[Comparison]) -> str:
    """The median and the worst error of the peaks of some plans."""
    errors = sorted(abs(each.error) for each in comparisons)
    if not errors:
        return "none"
    return f"{len(errors)}, {statistics.median(errors):.1%} off in the median and {errors[-1]:.1%} at worst"


def gaps_text(comparisons: Sequence[Comparison]) -> str:
    """How large gaps between buffers are, and the errors of a prediction that has everything right but the gaps."""
    gaps = sorted(each.gaps for each in comparisons if each.gaps >= 0)
    if not gaps:
        return "none"
    median = statistics.median(gaps)
    # of the peak: exact live bytes with the median gap on top, less the peak
    errors = sorted(abs((1 - gap) / (1 - median) - 1) for gap in gaps)
    return (
        f"{median:.1%} of the peak in the median of {len(gaps)} plans, {gaps[0]:.1%} to {gaps[-1]:.1%}. A prediction "
        f"with exact live bytes and the median gap would be {statistics.median(errors):.1%} off in the median and "
        f"{errors[-1]:.1%} at worst"
    )


def page(comparisons: Sequence[Comparison]) -> str:
    """The page of the documentation."""
    columns = ("run", "mesh", "what is kept", "fits", "peak GiB", "live at once", "predicted", "error", "host GiB",
               "predicted")  # fmt: skip
    compiled = [each for each in comparisons if each.memory is not None]
    with_host = [each for each in compiled if each.plan.memory.host]
    same_host = sum(each.memory is not None and each.memory.host == each.plan.memory.host for each in compiled)
    return TEMPLATE.format(
        table="\n".join([row(*columns), row(*["---"] * len(columns)), *(each.row() for each in comparisons)]),
        total=len(comparisons),
        refused=sum(each.plan.memory.fits and not each.fits for each in comparisons),
        same_host=same_host,
        compiled=len(compiled),
        on_device=errors_text([each for each in compiled if not each.plan.memory.host]),
        with_host=errors_text(with_host),
        all_plans=errors_text(compiled),
        gaps=gaps_text(compiled),
    )


def main() -> None:
    parser = page_parser(__doc__, compiles=True)
    parser.add_argument("--only", default="", help="only the runs whose model and slice contain this text")
    arguments = parser.parse_args()
    text = page(compare([run for run in published_runs() if arguments.only in run.label], arguments.jobs))
    write_page(text, arguments.output)


TEMPLATE = """# Memory of the best plans, as compiled

Made by `python scripts/bench_published_memory.py --output docs/benchmarks/published_memory.md`: the best plan for each
of the published training runs in `scripts/published_runs.yaml`, compiled [as far as memory is
assigned](../howto/verify.md).

- Of {total} plans that are predicted to fit, the compiler refuses {refused}.
- Bytes in the memory of the host are exact in {same_host} of {compiled}.
- Peaks: {all_plans}.
- Of plans that copy nothing to hosts: {on_device}.
- Of plans that do: {with_host}.
- "Live at once" is the peak without gaps between buffers, which follow from the order in which the compiler packs them
  and are not predicted: {gaps}.
- [The log](../log.md#activations) has what the largest errors come from.

{table}
"""

if __name__ == "__main__":
    main()
