"""One mesh with the mapping of batch and positions, and everything else chosen for it: the fastest that fits, proven.

Times of tasks add up, and so do bytes at every point of the program. With mesh, batch and position given, logical axes
that never meet in a task can be chosen apart: such a component has a list of choices, each with a time and its bytes at
every point, and what is left is one choice per component, the fastest that fits.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np

from shardplan.cost.attention import has_kernel
from shardplan.cost.gspmd import DeviceCost, device_cost, device_cost_lower_bound, weight_bytes
from shardplan.cost.memory import ATTENDING, buffer_bytes
from shardplan.cost.roofline import task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import place_mesh
from shardplan.plan.mapping import AxisMapping, MeshAxes, mesh_size
from shardplan.program.tasks import Task
from shardplan.search.ranking import TIME_RESOLUTION, Candidate, Ranking
from shardplan.search.space import BATCH_AXES, METHOD, RESTING_AXES, TENSOR_AXES, ComponentCost, Pick, Space


@dataclass
class SearchStatistics:
    """What a search has looked at."""

    evaluated: int = 0
    """Choices of a component that were weighed."""
    rejected: Counter[str] = field(default_factory=Counter)
    indivisible: dict[str, str] = field(default_factory=dict)
    """Logical axis -> why it could not be cut, one example each."""


def subproblems(
    space: Space, meshes: Sequence[dict[str, int]], statistics: SearchStatistics
) -> Iterator["MeshSubproblem"]:
    """Every mesh with every mapping of batch and positions."""
    # the residual stream is not cut by its own axis unless the user wants it
    options = {space.batch: BATCH_AXES, space.position: space.positions, space.residual: ((),)}
    for mesh in meshes:
        found = False
        for cuts in itertools.product(*(space.rules.options(axis, False, each) for axis, each in options.items())):
            taken = [mesh_axis for cut in cuts for mesh_axis in cut]
            if len(set(taken)) < len(taken) or any(mesh[axis] == 1 for axis in taken):
                continue
            tokens = dict(zip(options, cuts, strict=True))
            methods = space.methods_for(mesh, tokens[space.position])
            if methods and all(_divides(space, mesh, axis, axes, statistics) for axis, axes in tokens.items()):
                found = True
                yield MeshSubproblem(
                    space, mesh, {axis: axes for axis, axes in tokens.items() if axes}, methods, statistics
                )
        if not found:
            statistics.rejected["batch"] += 1


def _divides(space: Space, mesh: dict[str, int], axis: str, axes: MeshAxes, statistics: SearchStatistics) -> bool:
    """Whether the mesh axes `axes` can cut a logical axis evenly; notes where not."""
    size, count = space.sizes[axis], mesh_size(mesh, axes)
    if size % count == 0:
        return True
    statistics.rejected["indivisible"] += 1
    statistics.indivisible.setdefault(axis, f"{axis} ({size}) is not divisible by {' x '.join(axes)} = {count}")
    return False


@dataclass(frozen=True)
class _Choice:
    """Mappings of the axes of one component, with what they cost."""

    compute: dict[str, MeshAxes]
    params: dict[str, MeshAxes]
    seconds: float
    bytes: np.ndarray
    """At every point, or of every item."""


class MeshSubproblem:
    """One mesh with the mapping of batch and positions.

    Args:
        methods: what `space.METHOD` can be. Where there are several kinds of attention, of axes that do
            not meet, it is the first.
    """

    def __init__(
        self,
        space: Space,
        mesh: dict[str, int],
        tokens: dict[str, MeshAxes],
        methods: list[MeshAxes],
        statistics: SearchStatistics,
    ) -> None:
        self.space, self.mesh, self.tokens, self.statistics = space, mesh, tokens, statistics
        self.given = {**tokens, METHOD: methods[0]}
        self.methods = methods if sum(work.attends for work in space.component_costs) == 1 else methods[:1]
        self.shares: defaultdict[int, dict[object, DeviceCost]] = defaultdict(dict)
        self.seconds: defaultdict[int, dict[object, float]] = defaultdict(dict)
        self.sizes: dict[tuple[str, ...], list[dict[object, float]]] = {
            work.component: [{} for _ in work.items] for work in (space.base, *space.component_costs)
        }
        self.layouts: dict[tuple[tuple[str, MeshAxes], ...], ShardingAssignment] = {}
        self.ways: dict[object, list[MeshAxes]] = {}
        self.weights: dict[object, float] = {}

    @cached_property
    def computes(self) -> list[list[dict[str, MeshAxes]]]:
        """For each component the mappings while computing."""
        return [list(self._computes(work)) for work in self.space.component_costs]

    @cached_property
    def times(self) -> list[list[float]]:
        """The least times that `computes` can take."""
        return [
            [self._least_time(work, compute) for compute in each]
            for work, each in zip(self.space.component_costs, self.computes, strict=True)
        ]

    @cached_property
    def floor(self) -> float:
        """Less than the least time that there can be: products, shared by the devices that can have a part of them."""
        pinned = (pin.mesh_axes or () for pin in self.space.rules.pins)
        computing = {mesh_axis for cut in (*self.tokens.values(), *TENSOR_AXES, *pinned) for mesh_axis in cut}
        return self.space.least_seconds / mesh_size(self.mesh, computing)

    @cached_property
    def bound(self) -> float:
        """The least time that there can be."""
        if not all(self.computes):
            return math.inf
        least = sum(map(min, self.times))
        base = self._least_time(self.space.base, {})
        rates = [place_mesh(self.space.hardware, self.mesh).collective("all-gather", cut).seconds_per_byte
                 for cut in RESTING_AXES[1:] if mesh_size(self.mesh, cut) > 1]  # fmt: skip
        if not self.space.gathers_once or not rates:
            return base + least
        # what does not rest here is received, and hides behind a part of the rest at most
        seen, rate = 1 - self.space.calibration.overlap, min(rates)
        gathering = sum(
            min(seen * seconds + rate * self._weights(work, compute) for seconds, compute in zip(*each, strict=True))
            for work, *each in zip(self.space.component_costs, self.times, self.computes, strict=True)
        )
        return base + max(least, gathering - rate * self.space.available)

    @cached_property
    def residuals(self) -> list[tuple[MeshAxes, np.ndarray]]:
        """Every way for the residual axis to rest, with the bytes of what depends on no component."""
        axis, base = self.space.residual, self.space.base
        options = self._resting(axis, self.tokens)
        return [(cut, self._bytes(base, {}, {axis: cut} if cut else {})) for cut in options]

    @cached_property
    def least_bytes(self) -> float:
        """At the largest point: that, and of the components what rests, cut by all devices."""
        return min((size.max() + self.space.least_at_rest for _, size in self.residuals), default=math.inf)

    def rank(self, ranking: Ranking) -> None:
        """Add the fastest candidate that fits for every way that the residual axis can rest."""
        for residual, base_bytes in self.residuals:
            limit = ranking.limit
            if self.bound > limit:
                self.statistics.rejected["slower"] += 1
                return
            weighed = self._choices(residual, base_bytes, limit, self.space.available)
            if isinstance(weighed, str):
                self.statistics.rejected[weighed] += 1
                continue
            found = self._fastest(*weighed, limit)
            if found:
                ranking.add(found)
            else:
                self.statistics.rejected["memory" if limit == math.inf else "slower"] += 1

    def smaller(self, most: float) -> Candidate | None:
        """The candidate with the smallest peak, whether or not it fits; None where none is below `most` bytes."""
        found: list[Candidate] = []
        for residual, base_bytes in self.residuals:
            weighed = self._choices(residual, base_bytes, math.inf, most)
            if isinstance(weighed, str):
                continue
            base, choices = weighed
            stack: list[tuple[int, np.ndarray, tuple[_Choice, ...]]] = [(0, base.bytes, ())]
            left = _least_bytes(base, choices)
            while stack:
                depth, size, chosen = stack.pop()
                if (size + left[depth]).max() >= most:
                    continue
                if depth == len(choices):
                    found.append(self._candidate(base, chosen))
                    most = found[-1].peak_bytes
                    continue
                for choice in sorted(choices[depth], key=lambda choice: -choice.bytes.max()):
                    stack.append((depth + 1, size + choice.bytes, (*chosen, choice)))
        return found[-1] if found else None

    def _computes(self, work: ComponentCost) -> Iterator[dict[str, MeshAxes]]:
        whole, rules = self.space.whole, self.space.rules
        options = [
            [cut for cut in rules.options(axis, False, ((),) if axis in whole else TENSOR_AXES) if self._can(axis, cut)]
            for axis in work.component
        ]
        for cuts in itertools.product(*options):
            compute = {axis: cut for axis, cut in zip(work.component, cuts, strict=True) if cut}
            if _is_distinct({**self.given, **compute}, work.computed):
                for method in self._methods(work, compute):
                    yield {**compute, METHOD: method}

    def _methods(self, work: ComponentCost, compute: dict[str, MeshAxes]) -> list[MeshAxes]:
        """How attention can be done: with a kernel where it must, and what nothing else outdoes in time and memory."""
        attention = [each for each in work.tasks if each[0].kind == "attention"]
        if not attention:
            return [self.given[METHOD]]
        values = tuple(map(compute.get, work.axes))
        known = tuple(pick(values) for _, pick, _ in attention)
        if known not in self.ways:
            self.ways[known] = self._best_methods(work, compute)
        return self.ways[known]

    def _best_methods(self, work: ComponentCost, compute: dict[str, MeshAxes]) -> list[MeshAxes]:
        weighed = []
        for method in self.methods:
            way = {**compute, METHOD: method}
            layout, values = self._layout(way, {}), tuple(map(way.get, work.axes))
            attention = [(task, pick(values)) for task, pick, _ in work.tasks if task.kind == "attention"]
            if self.space.kernels and not all(has_kernel(task, layout) for task, _ in attention):
                continue
            seconds = sum(self._seconds(task, key, partial(self._least, task, key, layout)) for task, key in attention)
            held = [buffer_bytes(item, layout) for item, _ in work.items if item.role in ATTENDING]
            weighed.append(_Choice(way, {}, seconds, np.array(held)))
        return [choice.compute[METHOD] for choice in _undominated(weighed)]

    def _resting(self, axis: str, compute: AxisMapping) -> list[MeshAxes]:
        """Mesh axes that a logical axis can rest on: those of computing, and further ones."""
        before = compute.get(axis, ())
        options = self.space.rules.options(axis, True, [(*before, *extra) for extra in RESTING_AXES])
        return [cut for cut in options if self._can(axis, cut)]

    def _can(self, axis: str, cut: MeshAxes) -> bool:
        """Whether mesh axes, each once and with several devices, cut a logical axis evenly."""
        if len(set(cut)) < len(cut) or any(self.mesh[mesh_axis] == 1 for mesh_axis in cut):
            return False
        return _divides(self.space, self.mesh, axis, cut, self.statistics)

    def _choices(
        self, residual: MeshAxes, base_bytes: np.ndarray, limit: float, available: float
    ) -> tuple[_Choice, list[list[_Choice]]] | str:
        """What does not depend on a component, and for each component the choices that no other one outdoes.

        Those are left out that take too long, or do not fit, with whatever is chosen for the others. Where that leaves
        a component none, a word why: `duplicate` where it can only rest with a mesh axis twice on an array.
        """
        if not all(self.computes):
            return "duplicate"
        rest = {self.space.residual: residual} if residual else {}
        if base_bytes.max() + self.space.least_at_rest > available:
            return "memory"
        base = _Choice({}, rest, self._time(self.space.base, {}, rest), base_bytes)
        slack = limit - base.seconds - sum(map(min, self.times))
        timed = []
        for work, computes, times in zip(self.space.component_costs, self.computes, self.times, strict=True):
            reached = [c for c, seconds in zip(computes, times, strict=True) if seconds - min(times) <= slack]
            options = [(compute, params) for compute in reached for params in self._rests(work, compute, rest)]
            self.statistics.evaluated += len(options)
            if not options:
                return "duplicate" if reached else "slower"
            seconds = [self._time(work, compute, params) for compute, params in options]
            timed.append([(*o, s) for o, s in zip(options, seconds, strict=True) if s - min(times) <= slack])
        if not all(timed):
            return "slower"
        choices = [
            [_Choice(*each, self._bytes(work, *each[:2])) for each in found]
            for work, found in zip(self.space.component_costs, timed, strict=True)
        ]
        smallest = [np.min([choice.bytes for choice in each], axis=0) for each in choices]
        together = base_bytes + sum(smallest)
        if together.max() > available:
            return "memory"
        kept = [
            _undominated([choice for choice in each if (together - least + choice.bytes).max() <= available])
            for each, least in zip(choices, smallest, strict=True)
        ]
        return (base, kept) if all(kept) else "memory"

    def _rests(
        self, work: ComponentCost, compute: dict[str, MeshAxes], rest: dict[str, MeshAxes]
    ) -> Iterator[dict[str, MeshAxes]]:
        """Mappings of parameters at rest: cut as while computing, and further."""
        for cuts in itertools.product(*(self._resting(axis, compute) for axis in work.component)):
            params = {**rest, **{axis: cut for axis, cut in zip(work.component, cuts, strict=True) if cut}}
            if _is_distinct(params, work.resting):
                yield params

    def _bytes(self, work: ComponentCost, compute: dict[str, MeshAxes], params: dict[str, MeshAxes]) -> np.ndarray:
        """Bytes of a component at every point."""
        layout = self._layout(compute, params)
        values = (*map(compute.get, work.axes), *map(params.get, work.axes))
        sizes = []
        for (item, pick), known in zip(work.items, self.sizes[work.component], strict=True):
            key = pick(values)
            if key not in known:
                known[key] = buffer_bytes(item, layout)
            sizes.append(known[key])
        return work.counts @ np.array(sizes)

    def _weights(self, work: ComponentCost, compute: dict[str, MeshAxes]) -> float:
        """Bytes of the parameters that a device takes products with."""
        layout, values = self._layout(compute, {}), tuple(map(compute.get, work.axes))
        found = 0.0
        for task, pick, _ in work.tasks:
            if task.fresh:
                key = id(task), pick(values)
                if key not in self.weights:
                    self.weights[key] = weight_bytes(task, layout)
                found += self.weights[key]
        return found

    def _layout(self, compute: dict[str, MeshAxes], params: dict[str, MeshAxes]) -> ShardingAssignment:
        key = tuple(compute.items())
        if key not in self.layouts:
            self.layouts[key] = self.space.layout(self.mesh, {**self.given, **compute}, {})
        return replace(self.layouts[key], params=params)

    def _least_time(self, work: ComponentCost, compute: dict[str, MeshAxes]) -> float:
        """The least time of the tasks of a component, however its parameters rest."""
        layout, values = self._layout(compute, {}), tuple(map(compute.get, work.axes))
        keys = ((task, pick(values)) for task, pick, _ in work.tasks)
        return sum(self._seconds(task, key, partial(self._least, task, key, layout)) for task, key in keys)

    def _time(self, work: ComponentCost, compute: dict[str, MeshAxes], params: dict[str, MeshAxes]) -> float:
        """The time of the tasks of a component."""
        layout, values = self._layout(compute, params), tuple(map(compute.get, work.axes))
        all_values = (*values, *map(params.get, work.axes))

        def mine(task: Task, pick: Pick) -> DeviceCost:
            return device_cost(task, layout, self._least(task, pick(values), layout))

        return sum(
            self._seconds(task, pick_all(all_values), partial(mine, task, pick)) for task, pick, pick_all in work.tasks
        )

    def _seconds(self, task: Task, key: object, mine: Callable[[], DeviceCost]) -> float:
        """Time of a task, for what it depends on."""
        known, space = self.seconds[id(task)], self.space
        if key not in known:
            known[key] = task_seconds(task, mine(), space.hardware, self.mesh, space.calibration).total
        return known[key]

    def _least(self, task: Task, key: object, layout: ShardingAssignment) -> DeviceCost:
        """What a device has of a task at least, for what that depends on."""
        known = self.shares[id(task)]
        if key not in known:
            known[key] = device_cost_lower_bound(task, layout)
        return known[key]

    def _fastest(self, base: _Choice, choices: list[list[_Choice]], limit: float) -> list[Candidate]:
        """Of one choice for each component, what fits and is as fast as the fastest, and not slower than a smaller."""
        seconds_left = np.cumsum([0.0, *(min(c.seconds for c in each) for each in reversed(choices))])[::-1]
        bytes_left = _least_bytes(base, choices)
        available = self.space.available
        best: list[Candidate] = []
        stack: list[tuple[int, float, np.ndarray, tuple[_Choice, ...]]] = [(0, base.seconds, base.bytes, ())]
        while stack:
            depth, seconds, size, chosen = stack.pop()
            if seconds + seconds_left[depth] > limit or (size + bytes_left[depth]).max() > available:
                continue
            if depth < len(choices):
                # the fastest last, so that it is the next to be taken
                for choice in sorted(choices[depth], key=lambda choice: -choice.seconds):
                    stack.append((depth + 1, seconds + choice.seconds, size + choice.bytes, (*chosen, choice)))
                continue
            new = self._candidate(base, chosen)
            limit = min(limit, new.seconds * (1 + TIME_RESOLUTION))
            if not any(_outdoes(old, new) for old in best):
                best = [old for old in best if old.seconds <= limit and not _outdoes(new, old)] + [new]
        return best

    def _candidate(self, base: _Choice, chosen: Sequence[_Choice]) -> Candidate:
        compute, params = dict(self.given), dict(base.params)
        for choice in chosen:
            compute |= choice.compute
            params |= choice.params
        size = base.bytes + sum(choice.bytes for choice in chosen)
        seconds = base.seconds + sum(choice.seconds for choice in chosen)
        return Candidate(self.space, self.mesh, compute, params, float(seconds), float(size.max()))


def _outdoes(one: Candidate, other: Candidate) -> bool:
    return one.seconds <= other.seconds and one.peak_bytes <= other.peak_bytes


def _least_bytes(base: _Choice, choices: list[list[_Choice]]) -> list[np.ndarray]:
    """For every number of components that have been chosen, the least bytes of the others at every point."""
    least = [np.zeros_like(base.bytes)]
    for each in reversed(choices):
        least.insert(0, least[0] + np.min([choice.bytes for choice in each], axis=0))
    return least


def _is_distinct(mapping: AxisMapping, arrays: Iterable[frozenset[str]]) -> bool:
    """Whether no array has a mesh axis twice."""
    for axes in arrays:
        used = [mesh_axis for axis in axes for mesh_axis in mapping.get(axis, ())]
        if len(set(used)) < len(used):
            return False
    return True


def _undominated(choices: list[_Choice]) -> list[_Choice]:
    """Those choices that no other is as fast as with as few bytes at every point."""
    kept: list[_Choice] = []
    for choice in sorted(choices, key=lambda choice: (choice.seconds, choice.bytes.sum())):
        if not any((other.bytes <= choice.bytes).all() for other in kept):
            kept.append(choice)
    return kept
