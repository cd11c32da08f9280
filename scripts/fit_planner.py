"""python scripts/fit_planner.py

Fits the factors of the planner's cost model (shardplan/cost/calibration.json) to programs that the TPU compiler makes
of a few plans for every generation, writes the factors, and prints the remaining errors beside those of the factors so
far. Needs no TPU. The plans differ from those of scripts/bench_planner.py, which judges the result. Programs that were
compiled before come from the cache of shardplan.verify; all of them take an hour on 2 cores.
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
from bench_planner import build, load, report, row
from planner_record import by_kind
from scipy.optimize import lsq_linear

from shardplan.config.sections import CompilerConfig
from shardplan.cost import calibration
from shardplan.cost.calibration import Calibration, load_calibration
from shardplan.cost.gspmd import DeviceCost
from shardplan.cost.memory import estimate_memory
from shardplan.cost.roofline import TaskSeconds, compute_seconds, step_tasks
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.hardware import Slice, parse_slice
from shardplan.hardware.generations import GENERATIONS
from shardplan.model.registry import build_model
from shardplan.plan.mapping import as_tuples
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import Step, Task
from shardplan.search.given_plan import plan_given_mappings
from shardplan.verify.case import Case
from shardplan.verify.run import verify
from shardplan.verify.verdict import CompiledMemory, CompiledTime, Outcome, Verdict

FILE = Path(calibration.__file__).with_name(calibration.FILE)
CASES = (
    # step, model, devices, sequences, replica x data x model, name in STORED of the additional parameter sharding
    "eval llama-3.1-8b 64 64 1x64x1 embed", "eval llama-3.1-8b 32 16 1x16x2 outputs",
    "eval olmo2-32b 64 16 1x16x4 embed", "eval qwen3-32b 64 16 1x8x8 nothing",
    "eval mistral-7b-v0.3 32 32 2x16x1 both", "eval llama-3.1-70b 64 16 1x8x8 embed",
    "train llama-3.1-8b 32 32 1x32x1 embed", "eval mistral-7b-v0.3 32 8 4x2x4 embed",
    "eval olmo2-32b 32 8 2x4x4 embed", "eval mixtral-8x7b 64 16 1x16x4 outputs",
    "train mixtral-8x7b 64 16 1x16x4 outputs",
)  # fmt: skip
"""Plans that are compiled for every generation: tensor parallelism of 1, 2, 4 and 8; parameters gathered over the whole
mesh (64 and 32 devices), over 2 to 16, along one dimension, along two at once, and not at all; two of them train, and
two have experts. Plans that do not fit a generation are left out."""
OUTPUTS = ("mlp", "head_size", "vocab")
STORED = {
    "nothing": {},
    "embed": {"embed": ["data"]},
    "outputs": {axis: ["data"] for axis in OUTPUTS},
    "both": {"embed": ["data"], **{axis: ["replica"] for axis in OUTPUTS}},
}
"""Name -> mesh axes that shard parameters beyond the compute mapping."""
TENSOR_PARALLEL = ("mlp", "heads", "kv_head", "vocab")
STAND_INS = {"v3": "v4"}
"""Generation for which libtpu compiles no attention kernel in bfloat16 -> the generation whose factors it gets."""
LINEAR = {"products": 1.0, "elementwise": 0.0, "rearranging": 0.0, "gathering": 0.0}
"""Factors in which the time of compute without kernels is linear -> their lower bounds."""
VECTORS = tuple(map(float, range(1, 41)))
OVERLAPS = tuple(percent / 100 for percent in range(0, 101, 5))
MIN_MEMORY_ERROR = 0.08
"""Lower bound of the memory error, as a fraction of the memory: a few plans do not show the worst error."""
DIGITS = 3
"""Number of decimal digits of the written factors."""


@dataclass(frozen=True)
class Observation:
    """A plan, and the compiler's measurements of its program."""

    label: str
    step: Step
    assignment: ShardingAssignment
    hardware: Slice
    bytes_received: Counter[str]
    """Bytes per device by kind of collective."""
    memory: CompiledMemory
    time: CompiledTime

    def tasks(self, factors: Calibration) -> Iterator[tuple[Task, DeviceCost, TaskSeconds]]:
        """The planner's estimate with these factors, task by task."""
        return step_tasks(self.step, self._with_quirks(factors), self.hardware, factors)

    def bytes_by_kind(self, factors: Calibration) -> Counter[str]:
        """Estimated bytes per device."""
        received: Counter[str] = Counter()
        for _, cost, _ in self.tasks(factors):
            for traffic in cost.traffic:
                received[traffic.kind] += traffic.bytes  # type: ignore[assignment]
        return received

    def peak(self, factors: Calibration) -> float:
        """Estimated bytes of memory per device."""
        return estimate_memory(self.step, self._with_quirks(factors)).peak

    def seconds_of_factor(self, factor: str, factors: Calibration) -> float:
        """Seconds of compute that `factor` multiplies: those with this factor as 1, and all others as 0."""
        weights: dict[str, Any] = {**dict.fromkeys((*LINEAR, "attention"), 0.0), factor: 1.0}
        alone = replace(factors, **weights)
        return sum(compute_seconds(task, cost, self.hardware, alone) for task, cost, _ in self.tasks(factors))

    def _with_quirks(self, factors: Calibration) -> ShardingAssignment:
        return replace(self.assignment, quirks=factors.quirks)


Error = Callable[[Observation, Calibration], float]


def make_case(text: str, generation: str) -> Case:
    """The case for one line of CASES."""
    kind, model, devices, batch, sizes, stored = text.split()
    chips = int(devices) // GENERATIONS[generation].devices_per_chip
    slice_name = f"{generation}-{chips * GENERATIONS[generation].name_counts_per_chip}"
    config = load(model, slice_name, kind, int(batch))
    hf_config, built = build(config)
    mesh = dict(zip(("replica", "data", "model"), map(int, sizes.split("x")), strict=True))
    compute = {"batch": [axis for axis in ("replica", "data") if mesh[axis] > 1]}
    compute |= {axis: ["model"] for axis in TENSOR_PARALLEL if mesh["model"] > 1}
    params = {axis: [*compute.get(axis, ()), *mesh_axes] for axis, mesh_axes in STORED[stored].items()}
    plan = plan_given_mappings(config, built, mesh, compute, {**compute, **params})
    return Case(f"{slice_name} {text}", plan, hf_config, options=plan.compiler_options)


def observe(case: Case, verdict: Verdict) -> Observation:
    """The planner's inputs for `case`, with the measurements of its verdict."""
    assert verdict.memory and verdict.time
    plan = case.plan
    step = plan_step(build_model(case.hf_config, plan.workload.position), plan.workload.resolve())
    compute, params = as_tuples(plan.compute_mapping), as_tuples(plan.param_mapping)
    assignment = ShardingAssignment(plan.mesh, compute, params, step.merged_axes, step.activation_axes)
    hardware = parse_slice(plan.hardware.slice)
    received = by_kind((each.kind, each.bytes) for each in verdict.collectives)
    return Observation(case.label, step, assignment, hardware, received, verdict.memory, verdict.time)


def fit(observations: Sequence[Observation]) -> Calibration:
    """The factors that minimize the errors, each factor the error that it decides.

    Plans with experts are used for errors of memory, and for the time of sums over experts, which no other plan has.
    """
    dense = [observation for observation in observations if not observation.step.expert_axes]
    routed = [observation for observation in observations if observation.step.expert_axes]
    devices = sorted({observation.hardware.devices for observation in dense})
    factors = Calibration()
    quirks = [CompilerQuirks(gathers_become_sums_from=count) for count in (None, *reversed(devices))]
    factors = choose(factors, "quirks", quirks, dense, bytes_error)
    for quirk in ("copies_stacks", "gathers_early", "wide_rows", "frees_rows"):
        quirks = [replace(factors.quirks, **{quirk: value}) for value in (False, True)]
        factors = choose(factors, "quirks", quirks, observations, peak_error)
    cycle_seconds = [o.time.compute_seconds - o.time.kernel_seconds for o in dense]
    factors = replace(factors, **least_squares(factors, LINEAR, dense, cycle_seconds))
    kernel_seconds = [o.time.kernel_seconds for o in dense]
    factors = replace(factors, **least_squares(factors, {"attention": 0.0}, dense, kernel_seconds))
    factors = choose(factors, "vectors", VECTORS, routed, compute_error)
    factors = choose(factors, "overlap", OVERLAPS, dense, step_error)
    underestimate = max((o.memory.peak - o.peak(factors)) / o.memory.available for o in observations)
    return replace(factors, memory_error=round(max(MIN_MEMORY_ERROR, underestimate), DIGITS))


def choose(
    factors: Calibration, name: str, values: Iterable[Any], observations: Sequence[Observation], error: Error
) -> Calibration:
    """`factors` with the first of `values` for `name` that minimizes the sum of squared errors."""
    candidates = [replace(factors, **{name: value}) for value in values]
    return min(candidates, key=lambda candidate: sum(error(o, candidate) ** 2 for o in observations))


def least_squares(
    factors: Calibration,
    lower_bounds: Mapping[str, float],
    observations: Sequence[Observation],
    seconds: Sequence[float],
) -> dict[str, Any]:
    """Values for the factors in `lower_bounds` that minimize the sum of squared relative errors of `seconds`."""
    target = np.array(seconds)
    terms = np.array([[o.seconds_of_factor(name, factors) for name in lower_bounds] for o in observations])
    bounds = (list(lower_bounds.values()), np.inf)
    solution = lsq_linear(terms / target[:, None], np.ones_like(target), bounds).x
    return {name: round(float(value), DIGITS) for name, value in zip(lower_bounds, solution, strict=True)}


def compute_error(o: Observation, factors: Calibration) -> float:
    return sum(seconds.compute for *_, seconds in o.tasks(factors)) / o.time.compute_seconds - 1


def step_error(o: Observation, factors: Calibration) -> float:
    return sum(seconds.total for *_, seconds in o.tasks(factors)) / o.time.step_seconds - 1


def peak_error(o: Observation, factors: Calibration) -> float:
    return o.peak(factors) / o.memory.peak - 1


def bytes_error(o: Observation, factors: Calibration) -> float:
    """Sum over the kinds of collectives of the absolute errors of their bytes, relative to all bytes."""
    estimated = o.bytes_by_kind(factors)
    wrong = sum(abs(estimated[kind] - o.bytes_received[kind]) for kind in {*estimated, *o.bytes_received})
    return wrong / sum(o.bytes_received.values())


ERRORS = {"compute": compute_error, "step": step_error, "peak": peak_error, "bytes": bytes_error}


def to_json(factors: Mapping[str, Calibration]) -> str:
    """A line of JSON per generation, without the values that equal the defaults of `Calibration`."""

    def fitted(each: Calibration | CompilerQuirks, defaults: Calibration | CompilerQuirks) -> dict[str, Any]:
        return {
            key: fitted(value, CompilerQuirks()) if isinstance(value, CompilerQuirks) else value
            for key, value in vars(each).items()
            if value != vars(defaults)[key]
        }

    lines = (f' "{name}": ' + json.dumps(fitted(each, Calibration())) for name, each in factors.items())
    return "{\n" + ",\n".join(lines) + "\n}\n"


def errors_by_plan(observations: Sequence[Observation], factors: Mapping[str, Calibration]) -> str:
    """A table with a row for every plan."""
    lines = [row("plan", *ERRORS), row(*["---"] * (1 + len(ERRORS)))]
    for o in observations:
        fitted = factors[o.hardware.generation.name]
        lines.append(row(o.label, *(f"{error(o, fitted):+.1%}" for error in ERRORS.values())))
    return "\n".join(lines)


def summary(observations: Sequence[Observation], factors: Mapping[str, Calibration]) -> str:
    """A table of median and worst errors by generation, with the factors so far and with the new ones."""
    lines = [row("generation", *ERRORS), row(*["---"] * (1 + len(ERRORS)))]
    for name, fitted in factors.items():
        of_generation = [o for o in observations if o.hardware.generation.name == name]
        for label, each in ((f"{name} so far", load_calibration(name)), (f"{name} fitted", fitted)):
            errors = [[abs(error(o, each)) for o in of_generation] for error in ERRORS.values()]
            lines.append(row(label, *(f"{statistics.median(values):.1%}, {max(values):.1%}" for values in errors)))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=FILE, type=Path, help="JSON file to write; default: the planner's own")
    parser.add_argument("--jobs", type=int, help="compiles at a time")
    arguments = parser.parse_args()
    generations = [name for name in GENERATIONS if name not in STAND_INS]
    cases = [make_case(text, generation) for text in CASES for generation in generations]
    verdicts = verify(cases, CompilerConfig(jobs=arguments.jobs), report)
    if any(verdict.outcome not in (Outcome.FITS, Outcome.DOES_NOT_FIT) for verdict in verdicts):
        raise SystemExit("some plans could not be compiled")
    observations = [observe(case, verdict) for case, verdict in zip(cases, verdicts, strict=True) if verdict.fits]
    fitted = {name: fit([o for o in observations if o.hardware.generation.name == name]) for name in generations}
    print(errors_by_plan(observations, fitted), summary(observations, fitted), sep="\n\n")
    factors = {name: fitted[STAND_INS.get(name, name)] for name in GENERATIONS}
    arguments.output.write_text(to_json(factors), encoding="utf-8")


if __name__ == "__main__":
    main()
