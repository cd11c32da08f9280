"""Time and memory of components on one mesh, each computed once for the mesh axes that it depends on."""

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from shardplan.cost.attention import has_kernel
from shardplan.cost.buffer_roles import ROLES, buffer_bytes, host_buffer_bytes
from shardplan.cost.gspmd import DeviceCost, device_cost, device_cost_lower_bound, weight_bytes
from shardplan.cost.roofline import task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import place_mesh
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.live_buffers import LiveBuffer
from shardplan.program.named_arrays import MajorAxes
from shardplan.program.tasks import Task, TaskKind
from shardplan.search.components.component_cost import ATTENTION, BufferGroup, ComponentCost, TaskGroup
from shardplan.search.components.compute_sharding import ComputeSharding, KindMethods
from shardplan.search.components.keeping import Amount
from shardplan.search.components.shared_costs import LowerBounds
from shardplan.search.space import Space
from shardplan.search.subproblem.component_choices import ComponentChoice, pareto_optimal

Choice = tuple[ComputeSharding, dict[str, MeshAxes]]
"""The sharding of a component's computations, and the mesh axes of its stored parameters."""


class MeshCosts:
    """Costs of components (groups of logical axes) on one mesh.

    Args:
        base: compute mapping of batch, positions and the residual axis, and the methods of attention where a component
            has none of its own.
    """

    def __init__(self, space: Space, mesh: dict[str, int], base: ComputeSharding) -> None:
        self.space, self.mesh, self.base = space, mesh, base
        self.placement = place_mesh(space.hardware, mesh)
        # the first key is the id of a group, which has arrays and no hash; the others come from `CacheKey`
        self._group_min_seconds: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
        self._group_seconds: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
        self._group_bytes: defaultdict[int, dict[object, np.ndarray]] = defaultdict(dict)
        self._known_compute_sizes: dict[object, np.ndarray] = {}
        self._weight_bytes: dict[object, float] = {}
        self._methods: dict[object, list[KindMethods | None]] = {}
        self._assignments: dict[object, ShardingAssignment] = {}
        self._shard_counts: defaultdict[object, dict[MajorAxes, int]] = defaultdict(dict)

    def times(
        self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> "ComponentTimes":
        """Return the times of a component's tasks."""
        return _times(component, self._seconds(component, compute, params))

    def min_times(self, component: ComponentCost, compute: ComputeSharding) -> "ComponentTimes":
        """Return lower bounds of `times` over all mappings of stored parameters."""
        return _times(component, self._min_seconds(component, compute))

    def _seconds(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """Return the seconds of each of a component's tasks, [task]."""
        all_choices = component.all_choices(compute, params)
        seconds = np.empty(len(component.tasks))
        for group in component.task_groups:
            known, key = self._group_seconds[id(group)], group.full_key(all_choices)
            if key not in known:
                assignment = self._assignment(compute, params)
                lower_bounds = self._lower_bounds(component, group, compute).costs
                tasks = [component.tasks[i] for i in group.indices]
                costs = map(device_cost, tasks, itertools.repeat(assignment), lower_bounds)
                known[key] = np.array([*map(self._task_seconds, tasks, costs)])
            seconds[group.indices] = known[key]
        return seconds

    def _min_seconds(self, component: ComponentCost, compute: ComputeSharding) -> np.ndarray:
        """Return lower bounds of the seconds of each of a component's tasks, [task]."""
        choices = component.compute_choices(compute)
        seconds = np.empty(len(component.tasks))
        for group in component.task_groups:
            known, key = self._group_min_seconds[id(group)], group.compute_key(choices)
            if key not in known:
                known[key] = self._group_lower_bound_seconds(component, group, compute)
            seconds[group.indices] = known[key]
        return seconds

    def bytes(self, component: ComponentCost, choices: Sequence[Choice]) -> tuple[np.ndarray, np.ndarray]:
        """Return bytes per device of a component's buffers, at every program point and then in host memory.

        Returns:
            [choice, row], and [choice, option, row] of what every option about activations adds.
        """
        return _bytes(component, [self._sizes(component, *choice) for choice in choices])

    def min_bytes(
        self, component: ComponentCost, shardings: Sequence[ComputeSharding]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return `bytes` of only the buffers whose sizes do not depend on the mapping of stored parameters."""
        return _bytes(component, [self._compute_sizes(component, compute) for compute in shardings])

    def _sizes(self, component: ComponentCost, compute: ComputeSharding, params: dict[str, MeshAxes]) -> np.ndarray:
        """Return the bytes per device of each of a component's buffers, [buffer]."""
        choices = component.all_choices(compute, params)
        sizes = self._compute_sizes(component, compute).copy()
        for group in component.buffer_groups:
            if not group.depends_on_params:
                continue
            known, key = self._group_bytes[id(group)], group.full_key(choices)
            if key not in known:
                known[key] = self._group_sizes(component, group, compute, params)
            sizes[group.indices] = known[key]
        return sizes

    def _compute_sizes(self, component: ComponentCost, compute: ComputeSharding) -> np.ndarray:
        """Return the bytes per device of each buffer: [buffer]; 0 if they depend on the mapping of parameters."""
        choices = component.compute_choices(compute)
        own_key = id(component), choices
        if own_key not in self._known_compute_sizes:
            sizes = np.zeros(len(component.buffers))
            for group in component.buffer_groups:
                if group.depends_on_params:
                    continue
                known = self.space.shared_costs.sizes[id(group)]
                key = group.full_key(choices), self._visible_mesh(group.axes, compute)
                if key not in known:
                    known[key] = self._group_sizes(component, group, compute, {})
                sizes[group.indices] = known[key]
            self._known_compute_sizes[own_key] = sizes
        return self._known_compute_sizes[own_key]

    def _group_sizes(
        self, component: ComponentCost, group: BufferGroup, compute: ComputeSharding, params: dict[str, MeshAxes]
    ) -> np.ndarray:
        """Return the bytes per device of the buffers of a group."""
        assignment = self._assignment(compute, params)
        return np.array([_bytes_of(component.buffers[i], assignment) for i in group.indices])

    def weight_bytes(self, component: ComponentCost, compute: ComputeSharding) -> float:
        """Return bytes per device, in the compute sharding, of the parameters that a component's matmuls use."""
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
        """Return the Pareto-optimal methods of attention (time, memory); None for a component without attention.

        If the space requires a kernel, the result has only methods under which a kernel can run the attention.
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
            shardings = [ComputeSharding(mapping, each) for each in methods]
            possible = [compute for compute in shardings if self._can_attend(component, compute)]
            if len(possible) > 1:
                choices = [self._method_choice(component, compute) for compute in possible]
                possible = [choice.compute for choice in pareto_optimal(choices)]
            self._methods[key] = [compute.methods for compute in possible]
        return self._methods[key]

    def _can_attend(self, component: ComponentCost, compute: ComputeSharding) -> bool:
        """Return whether a kernel can run a component's attention, if the space requires one."""
        if not self.space.requires_kernel:
            return True
        assignment = self._assignment(compute, {})
        return all(has_kernel(task, assignment) for task in component.tasks if task.kind == TaskKind.ATTENTION)

    def _method_choice(self, component: ComponentCost, compute: ComputeSharding) -> ComponentChoice:
        """Return the cost of attention under the methods of `compute`."""
        assignment = self._assignment(compute, {})
        attention = [i for i, task in enumerate(component.tasks) if task.kind in ATTENTION]
        seconds = float(component.numbers[0, attention] @ self._min_seconds(component, compute)[attention])
        buffers = [buffer for buffer in component.buffers if ROLES[buffer.role].depends_on_attention]
        sizes = [buffer_bytes(buffer, assignment) for buffer in buffers]
        return ComponentChoice(compute, {}, Amount(seconds, np.array(sizes), np.zeros(0), np.zeros((0, 1))))

    def _assignment(self, compute: ComputeSharding, params: dict[str, MeshAxes]) -> ShardingAssignment:
        own_mapping = tuple(compute.mapping.items())
        key = compute.methods, compute.experts, own_mapping
        if key not in self._assignments:
            mapping, methods = {**self.base.mapping, **compute.mapping}, compute.methods or self.base.methods
            counts = self._shard_counts[own_mapping]  # which methods do not change
            self._assignments[key] = self.space.assignment(self.mesh, mapping, {}, methods, counts, compute.experts)
        unstored = self._assignments[key]
        return replace(unstored, params=params) if params else unstored

    def _task_seconds(self, task: Task, cost: DeviceCost) -> float:
        return task_seconds(task, cost, self.placement, self.space.calibration).total

    def _group_lower_bound_seconds(
        self, component: ComponentCost, group: TaskGroup, compute: ComputeSharding
    ) -> np.ndarray:
        """Return lower bounds of the seconds of the tasks of a group."""
        bounds = self._lower_bounds(component, group, compute)
        seconds = bounds.seconds.copy()
        for i in bounds.transferring:
            seconds[i] = self._task_seconds(component.tasks[group.indices[i]], bounds.costs[i])
        return seconds

    def _lower_bounds(self, component: ComponentCost, group: TaskGroup, compute: ComputeSharding) -> LowerBounds:
        """Return lower bounds of the costs of the tasks of a group."""
        known = self.space.shared_costs.lower_bounds[id(group)]
        key = (
            group.compute_key(component.compute_choices(compute)),
            self._visible_mesh(group.axes, compute, group.sees_mesh),
        )
        if key not in known:
            assignment, tasks = self._assignment(compute, {}), [component.tasks[i] for i in group.indices]
            costs = [device_cost_lower_bound(task, assignment) for task in tasks]
            seconds = np.array([*map(self._task_seconds, tasks, costs)])
            known[key] = LowerBounds(costs, seconds, [i for i, cost in enumerate(costs) if cost.traffic])
        return known[key]

    def _visible_mesh(self, axes: Sequence[str], compute: ComputeSharding, whole: bool = False) -> object:
        """Return the properties of the mesh that costs of computations depend on, except the links of the torus.

        On all meshes with an equal result, arrays have the same number of shards, and collectives have the same number
        of devices and bytes. The seconds of a collective also depend on the links of its mesh axes, so they are not
        shared between meshes. Mesh axes that the mapping does not use are left out. Mesh axes that shard only the batch
        count as one axis, with the product of their sizes, because every array is sharded by all of them or by none.

        Args:
            axes: the logical axes that the costs depend on, beside batch, positions and the residual axis.
            whole: whether the costs also depend on mesh axes that the mapping does not use.
        """
        base, batch_axis = self.base.mapping, self.space.batch
        batch = base.get(batch_axis, ())
        used = {mesh_axis for axis, mesh_axes in base.items() if axis != batch_axis for mesh_axis in mesh_axes}
        used.update(mesh_axis for axis in axes for mesh_axis in compute.mapping.get(axis, ()))
        together = batch if used.isdisjoint(batch) else ()
        sizes = tuple(
            size if whole or axis in used or axis in batch else 1
            for axis, size in self.mesh.items()
            if axis not in together
        )
        return self.base.methods, tuple(base.items()), mesh_size(self.mesh, together), sizes


class ComponentTimes(NamedTuple):
    """The times of the tasks of a component."""

    seconds: float
    """Seconds without host copies in loops."""
    copies: np.ndarray
    """Seconds of host copies in each loop, as if nothing hid them, [loop]."""
    options: np.ndarray
    """Seconds, and seconds of copies, that each option for activations adds, [option, 1 + loops]."""

    def amount(self, size: np.ndarray, option_bytes: np.ndarray) -> Amount:
        """Return the amount of a component with these times, given its bytes [row] and [option, row]."""
        return Amount(self.seconds, size, self.copies, np.concatenate([self.options, option_bytes], axis=1))


def _times(component: ComponentCost, seconds: np.ndarray) -> ComponentTimes:
    """Return the times of a component, from the times of its tasks."""
    own, options = component.numbers @ seconds, component.option_numbers @ seconds
    return ComponentTimes(float(own[0]), own[1:], options)


def _bytes(component: ComponentCost, sizes: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Return a component's bytes per device, [choice, row], and what each option adds to them, [choice, option, row].

    Rows are the same as in `MeshCosts.bytes`.

    Args:
        sizes: for each choice, the bytes of each buffer.
    """
    of_choices = np.array(sizes).reshape(len(sizes), len(component.buffers))  # there may be no choice
    return of_choices @ component.counts.T, np.tensordot(of_choices, component.option_counts, axes=(1, 2))


def _bytes_of(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the bytes of a buffer in the memory where it is."""
    return host_buffer_bytes(buffer, assignment) if buffer.array.is_on_host else buffer_bytes(buffer, assignment)
