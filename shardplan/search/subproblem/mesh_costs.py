"""Time and memory of components on one mesh, each computed once for the mesh axes that it depends on."""

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.cost.attention import has_kernel
from shardplan.cost.buffer_roles import ROLES, buffer_bytes, host_buffer_bytes
from shardplan.cost.gspmd import DeviceCost, device_cost, device_cost_lower_bound, weight_bytes
from shardplan.cost.roofline import task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import place_mesh
from shardplan.plan.mapping import MeshAxes
from shardplan.program.live_buffers import LiveBuffer
from shardplan.program.named_arrays import TracedArray
from shardplan.program.tasks import Task, TaskKind
from shardplan.search.components.component_cost import ATTENTION, ComponentCost, TaskGroup
from shardplan.search.components.compute_sharding import ComputeSharding, KindMethods
from shardplan.search.components.keeping import Amount
from shardplan.search.space import Space
from shardplan.search.subproblem.component_choices import ComponentChoice, pareto_optimal


class MeshCosts:
    """Costs of components on one mesh.

    Args:
        base: compute mapping of batch, positions and the residual axis, and the methods of attention where a component
            has none of its own.
    """

    def __init__(self, space: Space, mesh: dict[str, int], base: ComputeSharding) -> None:
        self.space, self.mesh, self.base = space, mesh, base
        self.placement = place_mesh(space.hardware, mesh)
        # the keys come from `CacheKey`
        self._group_lower_bounds: defaultdict[int, dict[object, list[DeviceCost]]] = defaultdict(dict)
        self._group_min_seconds: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
        self._group_seconds: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
        self._group_bytes: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
        self._weight_bytes: dict[object, float] = {}
        self._methods: dict[object, list[KindMethods | None]] = {}
        self._assignments: dict[object, ShardingAssignment] = {}
        self._shard_counts: defaultdict[object, dict[TracedArray, int]] = defaultdict(dict)

    def times(
        self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> "ComponentTimes":
        """Return the times of a component's tasks."""
        seconds = self._seconds(component, compute, params)
        own, options = component.numbers @ seconds, component.option_numbers @ seconds
        return ComponentTimes(float(own[0]), own[1:], options)

    def _seconds(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """[task]: time of each of a component's tasks."""
        all_choices = component.all_choices(compute, params)
        seconds = np.empty(len(component.tasks))
        for group in component.task_groups:
            known, key = self._group_seconds[id(group)], group.full_key(all_choices)
            if key not in known:
                assignment = self._assignment(compute, params)
                lower_bounds = self._lower_bounds(component, group, compute)
                tasks = [component.tasks[i] for i in group.indices]
                costs = map(device_cost, tasks, itertools.repeat(assignment), lower_bounds)
                known[key] = np.array([*map(self._task_seconds, tasks, costs)])
            seconds[group.indices] = known[key]
        return seconds

    def min_seconds(self, component: ComponentCost, compute: ComputeSharding) -> float:
        """Lower bound of the time of a component's tasks for any mapping of the stored parameters, and any options."""
        seconds = self._min_seconds(component, compute)
        least = self.space.keeping.least(component.option_numbers[:, 0] @ seconds[:, None])
        return float(component.numbers[0] @ seconds + least[0])

    def _min_seconds(self, component: ComponentCost, compute: ComputeSharding) -> np.ndarray:
        """[task]: lower bound of the time of each of a component's tasks."""
        choices = component.compute_choices(compute)
        seconds = np.empty(len(component.tasks))
        for group in component.task_groups:
            known, key = self._group_min_seconds[id(group)], group.compute_key(choices)
            if key not in known:
                tasks = [component.tasks[i] for i in group.indices]
                known[key] = np.array([*map(self._task_seconds, tasks, self._lower_bounds(component, group, compute))])
            seconds[group.indices] = known[key]
        return seconds

    def bytes(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """Bytes per device of a component's buffers at every point of the program, then at every point of the host."""
        return component.counts @ self._sizes(component, compute, params)

    def amount(
        self,
        component: ComponentCost,
        compute: ComputeSharding,
        params: dict[str, MeshAxes],
        times: "ComponentTimes",
    ) -> Amount:
        """Return what a component takes, given its times."""
        sizes = self._sizes(component, compute, params)
        options = np.concatenate([times.options, component.option_counts @ sizes], axis=1)
        return Amount(times.seconds, component.counts @ sizes, times.copies, options)

    def option_bytes(
        self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> np.ndarray:
        """[option, row]: bytes that every option about activations adds to those of a component."""
        return component.option_counts @ self._sizes(component, compute, params)

    def _sizes(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """[buffer]: bytes per device of each of a component's buffers."""
        choices = component.all_choices(compute, params)
        sizes = np.empty(len(component.buffers))
        for group in component.buffer_groups:
            known, key = self._group_bytes[id(group)], group.full_key(choices)
            if key not in known:
                assignment = self._assignment(compute, params)
                known[key] = np.array([_bytes_of(component.buffers[i], assignment) for i in group.indices])
            sizes[group.indices] = known[key]
        return sizes

    def weight_bytes(self, component: ComponentCost, compute: ComputeSharding) -> float:
        """Bytes per device, in the compute sharding, of the parameters that a component's matmuls use."""
        assignment, choices = self._assignment(compute, {}), component.compute_choices(compute)
        total = 0.0
        for group in component.task_groups:
            key = id(group), group.compute_key(choices)
            if key not in self._weight_bytes:
                pairs = [(component.tasks[i], component.numbers[0, i]) for i in group.indices]
                sizes = [n * weight_bytes(task, assignment) for task, n in pairs if task.first_used_weights]
                self._weight_bytes[key] = float(sum(sizes))
            total += self._weight_bytes[key]
        return total

    def best_methods(
        self, component: ComponentCost, mapping: dict[str, MeshAxes], methods: list[KindMethods | None]
    ) -> list[KindMethods | None]:
        """The Pareto-optimal methods of attention (time against memory); None for a component without attention.

        If the space requires a kernel, only methods under which a kernel can run the attention.
        """
        if not component.has_attention:
            return [None]
        open_choices = component.compute_choices(ComputeSharding(mapping))
        attending = [
            group for group in component.task_groups
            if any(component.tasks[i].kind in ATTENTION for i in group.indices)
        ]  # fmt: skip
        key = tuple(group.compute_key(open_choices) for group in attending)
        if key not in self._methods:
            shardings = (ComputeSharding(mapping, each) for each in methods)
            choices = filter(None, (self._method_choice(component, compute) for compute in shardings))
            self._methods[key] = [choice.compute.methods for choice in pareto_optimal(list(choices))]
        return self._methods[key]

    def _method_choice(self, component: ComponentCost, compute: ComputeSharding) -> ComponentChoice | None:
        """The cost of attention under the methods of `compute`; None if a required kernel cannot run it."""
        assignment = self._assignment(compute, {})
        attention = [i for i, task in enumerate(component.tasks) if task.kind in ATTENTION]
        by_matmuls = (component.tasks[i] for i in attention if component.tasks[i].kind == TaskKind.ATTENTION)
        if self.space.requires_kernel and not all(has_kernel(task, assignment) for task in by_matmuls):
            return None
        seconds = float(component.numbers[0, attention] @ self._min_seconds(component, compute)[attention])
        buffers = [buffer for buffer in component.buffers if ROLES[buffer.role].depends_on_attention]
        sizes = [buffer_bytes(buffer, assignment) for buffer in buffers]
        return ComponentChoice(compute, {}, Amount(seconds, np.array(sizes), np.zeros(0), np.zeros((0, 1))))

    def _assignment(self, compute: ComputeSharding, params: dict[str, MeshAxes]) -> ShardingAssignment:
        own_mapping = tuple(compute.mapping.items())
        key = compute.methods, compute.experts, own_mapping
        if key not in self._assignments:
            mapping, methods = {**self.base.mapping, **compute.mapping}, compute.methods or self.base.methods
            counts = self._shard_counts[own_mapping]
            self._assignments[key] = self.space.assignment(self.mesh, mapping, {}, methods, counts, compute.experts)
        unstored = self._assignments[key]
        return replace(unstored, params=params) if params else unstored

    def _task_seconds(self, task: Task, cost: DeviceCost) -> float:
        return task_seconds(task, cost, self.placement, self.space.calibration).total

    def _lower_bounds(self, component: ComponentCost, group: TaskGroup, compute: ComputeSharding) -> list[DeviceCost]:
        """Lower bounds of the costs of the tasks of a group."""
        known, key = self._group_lower_bounds[id(group)], group.compute_key(component.compute_choices(compute))
        if key not in known:
            assignment = self._assignment(compute, {})
            known[key] = [device_cost_lower_bound(component.tasks[i], assignment) for i in group.indices]
        return known[key]


class ComponentTimes(NamedTuple):
    """The times of the tasks of a component."""

    seconds: float
    """Without copies to and from the host in loops."""
    copies: np.ndarray
    """[loop]: these copies, of which nothing is hidden."""
    options: np.ndarray
    """[option, 1 + loops]: what every option about activations adds to both."""


def _bytes_of(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Bytes of a buffer in the memory that it is in."""
    return host_buffer_bytes(buffer, assignment) if buffer.array.is_on_host else buffer_bytes(buffer, assignment)
