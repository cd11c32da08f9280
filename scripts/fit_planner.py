"""python scripts/fit_planner.py

Fits the factors of the planner's cost model (shardplan/cost/calibration.json) to what the TPU compiler makes of a few
layouts for every generation, writes them, and prints the errors that are left, beside those of the factors so far.
Needs no TPU. The layouts are others than those of scripts/bench_planner.py, which judges the result. What was compiled
before comes from the cache of shardplan.verify; all of it takes an hour on 2 cores.
"""

import argparse
import json
import os
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from bench_planner import build, by_kind, compiled, load, row
from scipy.optimize import lsq_linear

from shardplan.cost import calibration as calibrations
from shardplan.cost.calibration import Calibration, calibration
from shardplan.cost.gspmd import DeviceCost
from shardplan.cost.memory import memory
from shardplan.cost.roofline import Seconds, compute_seconds, step_tasks
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.hardware import Slice, parse_slice
from shardplan.hardware.generations import GENERATIONS
from shardplan.plan.mapping import as_tuples
from shardplan.plan.workload import workload_of
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import Step, Task
from shardplan.search.make_plan import plan_layout
from shardplan.verify.run import Case
from shardplan.verify.verdict import CompiledMemory, CompiledTime, Verdict

FILE = Path(calibrations.__file__).with_name(calibrations.FILE)
CASES = (
    # step, model, devices, sequences, replica x data x model, what parameters rest cut by besides
    "eval llama-3.1-8b 64 64 1x64x1 embed", "eval llama-3.1-8b 32 16 1x16x2 outputs",
    "eval olmo2-32b 64 16 1x16x4 embed", "eval qwen3-32b 64 16 1x8x8 nothing",
    "eval mistral-7b-v0.3 32 32 2x16x1 both", "eval llama-3.1-70b 64 16 1x8x8 embed",
    "train llama-3.1-8b 32 32 1x32x1 embed", "eval mistral-7b-v0.3 32 8 4x2x4 embed",
    "eval olmo2-32b 32 8 2x4x4 embed", "eval mixtral-8x7b 64 16 1x16x4 outputs",
    "train mixtral-8x7b 64 16 1x16x4 outputs",
)  # fmt: skip
"""What is compiled for every generation: tensor parallelism of 1, 2, 4 and 8; parameters gathered over the whole mesh
(64 and 32 devices), over 2 to 16, along one dimension, along two at once, and not at all; two of them train, and two
have experts. What does not fit a generation is left out."""
OUTPUTS = ("mlp", "head_size", "vocab")
RESTING = {
    "nothing": {},
    "embed": {"embed": ["data"]},
    "outputs": {axis: ["data"] for axis in OUTPUTS},
    "both": {"embed": ["data"], **{axis: ["replica"] for axis in OUTPUTS}},
}
TENSOR_PARALLEL = ("mlp", "heads", "kv_head", "vocab")
STAND_INS = {"v3": "v4"}
"""Generations that libtpu compiles no attention kernel in bfloat16 for -> the one whose factors they get."""
LINEAR = {"products": 1.0, "elementwise": 0.0, "rearranging": 0.0, "gathering": 0.0}
"""Factors that the time of compute without kernels is linear in -> the least that they can be."""
VECTORS = tuple(map(float, range(1, 41)))
OVERLAPS = tuple(percent / 100 for percent in range(0, 101, 5))
LEAST_MEMORY_ERROR = 0.08
"""Part of the memory: a few layouts that fill little of it do not show the worst."""
DIGITS = 3
"""Of the factors that are written."""


@dataclass(frozen=True)
class Observation:
    """A layout, and what the compiler makes of it."""

    label: str
    step: Step
    layout: ShardingAssignment
    hardware: Slice
    moved: Counter[str]
    """Bytes per device by kind of collective."""
    memory: CompiledMemory
    time: CompiledTime

    def tasks(self, factors: Calibration) -> Iterator[tuple[Task, DeviceCost, Seconds]]:
        """The planner's estimate with these factors, task by task."""
        return step_tasks(self.step, self._under(factors), self.hardware, factors)

    def bytes_by_kind(self, factors: Calibration) -> Counter[str]:
        """Estimated bytes per device."""
        found: Counter[str] = Counter()
        for _, mine, _ in self.tasks(factors):
            for traffic in mine.traffic:
                found[traffic.kind] += traffic.bytes  # type: ignore[assignment]
        return found

    def peak(self, factors: Calibration) -> float:
        """Estimated bytes of memory per device."""
        return memory(self.step, self._under(factors)).peak

    def work(self, factor: str, factors: Calibration) -> float:
        """Seconds of compute that `factor` multiplies: those with it as 1, and with the others as 0."""
        weights: dict[str, Any] = {**dict.fromkeys((*LINEAR, "attention"), 0.0), factor: 1.0}
        alone = replace(factors, **weights)
        return sum(compute_seconds(task, mine, self.hardware, alone) for task, mine, _ in self.tasks(factors))

    def _under(self, factors: Calibration) -> ShardingAssignment:
        return replace(self.layout, quirks=factors.quirks)


Error = Callable[[Observation, Calibration], float]


def make_case(text: str, generation: str) -> Case:
    """One of CASES."""
    kind, model, devices, batch, sizes, resting = text.split()
    chips = int(devices) // GENERATIONS[generation].devices_per_chip
    slice_name = f"{generation}-{chips * GENERATIONS[generation].name_counts_per_chip}"
    config = load(model, slice_name, kind, int(batch))
    hf_config, built = build(config)
    mesh = dict(zip(("replica", "data", "model"), map(int, sizes.split("x")), strict=True))
    compute = {"batch": [axis for axis in ("replica", "data") if mesh[axis] > 1]}
    compute |= {axis: ["model"] for axis in TENSOR_PARALLEL if mesh["model"] > 1}
    further = {axis: [*compute.get(axis, ()), *cut] for axis, cut in RESTING[resting].items()}
    plan = plan_layout(config, built, mesh, compute, {**compute, **further})
    return Case(f"{slice_name} {text}", plan, built, hf_config, options=plan.compiler_options)


def observe(case: Case, verdict: Verdict) -> Observation:
    """`case` as the planner sees it, beside its verdict."""
    assert verdict.memory and verdict.time
    plan = case.plan
    step = plan_step(case.model, workload_of(plan.workload))
    compute, params = as_tuples(plan.compute_mapping), as_tuples(plan.param_mapping)
    layout = ShardingAssignment(plan.mesh, compute, params, step.merged, step.activation_axes)
    hardware = parse_slice(plan.hardware.slice)
    return Observation(case.label, step, layout, hardware, by_kind(verdict), verdict.memory, verdict.time)


def fit(seen: Sequence[Observation]) -> Calibration:
    """The factors with the least errors, each in what it decides.

    Of layouts with experts these are the memory, and the time of the sums over experts, which others have none of.
    """
    everything, seen = seen, [observation for observation in seen if not observation.step.routed]
    devices = sorted({observation.hardware.devices for observation in seen})
    factors = Calibration()
    factors = best(
        factors, "quirks", [CompilerQuirks(least) for least in (None, *reversed(devices))], seen, bytes_error
    )
    for quirk in ("copies_stacks", "gathers_early", "wide_rows", "frees_rows"):
        quirks = [replace(factors.quirks, **{quirk: value}) for value in (False, True)]
        factors = best(factors, "quirks", quirks, everything, peak_error)
    own_cycles = [o.time.compute_seconds - o.time.kernel_seconds for o in seen]
    factors = replace(factors, **least_squares(factors, LINEAR, seen, own_cycles))
    kernels = [o.time.kernel_seconds for o in seen]
    factors = replace(factors, **least_squares(factors, {"attention": 0.0}, seen, kernels))
    routed = [observation for observation in everything if observation.step.routed]
    factors = best(factors, "vectors", VECTORS, routed, compute_error)
    factors = best(factors, "overlap", OVERLAPS, seen, step_error)
    lacking = max((o.memory.peak - o.peak(factors)) / o.memory.available for o in everything)
    return replace(factors, memory_error=round(max(LEAST_MEMORY_ERROR, lacking), DIGITS))


def best(
    factors: Calibration, name: str, values: Iterable[Any], seen: Sequence[Observation], error: Error
) -> Calibration:
    """`factors` with that of `values` (of equally good ones the first) that makes the sum of squared errors least."""
    candidates = [replace(factors, **{name: value}) for value in values]
    return min(candidates, key=lambda candidate: sum(error(o, candidate) ** 2 for o in seen))


def least_squares(
    factors: Calibration, least: Mapping[str, float], seen: Sequence[Observation], seconds: Sequence[float]
) -> dict[str, Any]:
    """Values for the factors of `least`, no smaller than there, with the least squares of relative errors."""
    target = np.array(seconds)
    work = np.array([[o.work(name, factors) for name in least] for o in seen])
    bounds = (list(least.values()), np.inf)
    found = lsq_linear(work / target[:, None], np.ones_like(target), bounds).x
    return {name: round(float(value), DIGITS) for name, value in zip(least, found, strict=True)}


def compute_error(o: Observation, factors: Calibration) -> float:
    return sum(seconds.compute for *_, seconds in o.tasks(factors)) / o.time.compute_seconds - 1


def step_error(o: Observation, factors: Calibration) -> float:
    return sum(seconds.total for *_, seconds in o.tasks(factors)) / o.time.step_seconds - 1


def peak_error(o: Observation, factors: Calibration) -> float:
    return o.peak(factors) / o.memory.peak - 1


def bytes_error(o: Observation, factors: Calibration) -> float:
    """Of all bytes those that the estimate lacks of a kind of collective, or has too many."""
    estimated = o.bytes_by_kind(factors)
    wrong = sum(abs(estimated[kind] - o.moved[kind]) for kind in {*estimated, *o.moved})
    return wrong / sum(o.moved.values())


ERRORS = {"compute": compute_error, "step": step_error, "peak": peak_error, "bytes": bytes_error}


def to_json(factors: Mapping[str, Calibration]) -> str:
    """A line per generation, without what is as in a Calibration that nothing was fitted for."""

    def unlike(each: Calibration | CompilerQuirks, plain: Calibration | CompilerQuirks) -> dict[str, Any]:
        return {
            key: unlike(value, CompilerQuirks()) if isinstance(value, CompilerQuirks) else value
            for key, value in vars(each).items()
            if value != vars(plain)[key]
        }

    lines = (f' "{name}": ' + json.dumps(unlike(each, Calibration())) for name, each in factors.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def errors_by_layout(seen: Sequence[Observation], factors: Mapping[str, Calibration]) -> str:
    """A row for every layout."""
    lines = [row("layout", *ERRORS), row(*["---"] * (1 + len(ERRORS)))]
    for o in seen:
        mine = factors[o.hardware.generation.name]
        lines.append(row(o.label, *(f"{error(o, mine):+.1%}" for error in ERRORS.values())))
    return "\n".join(lines)


def summary(seen: Sequence[Observation], factors: Mapping[str, Calibration]) -> str:
    """A row for every generation: median and worst error with the factors so far, and with the new ones."""
    lines = [row("generation", *ERRORS), row(*["---"] * (1 + len(ERRORS)))]
    for name, fitted in factors.items():
        mine = [o for o in seen if o.hardware.generation.name == name]
        for label, each in ((f"{name} so far", calibration(name)), (f"{name} fitted", fitted)):
            sizes = [[abs(error(o, each)) for o in mine] for error in ERRORS.values()]
            lines.append(row(label, *(f"{statistics.median(found):.1%}, {max(found):.1%}" for found in sizes)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=FILE, type=Path, help="JSON file to write; default: the planner's own")
    parser.add_argument("--jobs", type=int, help="compiles at a time")
    arguments = parser.parse_args()
    generations = [name for name in GENERATIONS if name not in STAND_INS]
    cases = [make_case(text, generation) for text in CASES for generation in generations]
    verdicts = compiled(cases, arguments.jobs)
    if any(verdict.outcome not in ("fits", "does not fit") for verdict in verdicts):
        raise SystemExit("some layouts could not be compiled")
    seen = [observe(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict.fits]
    fitted = {name: fit([o for o in seen if o.hardware.generation.name == name]) for name in generations}
    print(errors_by_layout(seen, fitted), summary(seen, fitted), sep="\n\n")
    everything = {name: fitted[STAND_INS.get(name, name)] for name in GENERATIONS}
    arguments.output.write_text(to_json(everything), encoding="utf-8")


if __name__ == "__main__":
    main()
