"""python scripts/fit_planner.py

Fits the factors of the planner's cost model (shardplan/cost/calibration.json) to programs that the TPU compiler makes
of a few plans for every generation, and writes them, with the errors that are left, and a table of both. Needs no TPU.
The plans differ from those of scripts/bench_planner.py and bench_published.py, which judge the result. Compiling all
programs takes hours on 2 cores; docs/benchmarks/calibration.json keeps what the compiler made of them, so that a change
of the cost model is fitted again in minutes.
"""

import argparse
import json
import math
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import numpy as np
from bench_planner import TENSOR_PARALLEL, build, load, row
from planner_record import (
    BENCHMARKS,
    CALIBRATION,
    PLANNER,
    PUBLISHED,
    Errors,
    Layout,
    Record,
    by_kind,
    compile_cases,
    errors_by_family,
    read_records,
    record_key,
    write_records,
)
from scipy.optimize import lsq_linear

from shardplan.cost import calibration
from shardplan.cost.calibration import Calibration, TrainingFactors, compiler_quirks, load_calibration
from shardplan.cost.gspmd import DeviceCost
from shardplan.cost.memory import estimate_memory
from shardplan.cost.roofline import TaskSeconds, compute_seconds, step_tasks
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.experts.method import ExpertMethod
from shardplan.hardware import Slice, parse_slice
from shardplan.hardware.generations import GENERATIONS
from shardplan.model.model_class import DECODER, LEVANTER
from shardplan.program.tasks import Task
from shardplan.search.given_plan import plan_given_mappings
from shardplan.search.result.compiler_options import TILE_MEMORY
from shardplan.verify.case import Case
from shardplan.verify.verdict import Outcome

FILE = Path(calibration.__file__).with_name(calibration.FILE)
TABLE = BENCHMARKS / "calibration.md"
CASES = (
    # step, model, devices, sequences, replica x data x model, name in STORED of the additional parameter sharding
    "eval llama-3.1-8b 64 64 1x64x1 embed", "eval llama-3.1-8b 32 16 1x16x2 outputs",
    "eval qwen3-32b 64 16 1x8x8 nothing", "eval mistral-7b-v0.3 32 32 2x16x1 both",
    "eval llama-3.1-70b 64 16 1x8x8 embed", "eval mixtral-8x7b 64 16 1x16x4 outputs",
    "train llama-3.1-8b 32 32 1x32x1 embed", "train mixtral-8x7b 64 16 1x16x4 outputs",
    "train qwen3-32b 64 64 1x32x2 outputs",
    "eval mixtral-8x7b 32 32 4x8x1 experts", "eval qwen3-30b-a3b 32 32 2x16x1 experts",
    "train qwen3-30b-a3b 32 32 1x32x1 experts",
)  # fmt: skip
"""Plans that are compiled for every generation: tensor parallelism of 1, 2, 4 and 8; parameters gathered over the whole
mesh (64 and 32 devices), over 8 and 16, along one dimension, along two at once, and not at all; three of them train,
and two have experts by Levanter's own blocks. Three have experts sharded over 8, 16 and 32 devices, by the decoder.
Plans that do not fit a generation are left out."""
TRAININGS = (
    "train llama-3.1-8b 32 192 1x32x1 embed", "train llama-2-13b 64 256 1x64x1 embed",
    "train llama-3.1-70b 128 256 1x128x1 embed",
)  # fmt: skip
"""More plans, with 8,192 to 24,576 tokens a device, to which only the factors of trainings are fitted."""
OUTPUTS = ("mlp", "head_size", "vocab")
STORED = {
    "nothing": {},
    "embed": {"embed": ["data"]},
    "outputs": {axis: ["data"] for axis in OUTPUTS},
    "both": {"embed": ["data"], **{axis: ["replica"] for axis in OUTPUTS}},
    "experts": {"embed": ["data"]},
}
"""Name -> mesh axes that shard parameters beyond the compute mapping."""
FITTED = tuple(name for name, row in GENERATIONS.items() if row.factors_of is None)
"""Generations that have factors of their own."""
TRAINING = "training."
"""What the names of factors of steps with gradients begin with."""
COMMON = ("products", "elementwise", "copying")
"""Factors in which the time of compute is linear. None is below 1: no work is faster than its roofline.

They are fitted to two trainings too, since evaluations are few.
"""
LINEAR_OF_TRAININGS = (f"{TRAINING}products", f"{TRAINING}elementwise")
"""The same for trainings."""
OF_TRAININGS = (*LINEAR_OF_TRAININGS, f"{TRAINING}weight_passes")
"""The factors of trainings."""
WEIGHT_PASSES = (0, 1)
"""Values of `weight_passes` that are tried."""
SLICINGS = tuple(half / 2 for half in range(4, 14))
"""Values of `slicing` that are tried: the copies alone take 3.5 to 6.4 times their bytes in compiled programs."""
KERNEL_WAITS = tuple(percent / 100 for percent in range(0, 101, 5))
"""Values of `kernel_wait` that are tried."""
VECTORS = tuple(map(float, range(1, 41)))
"""Values of `vectors` that are tried."""
OVERLAPS = tuple(percent / 100 for percent in range(0, 101, 5))
"""Values of `overlap` that are tried."""
VMEM_KIB = {"v5e": 65536, "v5p": 65536, "v6e": 98304, "tpu7x": 49152}
"""Generation -> vector memory that one operation may use in programs with larger tiles, KiB. With more, an operation
holds larger tiles of matmuls there, and reads operands from HBM less often (docs/log.md has what each gained, and what
else was tried); on v4 more than the compiler's own limit changes nothing."""
GATHERS_LATE = ("v4", "v5e")
"""Generations with the quirk `gathers_late`. It is read in compiled programs and not fitted: v6e hides these gathers,
but two of its calibration programs wait for others, which a fit would take for these (docs/log.md, Time)."""
DIGITS = 3
"""Number of decimal digits of the written factors."""


class Blocks(StrEnum):
    """How a program computes MLPs."""

    DENSE = "dense"
    GROUPED = "grouped matmuls"
    """Experts by Levanter's own blocks."""
    SHARDED = "sharded experts"
    """Experts by the block of shardplan."""


@dataclass(frozen=True, eq=False)
class Observation:
    """A recorded program, with what the planner estimates it from."""

    record: Record

    @property
    def layout(self) -> Layout:
        """What decides the program."""
        return self.record.layout

    @cached_property
    def hardware(self) -> Slice:
        """The slice."""
        return parse_slice(self.layout.slice)

    @property
    def has_larger_tiles(self) -> bool:
        """Whether it was compiled with larger tiles."""
        return TILE_MEMORY in self.layout.options

    @property
    def has_many_tokens(self) -> bool:
        """Whether it is one of `TRAININGS`."""
        return any(text in self.layout.label for text in TRAININGS)

    @property
    def blocks(self) -> Blocks:
        """How the program computes MLPs."""
        if self.layout.experts is not None:
            return Blocks.SHARDED
        return Blocks.GROUPED if self.layout.step.expert_axes else Blocks.DENSE

    @property
    def compute_seconds(self) -> float:
        """Seconds that the core computes, as compiled."""
        assert self.record.result.seconds
        return self.record.result.seconds[1]

    def tasks(self, factors: Calibration) -> Iterator[tuple[Task, DeviceCost, TaskSeconds]]:
        """The planner's estimate with these factors, task by task."""
        step = self.layout.step
        return step_tasks(step, self.with_quirks(factors), self.hardware, factors.of(step))

    def with_quirks(self, factors: Calibration) -> ShardingAssignment:
        """The sharding of the program, on a compiler with the quirks of `factors`."""
        return replace(self.layout.assignment, quirks=compiler_quirks(self.hardware, factors))


@cache
def compute_error(o: Observation, factors: Calibration) -> float:
    return sum(seconds.compute for *_, seconds in o.tasks(factors)) / o.compute_seconds - 1


@cache
def step_error(o: Observation, factors: Calibration) -> float:
    return sum(seconds.total for *_, seconds in o.tasks(factors)) / o.record.result.step_seconds - 1


@cache
def peak_error(o: Observation, factors: Calibration) -> float:
    assert o.record.result.peak
    return estimate_memory(o.layout.step, o.with_quirks(factors)).peak / o.record.result.peak - 1


@cache
def bytes_error(o: Observation, factors: Calibration) -> float:
    """Sum over the kinds of collectives of the absolute errors of their bytes, relative to all bytes."""
    traffic = [each for _, cost, _ in o.tasks(factors) for each in cost.traffic]
    estimated = by_kind((each.kind, each.bytes) for each in traffic)
    received = by_kind((kind, size) for kind, _, size, _ in o.record.result.collectives)
    wrong = sum(abs(estimated[kind] - received[kind]) for kind in {*estimated, *received})
    return wrong / sum(received.values())


@cache
def seconds_of_factor(o: Observation, name: str | None, factors: Calibration) -> float:
    """Seconds of compute that the factor `name` multiplies, or those that no linear factor does."""
    alone = with_values(factors, dict.fromkeys(linear_factors(factors), 0.0))
    if name is not None:
        alone = with_values(alone, {name: 1.0})
    used = alone.of(o.layout.step)
    total = sum(compute_seconds(task, cost, o.hardware, used) for task, cost, _ in o.tasks(factors))
    return total if name is None else total - seconds_of_factor(o, None, factors)


ERRORS = {"compute": compute_error, "step": step_error, "peak": peak_error, "bytes": bytes_error}


@dataclass(frozen=True)
class Group:
    """Factors that are fitted together, each group with the values of those before."""

    factors: tuple[str, ...]
    quantity: str
    """Key of `ERRORS`: what the factors decide."""
    blocks: tuple[Blocks, ...]
    """Programs that they are fitted to."""
    values: tuple[Any, ...] | None = None
    """Values that are tried; None for a linear fit of all factors at once."""

    def cases(self, observations: Sequence[Observation]) -> list[Observation]:
        """The programs that the factors are fitted to."""
        return [o for o in observations if o.blocks in self.blocks and not o.has_many_tokens]

    def fit(self, factors: Calibration, cases: Sequence[Observation]) -> Calibration:
        """`factors` with the values of this group that have the least sum of squared errors."""
        if self.values is None:
            return with_values(factors, least_squares(factors, cases, self.factors))
        (name,) = self.factors
        return self.best_of([with_values(factors, {name: value}) for value in self.values], cases)

    def best_of(self, candidates: Sequence[Calibration], cases: Sequence[Observation]) -> Calibration:
        """The candidate with the least sum of squared errors."""
        error = ERRORS[self.quantity]
        return min(candidates, key=lambda candidate: sum(error(o, candidate) ** 2 for o in cases))


@dataclass(frozen=True)
class TrainingGroup(Group):
    """The factors of steps with gradients, in place of those that they share with other steps until then."""

    def cases(self, observations: Sequence[Observation]) -> list[Observation]:
        """All trainings, those with many tokens among them."""
        return [o for o in observations if o.blocks in self.blocks and o.layout.step.has_gradients]

    def fit(self, factors: Calibration, cases: Sequence[Observation]) -> Calibration:
        """`factors` with those of trainings that have the least sum of squared errors."""
        candidates = []
        for passes in WEIGHT_PASSES:
            start = replace(factors, training=TrainingFactors(weight_passes=passes))
            candidates.append(with_values(start, least_squares(start, cases, LINEAR_OF_TRAININGS)))
        return self.best_of(candidates, cases)


BOTH, DENSE, ROUTED, SHARDED = (Blocks.DENSE, Blocks.GROUPED), (Blocks.DENSE,), (Blocks.GROUPED,), (Blocks.SHARDED,)
FLAGS = (False, True)
GROUPS = (
    Group(("gathers_become_sums_from",), "bytes", DENSE, (None, 64, 32, 16)),
    Group(("scatters_over_slice",), "bytes", DENSE, FLAGS),
    *(Group((name,), "peak", BOTH, FLAGS) for name in ("copies_stacks", "gathers_early", "wide_rows", "frees_rows")),
    Group(COMMON, "compute", DENSE),
    TrainingGroup(OF_TRAININGS, "compute", DENSE),
    Group(("vectors",), "compute", ROUTED, VECTORS),
    Group(("overlap",), "step", DENSE, OVERLAPS),
    Group(("overlaps_sums",), "step", DENSE, FLAGS),
    Group(("slicing",), "compute", SHARDED, SLICINGS),
    Group(("kernel_wait",), "step", SHARDED, KERNEL_WAITS),
)
TILE_GROUPS = (
    Group(("products", "elementwise"), "compute", DENSE),
    TrainingGroup(OF_TRAININGS, "compute", DENSE),
    Group(("overlap",), "step", DENSE, OVERLAPS),
)
"""Factors that differ with larger tiles: copies of gathered parameters are no matmuls, and take as long as without."""


@dataclass(frozen=True)
class Fit:
    """How well a group of factors fits one generation."""

    factors: tuple[str, ...]
    quantity: str
    cases: list[str]
    """Programs that it was fitted to."""
    residual: float
    """Root mean square of the errors that are left."""
    leave_one_out: float
    """Root mean square of the error of each program if the factors are fitted to the others."""


def with_values(factors: Calibration, values: Mapping[str, Any]) -> Calibration:
    """`factors` with other values of some factors, or of quirks of the compiler."""
    for name, value in values.items():
        if name.startswith(TRAINING):
            training = replace(factors.training or TrainingFactors(), **{name.removeprefix(TRAINING): value})
            factors = replace(factors, training=training)
        elif name in vars(factors):
            factors = replace(factors, **{name: value})
        else:
            factors = replace(factors, quirks=replace(factors.quirks, **{name: value}))
    return factors


def linear_factors(factors: Calibration) -> tuple[str, ...]:
    """The factors in which the time of compute is linear, among those of a calibration."""
    return COMMON if factors.training is None else (*COMMON, *LINEAR_OF_TRAININGS)


def value_of(factors: Calibration, name: str) -> Any:
    """The value of a factor, or of a quirk of the compiler."""
    if name.startswith(TRAINING):
        return getattr(factors.training, name.removeprefix(TRAINING))
    return {**vars(factors), **vars(factors.quirks)}[name]


def least_squares(factors: Calibration, cases: Sequence[Observation], names: Sequence[str]) -> dict[str, Any]:
    """Values for these linear factors that minimize the sum of squared relative errors of the compute time."""
    target = np.array([o.compute_seconds for o in cases])
    terms = np.array([[seconds_of_factor(o, name, factors) for name in names] for o in cases])
    constant = np.array([seconds_of_factor(o, None, factors) for o in cases])
    for name in set(linear_factors(factors)).difference(names):  # keeps its value
        constant += [value_of(factors, name) * seconds_of_factor(o, name, factors) for o in cases]
    solution = lsq_linear(terms / target[:, None], 1 - constant / target, (1.0, np.inf)).x
    return {name: round(float(value), DIGITS) for name, value in zip(names, solution, strict=True)}


def fit(
    observations: Sequence[Observation], groups: Sequence[Group], start: Calibration
) -> tuple[Calibration, list[Fit]]:
    """The factors of one generation, group by group, and how well each group fits.

    Args:
        start: the values of the factors that no group has.
    """
    factors, fits = start, []
    for group in groups:
        cases, error = group.cases(observations), ERRORS[group.quantity]
        fitted = group.fit(factors, cases)
        left_out = [error(o, group.fit(factors, [each for each in cases if each is not o])) for o in cases]
        labels = [o.layout.label.split(maxsplit=1)[1] for o in cases]
        residual = rms([error(o, fitted) for o in cases])
        fits.append(Fit(group.factors, group.quantity, labels, residual, rms(left_out)))
        factors = fitted
    return factors, fits


@dataclass(frozen=True)
class Fitted:
    """The factors of one generation, and how well they fit."""

    factors: Calibration
    fits: list[Fit]
    tiled: Calibration | None
    """The factors with larger tiles; None if the generation has the compiler's own."""
    tiled_fits: list[Fit]

    @classmethod
    def of(cls, generation: str, observations: Sequence[Observation]) -> "Fitted":
        """Fit the factors to the programs of the generation."""
        own = [o for o in observations if o.hardware.generation.name == generation]
        start = Calibration(quirks=CompilerQuirks(gathers_late=generation in GATHERS_LATE))
        factors, fits = fit([o for o in own if not o.has_larger_tiles], GROUPS, start)
        if generation not in VMEM_KIB:
            return cls(factors, fits, None, [])
        tiled = [o for o in own if o.has_larger_tiles]
        start = replace(factors, vmem_kib=VMEM_KIB[generation], training=None)
        return cls(factors, fits, *fit(tiled, TILE_GROUPS, start))

    def of_program(self, o: Observation) -> Calibration:
        """The factors for the options of a program."""
        return self.tiled if self.tiled is not None and o.has_larger_tiles else self.factors

    @property
    def entry(self) -> dict[str, Any]:
        """Its entry in the file of factors."""
        entry = {**_values(self.factors, GROUPS), "fits": [vars(each) for each in self.fits]}
        quirks = vars(self.factors.quirks)
        for name in entry["factors"].keys() & quirks.keys():
            del entry["factors"][name]
        entry["quirks"] = {
            name: quirks[name] for name in sorted(quirks) if quirks[name] != getattr(CompilerQuirks, name)
        }
        if self.tiled is not None:
            fits = [vars(each) for each in self.tiled_fits]
            entry["larger_tiles"] = {"vmem_kib": self.tiled.vmem_kib, **_values(self.tiled, TILE_GROUPS), "fits": fits}
        return entry


def _values(factors: Calibration, groups: Sequence[Group]) -> dict[str, Any]:
    """The fitted factors of some groups: those of all steps, and those of steps with gradients."""
    names = [name for group in groups for name in group.factors]
    training = [name for name in names if name.startswith(TRAINING)]
    return {
        "factors": {name: value_of(factors, name) for name in names if name not in training},
        "training": {name.removeprefix(TRAINING): value_of(factors, name) for name in training},
    }


def rms(errors: Sequence[float]) -> float:
    """Root mean square, rounded."""
    return round(math.sqrt(statistics.fmean(error**2 for error in errors)), DIGITS)


def make_case(text: str, generation: str) -> Case:
    """The case for one line of CASES."""
    kind, model, devices, batch, sizes, stored = text.split()
    chips = int(devices) // GENERATIONS[generation].devices_per_chip
    slice_name = f"{generation}-{chips * GENERATIONS[generation].name_counts_per_chip}"
    is_sharded = stored == "experts"
    config = load(model, slice_name, kind, int(batch), model_class=DECODER if is_sharded else LEVANTER)
    hf_config, built = build(config)
    mesh = dict(zip(("replica", "data", "model"), map(int, sizes.split("x")), strict=True))
    compute = {"batch": [axis for axis in ("replica", "data") if mesh[axis] > 1]}
    compute |= {axis: ["model"] for axis in TENSOR_PARALLEL if mesh["model"] > 1}
    if is_sharded:
        compute["experts"] = ["data"]
    params = {axis: [*compute.get(axis, ()), *mesh_axes] for axis, mesh_axes in STORED[stored].items()}
    experts = ExpertMethod() if is_sharded else None
    plan = plan_given_mappings(config, built, mesh, compute, {**compute, **params}, experts=experts)
    return Case(f"{slice_name} {text}", plan, hf_config, options=plan.compiler_options)


def make_cases() -> list[Case]:
    """All programs: those of every plan with the compiler's own tiles, and of dense models with larger ones as well."""
    cases = []
    for text in (*CASES, *TRAININGS):
        for generation in FITTED:
            case = make_case(text, generation)
            own = {name: value for name, value in case.options.items() if name != TILE_MEMORY}
            cases.append(replace(case, options=own))
            if generation in VMEM_KIB and "num_experts_per_tok" not in case.hf_config:
                options = {**own, TILE_MEMORY: str(VMEM_KIB[generation])}
                cases.append(replace(case, label=f"{case.label}, larger tiles", options=options))
    return cases


def fits_table(fitted: Mapping[str, Fitted]) -> str:
    """A row for every generation, kind of tiles and group of factors."""
    columns = ("generation", "factors", "decide", "programs", "residual", "leave-one-out")
    lines = [row(*columns), row(*["---"] * len(columns))]
    for name, each in fitted.items():
        lines += _fit_rows(name, each.factors, each.fits)
        if each.tiled is not None:
            lines += _fit_rows(f"{name}, larger tiles", each.tiled, each.tiled_fits)
    return "\n".join(lines)


def _fit_rows(name: str, factors: Calibration, fits: Sequence[Fit]) -> Iterator[str]:
    for each in fits:
        text = ", ".join(f"{factor} {value_of(factors, factor)}" for factor in each.factors)
        numbers = (len(each.cases), f"{each.residual:.1%}", f"{each.leave_one_out:.1%}")
        yield row(name, text, QUANTITIES[each.quantity], *numbers)


def errors_table(errors: Mapping[str, Sequence[Errors]]) -> str:
    """Median and worst errors of the programs that the factors are fitted to, and of all others, by family."""
    columns = ("programs", "family", "number", "memory", "bytes", "step")
    lines = [row(*columns), row(*["---"] * len(columns))]
    for name, families in errors.items():
        for family, each in sorted(families.items()):
            cells = []
            for quantity in ("peak", "received", "step"):
                values = [abs(value) for e in each if (value := getattr(e, quantity)) is not None]
                cells.append(f"{statistics.median(values):.1%}, {max(values):.1%}" if values else "-")
            lines.append(row(name, family, len(each), *cells))
    return "\n".join(lines)


def plans_table(observations: Sequence[Observation], fitted: Mapping[str, Fitted]) -> str:
    """The errors of every program that the factors are fitted to."""
    lines = [row("plan", *ERRORS), row(*["---"] * (1 + len(ERRORS)))]
    for o in observations:
        factors = fitted[o.hardware.generation.name].of_program(o)
        lines.append(row(o.layout.label, *(f"{error(o, factors):+.1%}" for error in ERRORS.values())))
    return "\n".join(lines)


def gains_table(observations: Sequence[Observation]) -> str:
    """A row for every program with larger tiles: its times, and those with the compiler's own tiles."""
    columns = ("plan", "step s", "with larger tiles", "gain", "compute s", "with larger tiles", "gain")
    lines = [row(*columns), row(*["---"] * len(columns))]
    own = {o.layout.label: o.record.result.seconds for o in observations if not o.has_larger_tiles}
    for o in observations:
        if o.has_larger_tiles:
            label = o.layout.label.removesuffix(", larger tiles")
            cells: list[str] = []
            for before, after in zip(own[label][:2], o.record.result.seconds[:2], strict=True):
                cells += [f"{before:.3g}", f"{after:.3g}", f"{1 - after / before:.0%}"]
            lines.append(row(label, *cells))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", default=FILE, type=Path, help="JSON file to write; default: the planner's own")
    parser.add_argument("--table", default=TABLE, type=Path, help="Markdown file to write")
    parser.add_argument("--jobs", type=int, help="compiles at a time")
    parser.add_argument(
        "--takes_earlier", action="store_true", help="take results of the same layouts that earlier code compiled"
    )
    arguments = parser.parse_args()
    cases = make_cases()
    records = compile_cases(cases, CALIBRATION, arguments.jobs, arguments.takes_earlier)
    if any(record.result.outcome not in (Outcome.FITS, Outcome.DOES_NOT_FIT) for record in records):
        raise SystemExit("some plans could not be compiled")
    write_records(records, CALIBRATION)
    observations = [Observation(record) for record in records if record.result.fits]
    fitted = {name: Fitted.of(name, observations) for name in FITTED}
    entries = {name: each.entry for name, each in fitted.items()}
    arguments.output.write_text(json.dumps(entries, indent=1) + "\n", encoding="utf-8")
    load_calibration.cache_clear()
    # read again, because estimates that the fit has made are of the factors of before
    held_out = [*read_records(PLANNER).values(), *read_records(PUBLISHED).values()]
    errors = {
        "fitted": errors_by_family(read_records(CALIBRATION).values()),
        "held out": errors_by_family(held_out),
    }
    earlier = sum(record.key != record_key(case) for case, record in zip(cases, records, strict=True))
    text = TEMPLATE.format(
        fits=fits_table(fitted), gains=gains_table(observations), errors=errors_table(errors),
        plans=plans_table(observations, fitted), earlier=earlier, programs=len(records),
    )  # fmt: skip
    arguments.table.write_text(text, encoding="utf-8")


QUANTITIES = {"compute": "compute time", "step": "step time", "peak": "peak memory", "bytes": "bytes by kind"}

TEMPLATE = """# The factors of the cost model

Made by `python scripts/fit_planner.py`, which compiles a few plans for every generation and writes
`shardplan/cost/calibration.json`. Factors multiply rooflines: `products` of matmuls, `elementwise` of elementwise work,
`copying` of gathered parameters which are copied, `vectors` of matrix-vector products, `slicing` of copies of a layer's
expert weights out of the stack. Dense steps with gradients have the factors named `training`, fitted to trainings
alone; `weight_passes` is how often elementwise work reads or writes a matmul's weight there. `overlap` is the part of a
matmul that gathers run behind, `kernel_wait` the part of the transfers of experts' tokens, in two parts, that nothing
overlaps. The others say what the compiler does (`CompilerQuirks` in `shardplan/cost/sharding.py`). v3 has the factors
of v4, because libtpu compiles no attention kernel in bfloat16 for it.

Where it pays, plans of models without routed experts ask the compiler for larger tiles (`vmem_kib`); such programs have
factors of their own. {earlier} of the {programs} programs were compiled by earlier code
(`fit_planner.py --takes_earlier`).

## Fits

Errors are root mean squares over the programs that a group of factors is fitted to, relative to the compiler's value;
leave-one-out, of each program by a fit of the group without it. Groups before it keep their values.

{fits}

Not fitted: lookups, scatters and grouped matmuls, for which the compiler has no cycles, take their rooflines, and so
does work that only moves elements; attention takes its unmasked FLOPs at peak, with the 7/4 of the matmuls that kernels
compute in the backward pass (`KERNEL_PRODUCTS_OF_GRADIENTS`); 8 % of the memory are kept free (`MEMORY_ERROR`), more
than any program of these pages that fits needs above its estimate.

## What larger tiles gain

{gains}

## Errors by family

Median and worst. Held out are all programs of [planner.md](planner.md) and [published.md](published.md).

{errors}

## Programs

{plans}
"""

if __name__ == "__main__":
    main()
