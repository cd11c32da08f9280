"""Time and memory of components on one mesh, each computed once for the mesh axes that it depends on."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from shardplan.cost.attention import has_kernel
from shardplan.cost.buffer_roles import ROLES, buffer_bytes, host_buffer_bytes
from shardplan.cost.gspmd import DeviceCost, device_cost, device_cost_lower_bound, weight_bytes
from shardplan.cost.roofline import task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import place_mesh
from shardplan.plan.mapping import MeshAxes
from shardplan.program.named_arrays import TracedArray
from shardplan.program.tasks import Task, TaskKind
from shardplan.search.keeping import Amount
from shardplan.search.space import ComponentCost, ComputeSharding, KeyedCopy, KeyedTask, KindMethods, Space
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
        self._lower_bounds: defaultdict[int, dict[object, DeviceCost]] = defaultdict(dict)
        self._task_seconds: defaultdict[int, dict[object, float]] = defaultdict(dict)
        self._buffer_bytes: dict[tuple[str, ...], list[dict[object, float]]] = {
            component.axes: [{} for _ in component.buffers] for component in (space.base_cost, *space.component_costs)
        }
        self._weight_bytes: dict[object, float] = {}
        self._methods: dict[object, list[KindMethods | None]] = {}
        self._assignments: dict[object, ShardingAssignment] = {}
        self._shard_counts: defaultdict[object, dict[TracedArray, int]] = defaultdict(dict)

    def seconds(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> float:
        """Time of a component's tasks."""
        return self._tasks_seconds(component, component.tasks, compute, params)

    def _tasks_seconds(
        self,
        component: ComponentCost,
        tasks: Iterable[KeyedTask],
        compute: ComputeSharding,
        params: dict[str, MeshAxes],
    ) -> float:
        """Time of some tasks of a component; those of which there is a negative number are subtracted."""
        assignment, choices = self._assignment(compute, params), component.compute_choices(compute)
        all_choices = component.all_choices(compute, params)
        seconds = []
        for task, count, compute_key, full_key in tasks:
            known, key = self._task_seconds[id(task)], full_key(all_choices)
            if key not in known:
                cost = device_cost(task, assignment, self._lower_bound(task, compute_key(choices), assignment))
                known[key] = self._seconds(task, cost)
            seconds.append(count * known[key])
        return sum(seconds)

    def copy_seconds(
        self,
        component: ComponentCost,
        copies: Iterable[KeyedCopy],
        compute: ComputeSharding,
        params: dict[str, MeshAxes],
    ) -> np.ndarray:
        """[loop]: time of a component's copies to and from the host, of which nothing is hidden."""
        seconds = np.zeros(self.space.keeping.loops)
        for loop, keyed in copies:
            seconds[loop] += self._tasks_seconds(component, [keyed], compute, params)
        return seconds

    def option_seconds(
        self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> np.ndarray:
        """[option, 1 + loops]: what every option about activations adds to the time of a component, and to copies."""
        rows = [
            [self._tasks_seconds(component, option.tasks, compute, params),
             *self.copy_seconds(component, option.copies, compute, params)]
            for option in component.options
        ]  # fmt: skip
        return np.array(rows, float).reshape(len(rows), 1 + self.space.keeping.loops)

    def least_gain(self, component: ComponentCost, compute: ComputeSharding) -> float:
        """Lower bound, at most 0, of what options about activations add, above the bounds of tasks."""
        seconds = [self._min_tasks_seconds(component, option.tasks, compute) for option in component.options]
        return float(self.space.keeping.least(np.array(seconds, float).reshape(len(seconds), 1))[0])

    def min_seconds(self, component: ComponentCost, compute: ComputeSharding) -> float:
        """Lower bound of the time of a component's tasks for any mapping of the stored parameters, and any options."""
        tasks = self._min_tasks_seconds(component, component.tasks, compute)
        return tasks + self.least_gain(component, compute) if component.options else tasks

    def _min_tasks_seconds(
        self, component: ComponentCost, tasks: Iterable[KeyedTask], compute: ComputeSharding
    ) -> float:
        assignment, choices = self._assignment(compute, {}), component.compute_choices(compute)
        return sum(
            [count * self._min_seconds(task, compute_key(choices), assignment) for task, count, compute_key, _ in tasks]
        )

    def bytes(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """Bytes per device of a component's buffers at every point of the program, then at every point of the host."""
        return component.counts @ self._sizes(component, compute, params)

    def amount(
        self,
        component: ComponentCost,
        compute: ComputeSharding,
        params: dict[str, MeshAxes],
        seconds: float,
        option_seconds: np.ndarray,
    ) -> Amount:
        """Return what a component takes.

        Args:
            seconds: see `seconds`.
            option_seconds: see `option_seconds`.
        """
        sizes = self._sizes(component, compute, params)
        copies = self.copy_seconds(component, component.copies, compute, params)
        options = np.concatenate([option_seconds, component.option_counts @ sizes], axis=1)
        return Amount(seconds, component.counts @ sizes, copies, options)

    def option_bytes(
        self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> np.ndarray:
        """[option, row]: bytes that every option about activations adds to those of a component."""
        return component.option_counts @ self._sizes(component, compute, params)

    def _sizes(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """[buffer]: bytes per device of each of a component's buffers."""
        assignment, choices = self._assignment(compute, params), component.all_choices(compute, params)
        sizes = []
        for (buffer, full_key), known in zip(component.buffers, self._buffer_bytes[component.axes], strict=True):
            key = full_key(choices)
            if key not in known:
                of_memory = host_buffer_bytes if buffer.array.is_on_host else buffer_bytes
                known[key] = of_memory(buffer, assignment)
            sizes.append(known[key])
        return np.array(sizes)

    def weight_bytes(self, component: ComponentCost, compute: ComputeSharding) -> float:
        """Bytes per device, in the compute sharding, of the parameters that a component's matmuls use."""
        assignment, choices = self._assignment(compute, {}), component.compute_choices(compute)
        total = 0.0
        for task, count, compute_key, _ in component.tasks:
            if task.first_used_weights:
                key = id(task), compute_key(choices)
                if key not in self._weight_bytes:
                    self._weight_bytes[key] = weight_bytes(task, assignment)
                total += count * self._weight_bytes[key]
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
        key = tuple(each(open_choices) for task, _, each, _ in component.tasks if task.kind == TaskKind.ATTENTION)
        if key not in self._methods:
            shardings = (ComputeSharding(mapping, each) for each in methods)
            choices = filter(None, (self._method_choice(component, compute) for compute in shardings))
            self._methods[key] = [choice.compute.methods for choice in pareto_optimal(list(choices))]
        return self._methods[key]

    def _method_choice(self, component: ComponentCost, compute: ComputeSharding) -> ComponentChoice | None:
        """The cost of attention under the methods of `compute`; None if a required kernel cannot run it."""
        assignment, choices = self._assignment(compute, {}), component.compute_choices(compute)
        attention = [each for each in component.tasks if each.task.kind == TaskKind.ATTENTION]
        if self.space.requires_kernel and not all(has_kernel(each.task, assignment) for each in attention):
            return None
        seconds = sum(count * self._min_seconds(task, key(choices), assignment) for task, count, key, _ in attention)
        buffers = [buffer for buffer, _ in component.buffers if ROLES[buffer.role].depends_on_attention]
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

    def _min_seconds(self, task: Task, key: object, assignment: ShardingAssignment) -> float:
        known = self._task_seconds[id(task)]
        if key not in known:
            known[key] = self._seconds(task, self._lower_bound(task, key, assignment))
        return known[key]

    def _seconds(self, task: Task, cost: DeviceCost) -> float:
        return task_seconds(task, cost, self.placement, self.space.calibration).total

    def _lower_bound(self, task: Task, key: object, assignment: ShardingAssignment) -> DeviceCost:
        known = self._lower_bounds[id(task)]
        if key not in known:
            known[key] = device_cost_lower_bound(task, assignment)
        return known[key]
