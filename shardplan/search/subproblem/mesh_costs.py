"""Time and memory of components on one mesh, each computed once for the mesh axes that it depends on."""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from shardplan.cost.attention import has_kernel
from shardplan.cost.gspmd import DeviceCost, device_cost, device_cost_lower_bound, weight_bytes
from shardplan.cost.memory import ATTENTION_ROLES, buffer_bytes
from shardplan.cost.roofline import task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import MeshAxes
from shardplan.program.tasks import Task, TaskKind
from shardplan.search.space import METHOD, CacheKey, ComponentCost, Space
from shardplan.search.subproblem.component_choices import ComponentChoice, pareto_optimal


class MeshCosts:
    """Costs of components on one mesh.

    Args:
        base_mapping: compute mapping of batch, positions and the residual axis, and the default of `METHOD`.
    """

    def __init__(self, space: Space, mesh: dict[str, int], base_mapping: dict[str, MeshAxes]) -> None:
        self.space, self.mesh, self.base_mapping = space, mesh, base_mapping
        # the keys come from `CacheKey`
        self._lower_bounds: defaultdict[int, dict[object, DeviceCost]] = defaultdict(dict)
        self._task_seconds: defaultdict[int, dict[object, float]] = defaultdict(dict)
        self._buffer_bytes: dict[tuple[str, ...], list[dict[object, float]]] = {
            component.axes: [{} for _ in component.buffers] for component in (space.base_cost, *space.component_costs)
        }
        self._weight_bytes: dict[object, float] = {}
        self._methods: dict[object, list[MeshAxes]] = {}
        self._assignments: dict[tuple[tuple[str, MeshAxes], ...], ShardingAssignment] = {}

    def seconds(self, component: ComponentCost, compute: dict[str, MeshAxes], params: dict[str, MeshAxes]) -> float:
        """Time of a component's tasks."""
        assignment, values = self._assignment(compute, params), tuple(map(compute.get, component.open_axes))
        all_values = (*values, *map(params.get, component.open_axes))

        def cost(task: Task, compute_key: CacheKey) -> DeviceCost:
            return device_cost(task, assignment, self._lower_bound(task, compute_key(values), assignment))

        return sum(
            self._seconds(task, full_key(all_values), partial(cost, task, compute_key))
            for task, compute_key, full_key in component.tasks
        )

    def min_seconds(self, component: ComponentCost, compute: dict[str, MeshAxes]) -> float:
        """Lower bound of the time of a component's tasks for any mapping of the stored parameters."""
        assignment, values = self._assignment(compute, {}), tuple(map(compute.get, component.open_axes))
        keys = ((task, compute_key(values)) for task, compute_key, _ in component.tasks)
        return sum(self._min_seconds(task, key, assignment) for task, key in keys)

    def bytes(self, component: ComponentCost, compute: dict[str, MeshAxes], params: dict[str, MeshAxes]) -> np.ndarray:
        """Bytes per device of a component's buffers at every point of the program."""
        assignment = self._assignment(compute, params)
        values = (*map(compute.get, component.open_axes), *map(params.get, component.open_axes))
        sizes = []
        for (buffer, full_key), known in zip(component.buffers, self._buffer_bytes[component.axes], strict=True):
            key = full_key(values)
            if key not in known:
                known[key] = buffer_bytes(buffer, assignment)
            sizes.append(known[key])
        return component.counts @ np.array(sizes)

    def weight_bytes(self, component: ComponentCost, compute: dict[str, MeshAxes]) -> float:
        """Bytes per device, in the compute sharding, of the parameters that a component's matmuls use."""
        assignment, values = self._assignment(compute, {}), tuple(map(compute.get, component.open_axes))
        total = 0.0
        for task, compute_key, _ in component.tasks:
            if task.first_used_weights:
                key = id(task), compute_key(values)
                if key not in self._weight_bytes:
                    self._weight_bytes[key] = weight_bytes(task, assignment)
                total += self._weight_bytes[key]
        return total

    def best_methods(
        self, component: ComponentCost, compute: dict[str, MeshAxes], methods: list[MeshAxes]
    ) -> list[MeshAxes]:
        """The Pareto-optimal values of `METHOD` (time against memory); the default for a component without attention.

        If the space requires a kernel, only methods under which a kernel can run the attention.
        """
        if not component.has_attention:
            return [self.base_mapping[METHOD]]
        values = tuple(map(compute.get, component.open_axes))
        key = tuple(compute_key(values) for task, compute_key, _ in component.tasks if task.kind == TaskKind.ATTENTION)
        if key not in self._methods:
            choices = filter(None, (self._method_choice(component, {**compute, METHOD: method}) for method in methods))
            self._methods[key] = [choice.compute[METHOD] for choice in pareto_optimal(list(choices))]
        return self._methods[key]

    def _method_choice(self, component: ComponentCost, compute: dict[str, MeshAxes]) -> ComponentChoice | None:
        """The cost of attention under the method that `compute` holds; None if a required kernel cannot run it."""
        assignment, values = self._assignment(compute, {}), tuple(map(compute.get, component.open_axes))
        attention = [(task, key(values)) for task, key, _ in component.tasks if task.kind == TaskKind.ATTENTION]
        if self.space.requires_kernel and not all(has_kernel(task, assignment) for task, _ in attention):
            return None
        seconds = sum(self._min_seconds(task, key, assignment) for task, key in attention)
        sizes = [buffer_bytes(buffer, assignment) for buffer, _ in component.buffers if buffer.role in ATTENTION_ROLES]
        return ComponentChoice(compute, {}, seconds, np.array(sizes))

    def _assignment(self, compute: dict[str, MeshAxes], params: dict[str, MeshAxes]) -> ShardingAssignment:
        key = tuple(compute.items())
        if key not in self._assignments:
            self._assignments[key] = self.space.assignment(self.mesh, {**self.base_mapping, **compute}, {})
        return replace(self._assignments[key], params=params)

    def _min_seconds(self, task: Task, key: object, assignment: ShardingAssignment) -> float:
        return self._seconds(task, key, partial(self._lower_bound, task, key, assignment))

    def _seconds(self, task: Task, key: object, cost: Callable[[], DeviceCost]) -> float:
        known, space = self._task_seconds[id(task)], self.space
        if key not in known:
            known[key] = task_seconds(task, cost(), space.hardware, self.mesh, space.calibration).total
        return known[key]

    def _lower_bound(self, task: Task, key: object, assignment: ShardingAssignment) -> DeviceCost:
        known = self._lower_bounds[id(task)]
        if key not in known:
            known[key] = device_cost_lower_bound(task, assignment)
        return known[key]
