"""One mesh with the compute mapping of batch and positions: the fastest mapping of everything else, proven optimal.

Times of tasks add up, and so do bytes at every point of the program. Once mesh, batch and positions are given, logical
axes that never occur in the same task can be mapped independently. Such a component has a list of choices, each with a
time and its bytes at every point; what remains is to combine one choice per component (`component_choices`).
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np

from shardplan.cost.sparse.work import BlockSizes
from shardplan.experts.method import ExpertStrategy
from shardplan.hardware import CollectiveKind, place_mesh
from shardplan.hardware.mesh_axes import BATCH_CHOICES, EXPERT_CHOICES, STORAGE_CHOICES, TENSOR_CHOICES
from shardplan.plan.mapping import AxisMapping, MeshAxes, mesh_size
from shardplan.search.components.component_cost import ComponentCost
from shardplan.search.components.compute_sharding import ComputeSharding, KindMethods
from shardplan.search.ranking import Candidate, Ranking
from shardplan.search.reasons import Indivisible, Rejection, SearchStatistics
from shardplan.search.space import Space
from shardplan.search.subproblem.choice_table import ChoiceTable, Possible, find_possible
from shardplan.search.subproblem.component_choices import (
    Choices,
    Combination,
    ComponentChoice,
    fastest_combinations,
    pareto_optimal,
    smallest_combination,
)
from shardplan.search.subproblem.mesh_costs import Choice, ComponentTimes, MeshCosts

UNSHARDED = ComputeSharding({})
"""The compute sharding of tasks and buffers that depend on no component."""


def enumerate_subproblems(
    space: Space, meshes: Sequence[dict[str, int]], statistics: SearchStatistics
) -> Iterator["MeshSubproblem"]:
    """Yield a subproblem for every mesh and compute mapping of batch, positions and, if pinned, residual axis.

    If attention occurs in several components, or in none, there is one for each choice of methods: components choose
    independently, and the methods must be the same for all.
    """
    choices = {space.batch: BATCH_CHOICES, space.position: space.position_choices, space.residual: ((),)}
    for mesh in meshes:
        is_possible = False
        for mapped in itertools.product(*(space.rules.options(axis, False, each) for axis, each in choices.items())):
            used = [mesh_axis for mesh_axes in mapped for mesh_axis in mesh_axes]
            # a mesh axis of one device shards nothing: the mapping without it is a choice of its own
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
    """Return whether a logical axis can be sharded evenly over `mesh_axes`; if not, count it in `statistics`."""
    size, devices = space.sizes[axis], mesh_size(mesh, mesh_axes)
    # JAX refuses uneven shards, and an axis that is rounded up changes results: a vocabulary the softmax (docs/log.md)
    if size % devices == 0:
        return True
    statistics.rejected[Rejection.INDIVISIBLE] += 1
    statistics.indivisible.setdefault(axis, Indivisible(axis, size, mesh_axes, devices))
    return False


def _count_divided_blocks(
    space: Space, mesh: dict[str, int], mesh_axes: MeshAxes, statistics: SearchStatistics
) -> None:
    """Record the rejection of mesh axes that would divide a block that queries attend to between devices."""
    statistics.rejected[Rejection.INDIVISIBLE] += 1
    kinds: list[BlockSizes] = [kind.sparse for kind in space.step.attention_kinds if kind.sparse is not None]
    for sizes in (*kinds, *space.block_kinds):
        axis, blocks = f"blocks of {space.position}", sizes.selection_blocks(space.sizes[space.position])
        indivisible = Indivisible(axis, blocks, mesh_axes, mesh_size(mesh, mesh_axes))
        statistics.indivisible.setdefault(axis, indivisible)


class MeshSubproblem:
    """One mesh with the compute mapping of batch, positions and residual axis.

    Args:
        token_mapping: the compute mapping of batch, positions and residual axis, without unsharded axes.
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
        # weights that are stored along other mesh axes are not gathered: the compiler slices activations instead, for
        # which the estimates are far off (`Caveat.SLICED_ACTIVATIONS`, docs/log.md)
        self.further_storage = [axes for axes in STORAGE_CHOICES if self.token_axes.issuperset(axes)]
        self.costs = MeshCosts(space, mesh, ComputeSharding(token_mapping, methods[0]))
        self._known_min_times: dict[int, list[ComponentTimes]] = {}

    @cached_property
    def required(self) -> MeshAxes:
        """Mesh axes that batch and positions leave unused, so that some component must use them."""
        return () if self.space.allows_idle else self.space.assignment(self.mesh, self.token_mapping, {}).idle_mesh_axes

    @cached_property
    def leaves_idle(self) -> bool:
        """Whether some mesh axis of `required` is unused by every choice of every component."""
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
        """The valid compute mappings of each component's axes, with their best methods: [component][choice]."""
        return [list(self._compute_shardings(component)) for component in self.space.component_costs]

    @cached_property
    def min_times(self) -> list[list[ComponentTimes]]:
        """Lower bounds of the time of each choice of `compute_shardings`: [component][choice]."""
        return list(map(self._component_min_times, range(len(self.space.component_costs))))

    def _component_min_times(self, i: int) -> list[ComponentTimes]:
        """Return lower bounds of the times of component `i` under `compute_shardings`: [choice]."""
        if i not in self._known_min_times:
            component = self.space.component_costs[i]
            times = [self.costs.min_times(component, compute) for compute in self.compute_shardings[i]]
            self._known_min_times[i] = times
        return self._known_min_times[i]

    @cached_property
    def min_base_times(self) -> ComponentTimes:
        """Lower bounds of the times that depend on no component."""
        return self.costs.min_times(self.space.base_cost, UNSHARDED)

    @cached_property
    def min_seconds(self) -> list[list[float]]:
        """Lower bounds of the seconds of each choice, whatever options are added: [component][choice]."""
        return [[self._least_seconds(times) for times in each] for each in self.min_times]

    def _least_seconds(self, times: ComponentTimes) -> float:
        """Return a lower bound of the seconds under any combination of options."""
        return times.seconds + float(self.space.keeping.least(times.options)[0])

    @cached_property
    def quick_lower_bound(self) -> float:
        """Lower bound of a step's seconds: the matmuls, spread over all devices that may compute a part of them."""
        pinned = (pin.mesh_axes or () for pin in self.space.rules.pins)
        choices = (*self.token_mapping.values(), *TENSOR_CHOICES, *pinned)
        return self.space.min_matmul_seconds / mesh_size(self.mesh, {axis for axes in choices for axis in axes})

    @cached_property
    def lower_bound(self) -> float:
        """Lower bound of a step's seconds, tighter than `quick_lower_bound`; infinite if no mapping exists."""
        if not all(self.compute_shardings) or self.leaves_idle:
            return math.inf
        components = sum(map(min, self.min_seconds))
        base = self._least_seconds(self.min_base_times)
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

    def is_slower(self, limit: float) -> bool:
        """Return whether a step takes longer than `limit` seconds, computing only as many lower bounds as necessary."""
        if self.quick_lower_bound > limit or not all(self.compute_shardings) or self.leaves_idle:
            return True
        seconds = self._least_seconds(self.min_base_times)
        for i in range(len(self.compute_shardings)):
            seconds += min(map(self._least_seconds, self._component_min_times(i)))
            if seconds > limit:
                return True
        return self.lower_bound > limit

    @cached_property
    def stored_residual_choices(self) -> list[tuple[MeshAxes, np.ndarray]]:
        """Choices of mesh axes for the stored residual axis, each with the bytes of the base at every point."""
        axis = self.space.residual
        choices = self._storage_choices(axis, self.token_mapping)
        sizes, _ = self.costs.bytes(self.space.base_cost, [(UNSHARDED, self._stored(axes)) for axes in choices])
        return list(zip(choices, sizes, strict=True))

    @cached_property
    def min_bytes(self) -> float:
        """Lower bound of a device's peak memory, in bytes; infinite if no mapping exists."""
        points = len(self.space.points)
        peaks = [float((size + self.least_base_bytes)[:points].max()) for _, size in self.stored_residual_choices]
        return min(peaks, default=math.inf) + self.space.min_stored_bytes

    @cached_property
    def least_base_bytes(self) -> np.ndarray:
        """Lower bound (at most 0) of the bytes that options change outside of all components."""
        _, options = self.costs.bytes(self.space.base_cost, [(UNSHARDED, {})])
        return self.space.keeping.least(options[0])

    @cached_property
    def compute_tables(self) -> list[ChoiceTable]:
        """Tables of the base and of every component, with a choice for each of `compute_shardings`.

        Times are lower bounds over all mappings of stored parameters. Bytes are the bytes of buffers that do not depend
        on this mapping; `Space.compute_limits` limits them.
        """
        components = (self.space.base_cost, *self.space.component_costs)
        return [
            ChoiceTable.of(self.space.keeping, times, *self.costs.min_bytes(component, shardings))
            for component, shardings, times in zip(
                components,
                ([UNSHARDED], *self.compute_shardings),
                ([self.min_base_times], *self.min_times),
                strict=True,
            )
        ]

    def _stored(self, residual: MeshAxes) -> dict[str, MeshAxes]:
        """Return the mapping of stored parameters that maps only the residual axis."""
        return {self.space.residual: residual} if residual else {}

    def rank(self, ranking: Ranking) -> None:
        """Add to `ranking` the candidates that fit and tie for fastest.

        They form one group for every sharding of the residual stream's axis in stored parameters; the ranking keeps one
        candidate of each group.
        """
        possible = self._possible_computations(ranking.limit, self.space.limits)
        if isinstance(possible, Rejection):
            self.statistics.rejected[possible] += 1
            return
        for residual, base_bytes in self.stored_residual_choices:
            limit = ranking.limit  # which the choice before may have lowered
            if self.lower_bound > limit:
                self.statistics.rejected[Rejection.SLOWER] += 1
                return  # the bound holds for the choices that follow, too
            choices = self._choices(residual, base_bytes, possible, limit, self.space.limits)
            if isinstance(choices, Rejection):
                self.statistics.rejected[choices] += 1
                continue
            fastest = fastest_combinations(choices, limit, self.space.limits)
            if fastest:
                ranking.add(list(map(self._candidate, fastest)))
            else:
                self.statistics.rejected[Rejection.MEMORY if limit == math.inf else Rejection.SLOWER] += 1

    def find_smallest(self, limit_bytes: float) -> Candidate | None:
        """Return the candidate with the smallest peak memory, fitting or not; None if no peak is below the limit."""
        best: Combination | None = None
        possible = self._possible_computations(math.inf, self.space.device_limits(limit_bytes))
        if isinstance(possible, Rejection):
            return None
        for residual, base_bytes in self.stored_residual_choices:
            limit = best.peak_bytes if best is not None else limit_bytes
            choices = self._choices(residual, base_bytes, possible, math.inf, self.space.device_limits(limit))
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
        """Return the choices of mesh axes for a logical axis in computations, unless it is pinned."""
        if axis in self.space.unsharded_axes | self.space.minor_axes:
            return ((),)
        return EXPERT_CHOICES if axis in self.space.block_axes else TENSOR_CHOICES

    def _expert_strategies(self, component: ComponentCost, mapping: AxisMapping) -> Sequence[ExpertStrategy | None]:
        """Return the possible strategies of a component's experts; None for a component without experts."""
        if not component.expert_blocks:
            return (None,)
        expert_axes = tuple(axis for block in component.expert_blocks for axis in mapping.get(block.experts, ()))
        return self.space.expert_strategies(self.token_axes, expert_axes)

    def _param_mappings(
        self, component: ComponentCost, compute: AxisMapping, residual: dict[str, MeshAxes]
    ) -> Iterator[dict[str, MeshAxes]]:
        """Yield the mappings of stored parameters; each extends the compute sharding by other mesh axes."""
        for mapped in itertools.product(*(self._storage_choices(axis, compute) for axis in component.axes)):
            params = {**residual, **{axis: axes for axis, axes in zip(component.axes, mapped, strict=True) if axes}}
            if _is_distinct(params, component.stored_together):
                yield params

    def _storage_choices(self, axis: str, compute: AxisMapping) -> list[MeshAxes]:
        """Return the choices of mesh axes for a stored logical axis; each begins with the axis' compute sharding."""
        computed = compute.get(axis, ())
        further_storage = [()] if axis in self.space.minor_axes else self.further_storage
        choices = self.space.rules.options(axis, True, [(*computed, *further) for further in further_storage])
        return [axes for axes in choices if self._can_shard(axis, axes)]

    def _can_shard(self, axis: str, mesh_axes: MeshAxes) -> bool:
        """Return whether mesh axes can shard a logical axis evenly, if each has size > 1 and occurs once."""
        if len(set(mesh_axes)) < len(mesh_axes) or any(self.mesh[mesh_axis] == 1 for mesh_axis in mesh_axes):
            return False
        return _divides(self.space, self.mesh, axis, mesh_axes, self.statistics)

    def _possible_computations(self, limit: float, available_bytes: np.ndarray) -> Possible | Rejection:
        """Return the choices of `compute_tables` that may be in some plan, or the reason why there are none.

        Args:
            limit: step time in seconds above which a plan is of no interest.
            available_bytes: bytes that a plan may use at every row of `Space.limits`.
        """
        if not all(self.compute_shardings):
            return Rejection.DUPLICATE
        if self.leaves_idle:
            return Rejection.IDLE
        limits = self.space.compute_limits(available_bytes)
        return find_possible(self.compute_tables, self.space.keeping, limit, limits)

    def _choices(
        self,
        residual: MeshAxes,
        base_bytes: np.ndarray,
        computations: Possible,
        limit: float,
        available_bytes: np.ndarray,
    ) -> Choices | Rejection:
        """Return the Pareto-optimal choices of every component, or why a component has none.

        A choice is excluded if it exceeds `limit` (seconds) or `available_bytes` (at some point), whatever the other
        components choose. Lower bounds of times exclude most choices, so that exact times are computed only for the
        others.

        Args:
            computations: the result of `_possible_computations`, for no smaller limits.
        """
        stored, points = self._stored(residual), len(self.space.points)
        if (base_bytes + self.least_base_bytes + self.space.min_stored_bytes > available_bytes)[:points].any():
            return Rejection.MEMORY
        keeping = self.space.keeping.select(computations.combinations)
        components = (self.space.base_cost, *self.space.component_costs)
        choices: list[list[Choice]] = [[(UNSHARDED, stored)]]
        min_seconds = [self.compute_tables[0].seconds]
        for component, shardings, rows, table in zip(
            components[1:], self.compute_shardings, computations.choices[1:], self.compute_tables[1:], strict=True
        ):
            pairs = [
                (i, params) for i in rows for params in self._param_mappings(component, shardings[i].mapping, stored)
            ]
            self.statistics.evaluated += len(pairs)
            if not pairs:
                return Rejection.DUPLICATE
            choices.append([(shardings[i], params) for i, params in pairs])
            min_seconds.append(table.seconds[[i for i, _ in pairs]])
        tables = [
            ChoiceTable(seconds[:, computations.combinations], *self.costs.bytes(component, each))
            for component, each, seconds in zip(components, choices, min_seconds, strict=True)
        ]
        possible = find_possible(tables, keeping, limit, available_bytes)
        if isinstance(possible, Rejection):
            return possible
        choices = [[each[i] for i in rows] for each, rows in zip(choices, possible.choices, strict=True)]
        timed = [
            [self.costs.times(component, *choice) for choice in each]
            for component, each in zip(components, choices, strict=True)
        ]
        tables = [
            ChoiceTable.of(keeping, times, table.bytes[rows], table.option_bytes[rows])
            for table, times, rows in zip(tables, timed, possible.choices, strict=True)
        ]
        possible = find_possible(tables, keeping, limit, available_bytes)
        if isinstance(possible, Rejection):
            return possible
        kept: list[list[ComponentChoice]] = []
        for each, times, table, rows in zip(choices, timed, tables, possible.choices, strict=True):
            kept.append([])
            for i in rows:
                compute, params = each[i]
                amount = times[i].amount(table.bytes[i], table.option_bytes[i])
                kept[-1].append(ComponentChoice(compute, params, amount))
        (base,), *others = kept
        optimal = [pareto_optimal(each, self.required) for each in others]
        return Choices(base, optimal, points, keeping.select(possible.combinations), self.required)

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
    """Return whether no two logical axes of a set have a mesh axis in common."""
    for axes in axis_sets:
        used = [mesh_axis for axis in axes if axis in mapping for mesh_axis in mapping[axis]]
        if len(used) > 1 and len(set(used)) < len(used):
            return False
    return True
