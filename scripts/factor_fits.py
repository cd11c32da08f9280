"""Fits of the cost model's factors to compiled programs, one group of factors after the other.

A group has the values with the least sum of squared errors of one quantity (compute or step time, peak memory, bytes of
collectives) over the programs that it is fitted to. Those before it keep their values.
"""

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, cached_property
from typing import Any

import numpy as np
from fitted_programs import VMEM_KIB
from planner_record import Layout, Record, by_kind
from scipy.optimize import lsq_linear

from shardplan.cost.calibration import Calibration, TrainingFactors, compiler_quirks
from shardplan.cost.gspmd import DeviceCost
from shardplan.cost.memory import estimate_memory
from shardplan.cost.roofline import TaskSeconds, compute_seconds, step_tasks
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.hardware import Slice, parse_slice
from shardplan.program.tasks import Task
from shardplan.search.result.compiler_options import TILE_MEMORY

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
GATHERS_LATE = ("v4", "v5e")
"""Generations with the quirk `gathers_late`. It is read in compiled programs and not fitted: v6e hides these gathers,
but two of its calibration programs wait for others, which a fit would take for these (docs/log.md, Time)."""
MANY_TOKENS = 8192
"""Tokens a device from which a program decides the factors of trainings alone."""
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
        """Whether a device computes so many tokens that activations decide the time of elementwise work."""
        workload = self.layout.workload
        tokens: int = workload["batch"] * workload["position"]
        return tokens // math.prod(self.layout.mesh.values()) >= MANY_TOKENS

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
        """All trainings, among them those with many tokens a device."""
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
