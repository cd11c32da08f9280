"""One mesh with the compute mapping of batch and positions: the fastest mapping of everything else, proven optimal.

Times of tasks add up, and so do bytes at every point of the program. Once mesh, batch and positions are given, logical
axes that never occur in the same task can be mapped independently. Such a component has a list of choices, each with a
time and its bytes at every point; what remains is to combine one choice per component (`component_choices`).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.experts.method import ExpertStrategy
from shardplan.hardware import CollectiveKind, place_mesh
from shardplan.hardware.mesh_axes import BATCH_CHOICES, EXPERT_CHOICES, STORAGE_CHOICES, TENSOR_CHOICES
from shardplan.plan.mapping import AxisMapping, MeshAxes, mesh_size
from shardplan.search.components.component_cost import ComponentCost
from shardplan.search.components.compute_sharding import ComputeSharding, KindMethods
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.reasons import Indivisible, Rejection, SearchStatistics
from shardplan.search.space import Space
from shardplan.search.subproblem.component_choices import (
    Choices,
    Combination,
    ComponentChoice,
    fastest_combinations,
    pareto_optimal,
    smallest_combination,
)
from shardplan.search.subproblem.mesh_costs import ComponentTimes, MeshCosts


def enumerate_subproblems(
    space: Space, meshes: Sequence[dict[str, int]], statistics: SearchStatistics
) -> Iterator["MeshSubproblem"]:
    """Yield a subproblem for every mesh and every compute mapping of batch, positions and (if pinned) residual axis.

    If attention occurs in several components, or in none, there is one for each choice of methods: components choose
    independently, and the methods must be the same for all.
    """
    choices = {space.batch: BATCH_CHOICES, space.position: space.position_choices, space.residual: ((),)}
    for mesh in meshes:
        is_possible = False
        for mapped in itertools.product(*(space.rules.options(axis, False, each) for axis, each in choices.items())):
            used = [mesh_axis for mesh_axes in mapped for mesh_axis in mesh_axes]
            if len(set(used)) < len(used) or any(mesh[mesh_axis] == 1 for mesh_axis in used):
                continue
            mapping = dict(zip(choices, mapped, strict=True))
            methods = space.methods_for(mesh, mapping[space.position])
            if not methods:
                _count_divided_blocks(space, mesh, mapping[space.position], statistics)
            if methods and all(_divides(space, mesh, axis, axes, statistics) for axis, axes in mapping.items()):
                is_possible = True
                sharded = {axis: mesh_axes for axis, mesh_axes in mapping.items() if mesh_axes}
                for choices_of_methods in [methods] if space.component_chooses_method else [[each] for each in methods]:
                    yield MeshSubproblem(space, mesh, sharded, choices_of_methods, statistics)
        if not is_possible:
            statistics.rejected[Rejection.BATCH] += 1


def _divides(space: Space, mesh: dict[str, int], axis: str, mesh_axes: MeshAxes, statistics: SearchStatistics) -> bool:
    """Whether a logical axis can be sharded evenly over `mesh_axes`; if not, `statistics` counts it."""
    size, devices = space.sizes[axis], mesh_size(mesh, mesh_axes)
    if size % devices == 0:
        return True
    statistics.rejected[Rejection.INDIVISIBLE] += 1
    statistics.indivisible.setdefault(axis, Indivisible(axis, size, mesh_axes, devices))
    return False


def _count_divided_blocks(
    space: Space, mesh: dict[str, int], mesh_axes: MeshAxes, statistics: SearchStatistics
) -> None:
    """Count mesh axes that would shard positions within the blocks that Native Sparse Attention selects."""
    statistics.rejected[Rejection.INDIVISIBLE] += 1
    for kind in space.step.attention_kinds:
        if kind.sparse is not None:
            axis, blocks = f"blocks of {space.position}", kind.sparse.selection_blocks(space.sizes[space.position])
            indivisible = Indivisible(axis, blocks, mesh_axes, mesh_size(mesh, mesh_axes))
            statistics.indivisible.setdefault(axis, indivisible)


class _TimedChoice(NamedTuple):
    """A choice for a component, of which the bytes are not known yet."""

    compute: ComputeSharding
    params: dict[str, MeshAxes]
    times: ComponentTimes


class MeshSubproblem:
    """One mesh with the compute mapping of batch, positions and residual axis.

    Args:
        token_mapping: that compute mapping, without axes that it leaves unsharded.
        methods: possible methods of each kind of attention; one choice, unless the component with attention chooses it.
    """

    def __init__(
        self,
        space: Space,
        mesh: dict[str, int],
        token_mapping: dict[str, MeshAxes],
        methods: list[KindMethods | None],
        statistics: SearchStatistics,
    ) -> None:
        self.space, self.mesh, self.token_mapping, self.statistics = space, mesh, token_mapping, statistics
        self.methods = methods
        self.token_axes = {
            mesh_axis for axis in (space.batch, space.position) for mesh_axis in token_mapping.get(axis, ())
        }
        self.further_storage = [axes for axes in STORAGE_CHOICES if self.token_axes.issuperset(axes)]
        self.costs = MeshCosts(space, mesh, ComputeSharding(token_mapping, methods[0]))

    @cached_property
    def required(self) -> MeshAxes:
        """Mesh axes that batch and positions leave idle, so that some component must use them."""
        return () if self.space.allows_idle else self.space.assignment(self.mesh, self.token_mapping, {}).idle_mesh_axes

    @cached_property
    def leaves_idle(self) -> bool:
        """Whether no choice of any component uses one of `required`."""
        used = {
            mesh_axis
            for shardings in self.compute_shardings
            for compute in shardings
            for mesh_axes in compute.mapping.values()
            for mesh_axis in mesh_axes
        }
        return not used.issuperset(self.required)

    @cached_property
    def compute_shardings(self) -> list[list[ComputeSharding]]:
        """[component][choice]: every valid compute mapping of a component's axes, with the best methods for it."""
        return [list(self._compute_shardings(component)) for component in self.space.component_costs]

    @cached_property
    def min_seconds(self) -> list[list[float]]:
        """[component][choice]: lower bounds of the times under `compute_shardings`."""
        return [
            [self.costs.min_seconds(component, compute) for compute in shardings]
            for component, shardings in zip(self.space.component_costs, self.compute_shardings, strict=True)
        ]

    @cached_property
    def quick_lower_bound(self) -> float:
        """Lower bound of the step time in seconds: the matmuls, spread over all devices that may compute a part."""
        pinned = (pin.mesh_axes or () for pin in self.space.rules.pins)
        choices = (*self.token_mapping.values(), *TENSOR_CHOICES, *pinned)
        return self.space.min_matmul_seconds / mesh_size(self.mesh, {axis for axes in choices for axis in axes})

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of the step time in seconds, tighter than `quick_lower_bound`; infinite if no mapping exists."""
        if not all(self.compute_shardings) or self.leaves_idle:
            return math.inf
        components = sum(map(min, self.min_seconds))
        base = self.costs.min_seconds(self.space.base_cost, ComputeSharding({}))
        placement = place_mesh(self.space.hardware, self.mesh)
        rates = [placement.collective_cost(CollectiveKind.ALL_GATHER, axes).seconds_per_byte
                 for axes in STORAGE_CHOICES[1:] if mesh_size(self.mesh, axes) > 1]  # fmt: skip
        if not self.space.gathers_once or not rates:
            return base + components
        # weights that are not stored on the device are received, overlapping with at most a part of the compute time
        exposed, rate = 1 - self.space.calibration.overlap, min(rates)
        gathering = sum(
            min(exposed * seconds + rate * self.costs.weight_bytes(component, compute)
                for seconds, compute in zip(*each, strict=True))
            for component, *each in zip(
                self.space.component_costs, self.min_seconds, self.compute_shardings, strict=True
            )
        )  # fmt: skip
        return base + max(components, gathering - rate * self.space.available_bytes)

    @cached_property
    def stored_residual_choices(self) -> list[tuple[MeshAxes, np.ndarray]]:
        """Mesh axes of the stored residual axis, each with the bytes at every point that depend on no component."""
        axis, base = self.space.residual, self.space.base_cost
        choices = self._storage_choices(axis, self.token_mapping)
        return [(axes, self.costs.bytes(base, ComputeSharding({}), {axis: axes} if axes else {})) for axes in choices]

    @cached_property
    def min_bytes(self) -> float:
        """Lower bound of the peak memory of a device; infinite if no mapping exists."""
        points = len(self.space.points)
        peaks = [float((size + self.least_base_bytes)[:points].max()) for _, size in self.stored_residual_choices]
        return min(peaks, default=math.inf) + self.space.min_stored_bytes

    @cached_property
    def least_base_bytes(self) -> np.ndarray:
        """Lower bound, at most 0, of the bytes that options about activations add to those of no component."""
        base = self.space.base_cost
        sizes = self.costs.option_bytes(base, ComputeSharding({}), {})
        return self.space.keeping.least(sizes)

    def rank(self, ranking: Ranking) -> None:
        """Add to `ranking` the candidates that fit and tie for fastest.

        They form one group for every sharding of the residual stream's axis in stored parameters; the ranking keeps one
        candidate of each group.
        """
        for residual, base_bytes in self.stored_residual_choices:
            limit = ranking.limit
            if self.lower_bound > limit:
                self.statistics.rejected[Rejection.SLOWER] += 1
                return  # the bound holds for the choices that follow, too
            choices = self._choices(residual, base_bytes, limit, self.space.limits)
            if isinstance(choices, Rejection):
                self.statistics.rejected[choices] += 1
                continue
            fastest = fastest_combinations(choices, limit, self.space.limits)
            if fastest:
                ranking.add(list(map(self._candidate, fastest)))
            else:
                self.statistics.rejected[Rejection.MEMORY if limit == math.inf else Rejection.SLOWER] += 1

    def find_smallest(self, limit_bytes: float) -> Candidate | None:
        """The candidate with the smallest peak memory, even if it does not fit; None if no peak is below the limit."""
        best: Combination | None = None
        for residual, base_bytes in self.stored_residual_choices:
            limit = best.peak_bytes if best is not None else limit_bytes
            choices = self._choices(residual, base_bytes, math.inf, self.space.device_limits(limit))
            if not isinstance(choices, Rejection):
                best = smallest_combination(choices, limit) or best
        return self._candidate(best) if best is not None else None

    def _compute_shardings(self, component: ComponentCost) -> Iterator[ComputeSharding]:
        """Yield every valid compute mapping of a component's axes with each of the best attention methods for it."""
        choices = [
            [axes for axes in self.space.rules.options(axis, False, self._tensor_choices(axis))
             if self._can_shard(axis, axes)]
            for axis in component.axes
        ]  # fmt: skip
        for mapped in itertools.product(*choices):
            mapping = {axis: axes for axis, axes in zip(component.axes, mapped, strict=True) if axes}
            if _is_distinct({**self.token_mapping, **mapping}, component.computed_together):
                for methods in self.costs.best_methods(component, mapping, self.methods):
                    for strategy in self._expert_strategies(component, mapping):
                        yield ComputeSharding(mapping, methods, strategy)

    def _tensor_choices(self, axis: str) -> Sequence[MeshAxes]:
        """What a logical axis can be sharded over in computations, unless it is pinned."""
        if axis in self.space.unsharded_axes | self.space.minor_axes:
            return ((),)
        return EXPERT_CHOICES if axis in self.space.block_axes else TENSOR_CHOICES

    def _expert_strategies(self, component: ComponentCost, mapping: AxisMapping) -> Sequence[ExpertStrategy | None]:
        """Possible strategies of the experts of a component; None for a component without experts."""
        if not component.expert_blocks:
            return (None,)
        expert_axes = tuple(axis for block in component.expert_blocks for axis in mapping.get(block.experts, ()))
        return self.space.expert_strategies(self.token_axes, expert_axes)

    def _param_mappings(
        self, component: ComponentCost, compute: AxisMapping, residual: dict[str, MeshAxes]
    ) -> Iterator[dict[str, MeshAxes]]:
        """Mappings of stored parameters: the compute sharding, and further mesh axes."""
        for mapped in itertools.product(*(self._storage_choices(axis, compute) for axis in component.axes)):
            params = {**residual, **{axis: axes for axis, axes in zip(component.axes, mapped, strict=True) if axes}}
            if _is_distinct(params, component.stored_together):
                yield params

    def _storage_choices(self, axis: str, compute: AxisMapping) -> list[MeshAxes]:
        """Mesh axes of a logical axis of stored parameters: those of the compute sharding, and further ones."""
        computed = compute.get(axis, ())
        further_storage = [()] if axis in self.space.minor_axes else self.further_storage
        choices = self.space.rules.options(axis, True, [(*computed, *further) for further in further_storage])
        return [axes for axes in choices if self._can_shard(axis, axes)]

    def _can_shard(self, axis: str, mesh_axes: MeshAxes) -> bool:
        """Whether mesh axes, each used once and larger than 1, shard a logical axis evenly."""
        if len(set(mesh_axes)) < len(mesh_axes) or any(self.mesh[mesh_axis] == 1 for mesh_axis in mesh_axes):
            return False
        return _divides(self.space, self.mesh, axis, mesh_axes, self.statistics)

    def _choices(
        self, residual: MeshAxes, base_bytes: np.ndarray, limit: float, available_bytes: np.ndarray
    ) -> Choices | Rejection:
        """The Pareto-optimal choices of every component, or why a component has none.

        Left out are choices that exceed `limit` (seconds) or `available_bytes` (at every point), whatever the other
        components choose.
        """
        if not all(self.compute_shardings):
            return Rejection.DUPLICATE
        if self.leaves_idle:
            return Rejection.IDLE
        stored = {self.space.residual: residual} if residual else {}
        points = len(self.space.points)
        if (base_bytes + self.least_base_bytes + self.space.min_stored_bytes > available_bytes)[:points].any():
            return Rejection.MEMORY
        keeping, unsharded = self.space.keeping, ComputeSharding({})
        base = self._choice(self.space.base_cost, unsharded, stored)
        least_base = base.amount.seconds + keeping.least(base.amount.options)[0]
        slack = limit - least_base - sum(map(min, self.min_seconds))
        components = []
        for component, shardings, bounds in zip(
            self.space.component_costs, self.compute_shardings, self.min_seconds, strict=True
        ):
            fast = [compute for compute, bound in zip(shardings, bounds, strict=True) if bound - min(bounds) <= slack]
            pairs = [
                (compute, params)
                for compute in fast
                for params in self._param_mappings(component, compute.mapping, stored)
            ]
            self.statistics.evaluated += len(pairs)
            if not pairs:
                return Rejection.DUPLICATE if fast else Rejection.SLOWER
            timed = [_TimedChoice(*pair, self.costs.times(component, *pair)) for pair in pairs]
            components.append([
                each for each in timed
                if each.times.seconds + keeping.least(each.times.options)[0] - min(bounds) <= slack
            ])  # fmt: skip
        if not all(components):
            return Rejection.SLOWER
        choices = [
            [ComponentChoice(each.compute, each.params, self.costs.amount(component, *each)) for each in timed]
            for component, timed in zip(self.space.component_costs, components, strict=True)
        ]
        loops = keeping.loops
        least = [[c.amount.bytes + keeping.least(c.amount.options)[1 + loops :] for c in each] for each in choices]
        smallest = [np.min(each, axis=0) for each in least]
        together = base_bytes + self.least_base_bytes + sum(smallest)
        if (together > available_bytes).any():
            return Rejection.MEMORY
        left = available_bytes - together
        kept = []
        for each, sizes, min_bytes in zip(choices, least, smallest, strict=True):
            fitting = [c for c, size in zip(each, sizes, strict=True) if (size - min_bytes <= left).all()]
            kept.append(pareto_optimal(fitting, self.required))
        return Choices(base, kept, points, keeping, self.required) if all(kept) else Rejection.MEMORY

    def _choice(
        self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> ComponentChoice:
        """Return a choice for a component with its cost."""
        times = self.costs.times(component, compute, params)
        return ComponentChoice(compute, params, self.costs.amount(component, compute, params, times))

    def _candidate(self, combination: Combination) -> Candidate:
        compute, params, methods = dict(self.token_mapping), dict[str, MeshAxes](), self.methods[0]
        experts: ExpertStrategy | None = None
        for part in combination.parts:
            compute |= part.compute.mapping
            params |= part.params
            methods = part.compute.methods or methods
            experts = part.compute.experts or experts
        cost, kept = (combination.seconds, combination.peak_bytes), self.space.kept
        policy = None if kept is None else kept.policy(self.space.options[option] for option in combination.options)
        return Candidate(self.space, self.mesh, compute, params, methods, *cost, experts, policy)


def _is_distinct(mapping: AxisMapping, axis_sets: Iterable[frozenset[str]]) -> bool:
    """Whether no two logical axes of a set have a mesh axis in common."""
    for axes in axis_sets:
        used = [mesh_axis for axis in axes if axis in mapping for mesh_axis in mapping[axis]]
        if len(used) > 1 and len(set(used)) < len(used):
            return False
    return True
