"""Exhaustive search over meshes and mappings: every combination of the space is evaluated, or excluded with a reason.

The space: all factorisations of the devices into (replica, data, model); the batch axis on replica and data; any set of
logical axes of which no array holds two on `model` while computing; parameters rest cut by the same axes, and in
addition by `data` (and `replica`) along any other such set. The residual axis is never cut while computing, nor are
routed (expert) axes or the axes that layers are stacked along.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass, field
from functools import cache

from shardplan.errors import ConfigError
from shardplan.hardware import GIB, Slice
from shardplan.model import ModelAxes
from shardplan.plan.cost import compute_seconds, compute_traffic, step_seconds, weight_traffic
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, independent_sets
from shardplan.plan.memory import (
    Workload,
    activation_bytes,
    cast_bytes,
    gathered_bytes,
    gradient_bytes,
    logit_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_bytes,
)

MESH_AXES = ("replica", "data", "model")
TIME_RESOLUTION = 0.05
"""Plans whose times differ by less than this part are equal to the cost model; the one with more free memory wins."""
GATHERED_AT_ONCE = 2
"""Weights that are whole at a time: one in use, one arriving meanwhile."""


@dataclass(frozen=True)
class Candidate:
    """One mesh with both mappings, evaluated."""

    mesh: dict[str, int]
    compute: dict[str, MeshAxes]
    tensor: dict[str, MeshAxes]
    """The part of `compute` that cuts parameters."""
    resting: frozenset[str]
    """Logical axes that are cut by `extra` in addition while parameters rest."""
    extra: MeshAxes
    seconds: float
    parameter_bytes: int
    gathered_bytes: int
    peak_bytes: int

    def params(self, axes: Iterable[str]) -> dict[str, MeshAxes]:
        """Mapping of the logical axes `axes` in parameters at rest."""
        return resting_mapping(axes, self.tensor, self.resting, self.extra)


@dataclass
class Outcome:
    """What the search found."""

    best: Candidate | None = None
    runner_up: Candidate | None = None
    """The best candidate on another mesh than the best one's."""
    nearest_miss: Candidate | None = None
    """The candidate that needs least memory, when none fits."""
    evaluated: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    indivisible: dict[str, str] = field(default_factory=dict)
    """Logical axis -> why it could not be cut, one example each."""


def mesh_shapes(hardware: Slice, pinned: dict[str, int | None]) -> list[dict[str, int]]:
    """Every (replica, data, model) whose product is the number of devices, with the pinned sizes.

    Raises:
        ConfigError: the pinned sizes leave none.
    """
    n = hardware.devices
    fixed = {axis: size for axis, size in pinned.items() if size is not None}
    shapes = [
        {"replica": replica, "data": data, "model": n // replica // data}
        for replica in _divisors(n)
        for data in _divisors(n // replica)
    ]
    kept = [shape for shape in shapes if all(shape[axis] == size for axis, size in fixed.items())]
    if kept and hardware.slices > 1:
        # only replica and data cross the network between slices
        across = [shape for shape in kept if shape["replica"] * shape["data"] % hardware.slices == 0]
        if not across:
            raise ConfigError(
                f"mesh.model {kept[0]['model']} leaves replica x data = {n // kept[0]['model']}, which the "
                f"{hardware.slices} slices of {hardware.name} do not divide; use a smaller mesh.model"
            )
        return across
    if not kept:
        wanted = " x ".join(f"mesh.{axis} {size}" for axis, size in fixed.items())
        product = math.prod(fixed.values())
        problem = "does not divide" if n % product or len(fixed) < len(MESH_AXES) else "is not all of"
        raise ConfigError(
            f"{wanted} {problem} the {n} devices of {hardware.name}; {' x '.join(MESH_AXES)} must be {n}, "
            f"each one of {', '.join(map(str, _divisors(n)))}"
        )
    return kept


def search(model: ModelAxes, workload: Workload, hardware: Slice, meshes: list[dict[str, int]]) -> Outcome:
    """The fastest candidate that fits; among those equally fast to the model's resolution, the smallest."""
    outcome = Outcome()
    fitting: list[Candidate] = []
    available = hardware.generation.hbm_gib * GIB
    for mesh in meshes:
        for candidate in _OnMesh(model, workload, hardware, mesh, outcome).candidates():
            outcome.evaluated += 1
            if candidate.peak_bytes <= available:
                fitting.append(candidate)
                continue
            outcome.rejected["memory"] += 1
            if outcome.nearest_miss is None or candidate.peak_bytes < outcome.nearest_miss.peak_bytes:
                outcome.nearest_miss = candidate
    if fitting:
        outcome.best = _choose(fitting)
        others = [c for c in fitting if c.mesh != outcome.best.mesh]
        outcome.runner_up = _choose(others) if others else None
    return outcome


def _choose(candidates: list[Candidate]) -> Candidate:
    fastest = min(candidate.seconds for candidate in candidates)
    equal = [c for c in candidates if c.seconds <= fastest * (1 + TIME_RESOLUTION)]
    return min(equal, key=lambda c: (c.peak_bytes, c.seconds, tuple(c.mesh.values()), len(c.tensor), sorted(c.resting)))


@dataclass(frozen=True)
class _Rest:
    """One parameter at rest, cut along one of its axes (or none) in addition to the compute mapping."""

    stored: int
    cast: int
    gathered: int
    seconds: float
    """Time to gather it for use."""


class _OnMesh:
    """The candidates on one mesh."""

    def __init__(
        self, model: ModelAxes, workload: Workload, hardware: Slice, mesh: dict[str, int], outcome: Outcome
    ) -> None:
        self.model, self.workload, self.hardware, self.mesh, self.outcome = model, workload, hardware, mesh, outcome
        self.batch_axes = tuple(axis for axis in ("replica", "data") if mesh[axis] > 1)
        self.arrays = [tuple(parameter.axes) for parameter in model.parameters]
        scanned = _scanned_axes(model)
        self.free = [axis for axis in model.axes if axis not in scanned and axis != model.position]
        # Rests repeat across compute mappings: only the cut of the parameter itself matters.
        self._rest = cache(self._evaluate_rest)

    def candidates(self) -> Iterator[Candidate]:
        """Every combination of mappings."""
        if self.workload.batch % math.prod(self.mesh[axis] for axis in self.batch_axes):
            self.outcome.rejected["batch"] += 1
            return
        for on_model in independent_sets(self._tensor_axes(), self.arrays):
            tensor: dict[str, MeshAxes] = {axis: ("model",) for axis in self.model.axes if axis in on_model}
            for extra in _resting_axes(self.mesh):
                yield from self._resting_ways(tensor, extra)

    def _tensor_axes(self) -> list[str]:
        """Logical axes that may be cut by `model` while computing."""
        if self.mesh["model"] == 1:
            return []
        contractions = self.model.contractions
        computed = {axis for c in contractions for axis in (*c.inputs, *c.outputs)} - {self.model.residual}
        routed = {axis for c in contractions for axis in c.routed}
        return self._divisible([axis for axis in self.free if axis in computed - routed], {}, ("model",))

    def _resting_ways(self, tensor: dict[str, MeshAxes], extra: MeshAxes) -> Iterator[Candidate]:
        """One compute mapping, with every way to let the parameters rest cut by `extra`."""
        model, workload, mesh = self.model, self.workload, self.mesh
        compute = self._compute(tensor)
        arithmetic = compute_seconds(model, workload, compute, mesh, self.hardware)
        exposed = sum(t.seconds(self.hardware, mesh) for t in compute_traffic(model, workload, compute, mesh))
        working = max(
            activation_bytes(model, workload, compute, mesh, attention_scores=self.hardware.is_cpu),
            logit_bytes(model, workload, compute, mesh),
        ) + saved_bytes(model, workload, compute, mesh)
        # No array has two axes of an independent set, so that one axis says how an array rests.
        cuts = [frozenset(axis for axis in p.axes if axis in tensor) for p in model.parameters]
        rests = [
            {axis: self._rest(i, cuts[i], axis, extra) for axis in (None, *p.axes)}
            for i, p in enumerate(model.parameters)
        ]
        for axes in independent_sets(self._divisible(self.free, tensor, extra) if extra else [], self.arrays):
            if extra and not axes:
                continue  # the same as resting like computing, which the empty `extra` stands for
            chosen = [by_axis[next(filter(axes.__contains__, by_axis), None)] for by_axis in rests]
            stored = sum(rest.stored for rest in chosen)
            gathered = sum(heapq.nlargest(GATHERED_AT_ONCE, (rest.gathered for rest in chosen)))
            yield Candidate(
                mesh,
                compute,
                tensor,
                axes,
                extra,
                step_seconds(arithmetic, sum(rest.seconds for rest in chosen), exposed),
                stored,
                gathered,
                stored
                + optimizer_bytes(stored, workload)
                + gradient_bytes(stored, workload)
                + sum(rest.cast for rest in chosen)
                + gathered
                + working,
            )

    def _compute(self, tensor: dict[str, MeshAxes]) -> dict[str, MeshAxes]:
        return {self.workload.batch_axis: self.batch_axes, **tensor} if self.batch_axes else tensor

    def _evaluate_rest(self, index: int, cut: frozenset[str], axis: str | None, extra: MeshAxes) -> _Rest:
        parameter, workload, mesh = self.model.parameters[index], self.workload, self.mesh
        tensor: dict[str, MeshAxes] = {name: ("model",) for name in cut}
        compute = self._compute(tensor)
        params = resting_mapping(parameter.axes, tensor, {axis} if axis else set(), extra)
        stored = parameter_bytes(parameter, workload, params, mesh)
        uses = [c for c in self.model.contractions if c.weight == parameter.path]
        traffic = [t for use in uses for t in weight_traffic(use, parameter, workload, params, compute, mesh)]
        return _Rest(
            stored,
            cast_bytes(stored, workload),
            max((gathered_bytes(use, parameter, workload, params, compute, mesh) for use in uses), default=0),
            sum(t.seconds(self.hardware, mesh) for t in traffic),
        )

    def _divisible(self, axes: list[str], mapping: AxisMapping, extra: MeshAxes) -> list[str]:
        """Those of `axes` that the mesh axes `extra` can cut in addition to `mapping`; notes the others."""
        kept = []
        for axis in axes:
            cuts = (*mapping.get(axis, ()), *extra)
            count = math.prod(self.mesh[cut] for cut in cuts)
            size = self.model.axes[axis]
            if size % count == 0:
                kept.append(axis)
            else:
                self.outcome.rejected["indivisible"] += 1
                reason = f"{axis} ({size}) is not divisible by {' x '.join(cuts)} = {count}"
                self.outcome.indivisible.setdefault(axis, reason)
        return kept


def resting_mapping(
    axes: Iterable[str], tensor: AxisMapping, resting: Set[str], extra: MeshAxes
) -> dict[str, MeshAxes]:
    """Mapping of parameters at rest: cut as for computing, and the axes in `resting` by the mesh axes `extra` too."""
    mapping = {axis: (*tensor.get(axis, ()), *(extra if axis in resting else ())) for axis in axes}
    return {axis: mesh_axes for axis, mesh_axes in mapping.items() if mesh_axes}


def _resting_axes(mesh: MeshShape) -> list[MeshAxes]:
    """Mesh axes that parameters may be cut along in addition to `model`: none, either of data and replica, both."""
    larger = [axis for axis in ("data", "replica") if mesh[axis] > 1]
    return [(), *((axis,) for axis in larger), *([tuple(larger)] if len(larger) > 1 else [])]


def _scanned_axes(model: ModelAxes) -> set[str]:
    """Axes that layers are stacked along: in the weights, and in no contraction."""
    used = {axis for c in model.contractions for axis in (*c.inputs, *c.outputs, *c.routed)}
    weights = {parameter.path: parameter for parameter in model.parameters}
    return {axis for c in model.contractions for axis in weights[c.weight].axes if axis not in used}


def _divisors(n: int) -> list[int]:
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def duplicates_excluded(model: ModelAxes) -> int:
    """Pairs of logical axes that share an array, and so cannot share a mesh axis."""
    pairs = {
        frozenset((a, b)) for parameter in model.parameters for a in parameter.axes for b in parameter.axes if a < b
    }
    return len(pairs)
