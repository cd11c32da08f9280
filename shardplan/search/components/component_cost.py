"""Precomputes the tasks and live buffers whose cost depends on one component of logical axes, for fast pricing.

A component is priced for many mappings, and most of its tasks depend on a few of its axes alone. Tasks that depend on
the same axes are a group: what they take is one vector, which is computed once for each mapping of these axes.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from shardplan.cost.buffer_roles import ROLES
from shardplan.cost.gspmd import depends_on_params
from shardplan.cost.memory import stored_buffers
from shardplan.experts.method import ExpertStrategy
from shardplan.plan.mapping import AxisMapping, MeshAxes
from shardplan.program.layer_flops import CopyWindow, copy_window
from shardplan.program.live_buffers import BufferRole, LiveBuffer, ProgramPoint
from shardplan.program.named_arrays import TracedArray
from shardplan.program.task_axes import ExpertAxes
from shardplan.program.tasks import Step, Task, TaskKind
from shardplan.program.variants.kept_activations import Option
from shardplan.search.components.compute_sharding import ComputeSharding, KindMethods
from shardplan.search.components.keeping import Keeping

Choice = MeshAxes | KindMethods | ExpertStrategy | None
"""A choice for a component: mesh axes of a logical axis, methods of attention, or the strategy of experts."""
ATTENTION = (TaskKind.ATTENTION, TaskKind.SPARSE_ATTENTION)
"""Kinds of tasks whose costs depend on the method of attention."""
CacheKey = Callable[[Sequence[Choice]], Any]
"""Function from all choices of a component to the ones that a cost depends on, which are the key of a cache."""

SEEING_MESH = (TaskKind.COLLECTIVE, TaskKind.EXPERTS, TaskKind.BLOCK_ATTENTION)
"""Kinds of tasks whose costs depend on mesh axes that shard none of their logical axes: a shard_map's collective spans
all mesh axes that do not shard its result."""

STORED_ROLES = (BufferRole.PARAMETER, BufferRole.OPTIMIZER_STATE)
"""Roles of buffers that are live at every point of the program."""


class TaskGroup(NamedTuple):
    """Tasks of a component whose costs depend on the mesh axes of the same logical axes."""

    indices: np.ndarray
    """Indices of the group's tasks in `ComponentCost.tasks`."""
    axes: tuple[str, ...]
    """Axes of `ComponentCost.open_axes` that the costs depend on."""
    sees_mesh: bool
    """Whether lower bounds depend on mesh axes that the compute mapping does not use."""
    compute_key: CacheKey
    """Selects the entries of `ComponentCost.compute_choices` that lower bounds depend on."""
    full_key: CacheKey
    """Selects the entries of `ComponentCost.all_choices` that costs depend on."""


class BufferGroup(NamedTuple):
    """Live buffers of a component whose sizes depend on the mesh axes of the same logical axes."""

    indices: np.ndarray
    """Indices of the group's buffers in `ComponentCost.buffers`."""
    axes: tuple[str, ...]
    """Axes of `ComponentCost.open_axes` that the sizes depend on."""
    full_key: CacheKey
    """Selects the entries of `ComponentCost.all_choices` that sizes depend on."""
    depends_on_params: bool
    """Whether the sizes depend on the mapping of stored parameters."""


@dataclass(frozen=True)
class ComponentCost:
    """The tasks and live buffers whose cost depends on one component, or on batch and positions only (the base).

    A component is a set of logical axes that occur in the same tasks; see `Space.components`.
    """

    axes: tuple[str, ...]
    """Logical axes of the component."""
    open_axes: tuple[str, ...]
    """Axes that a subproblem still has to map: `axes`, and the stored residual axis."""
    tasks: tuple[Task, ...]
    """Distinct tasks, among them tasks that options for activations add; tasks of equal `Task.cost_key` are one."""
    task_groups: tuple[TaskGroup, ...]
    numbers: np.ndarray
    """Row 0: count of each task, host copies in loops excluded; row 1 + w: count of each host copy that hides behind
    the matmuls of window w. [1 + windows, task]"""
    option_numbers: np.ndarray
    """Change of `numbers` by each option, [option, 1 + windows, task]."""
    buffers: tuple[LiveBuffer, ...]
    buffer_groups: tuple[BufferGroup, ...]
    min_stored_bytes: float
    """Bytes per device of the component's parameters and optimizer state, sharded over all devices."""
    counts: np.ndarray
    """Count of each buffer on a device at each point of the program, and on the host at each of `Space.host_rows`:
    [point, buffer]."""
    option_counts: np.ndarray
    """Change of `counts` by each option, [option, point, buffer]."""
    computed_together: frozenset[frozenset[str]]
    """Sets of logical axes that meet in a computation, so that no two of them may use the same mesh axis."""
    stored_together: frozenset[frozenset[str]]
    """Sets of logical axes that meet in a parameter, so that no two of them may use the same mesh axis."""

    @cached_property
    def depends_on_params(self) -> np.ndarray:
        """Whether each buffer's size depends on the mapping of stored parameters, [buffer]."""
        result = np.zeros(len(self.buffers), bool)
        for group in self.buffer_groups:
            result[group.indices] = group.depends_on_params
        return result

    @cached_property
    def param_bytes(self) -> float:
        """Bytes over all devices that are live at every point and sharded by the mapping of stored parameters.

        The sharding of other state, such as a cache of keys and values, follows from the compute mapping.
        """
        total = 0.0
        for buffer, number, depends in zip(self.buffers, self.counts[0], self.depends_on_params, strict=True):
            if depends and buffer.role in STORED_ROLES and not buffer.array.is_on_host:
                total += number * buffer.array.elements * buffer.array.itemsize
        return total

    def has_negative_counts(self, keeping: Keeping) -> np.ndarray:
        """Return [row]: whether the options could remove more storage-dependent buffers from a row than it has."""
        options = self.option_counts[:, :, self.depends_on_params]
        counts = self.counts[:, self.depends_on_params]
        added = keeping.least(options.reshape(len(options), counts.size)).reshape(counts.shape)
        return np.asarray((counts + added < 0).any(axis=1))

    @cached_property
    def has_attention(self) -> bool:
        """Whether the tasks include attention."""
        return any(task.kind in ATTENTION for task in self.tasks)

    @cached_property
    def expert_blocks(self) -> tuple[ExpertAxes, ...]:
        """Axes of each kind of expert block among the tasks."""
        return Step(self.tasks, (), {}, {}).expert_blocks

    def compute_choices(self, compute: ComputeSharding) -> tuple[Choice, ...]:
        """Return the methods of attention and experts, and the mesh axes of each of `open_axes` in computations."""
        return compute.methods, compute.experts, *map(compute.mapping.get, self.open_axes)

    def all_choices(self, compute: ComputeSharding, params: AxisMapping) -> tuple[Choice, ...]:
        """Return `compute_choices`, then the mesh axes of each of `open_axes` in the mapping of stored parameters."""
        return *self.compute_choices(compute), *map(params.get, self.open_axes)


@dataclass(frozen=True)
class ProgramCosts:
    """The tasks and buffers of a program, divided by component; see `shardplan.search.space.Space`."""

    step: Step
    points: tuple[ProgramPoint, ...]
    options: tuple[Option, ...]
    host_rows: tuple[int, ...]
    windows: tuple[CopyWindow, ...]
    """Windows of matmuls behind which host copies hide, including copies under an option."""
    tensor_axes: frozenset[str]
    residual: str
    devices: int
    is_stored: Callable[[TracedArray], bool]
    """Return whether an array has the sharding of stored parameters."""


def component_cost(program: ProgramCosts, component: tuple[str, ...]) -> ComponentCost:
    """Collect the tasks and buffers of a component, each with the axes on which its cost depends.

    The empty component has the tasks and buffers without any axis of a component.
    """
    own, step = set(component), program.step

    def belongs(*arrays: TracedArray) -> bool:
        # axes that meet in a task are in one component, so that one of them tells for all
        names = axis_names(arrays) & program.tensor_axes
        return bool(names & own) if own else not names

    open_axes = (*component, program.residual)
    counted = [_count_tasks(program, step.tasks)]
    counted += [_count_option(program, option) for option in program.options]
    tasks = list(dict.fromkeys(task for each in counted for _, task in each if belongs(*task.operands, *task.results)))
    tables = np.array([_table(each, tasks, 1 + len(program.windows)) for each in counted])

    stored_here = [buffer for buffer in stored_buffers(step) if belongs(buffer.array)]

    @cache
    def is_here(buffer: LiveBuffer) -> bool:
        return belongs(buffer.array, *buffer.related_arrays)

    def rows(points: Sequence[Iterable[tuple[LiveBuffer, int]]]) -> list[dict[LiveBuffer, int]]:
        """Return the component's buffers at every point, then its buffers in host memory at each of `host_rows`."""
        here = [[(buffer, n) for buffer, n in point if is_here(buffer)] for point in points]
        on_device = [{buffer: n for buffer, n in point if not buffer.array.is_on_host} for point in here]
        return on_device + [dict(on_host(here[i])) for i in program.host_rows]

    of_default = rows(program.points)
    for row in of_default[: len(program.points)]:
        for buffer in stored_here:
            row[buffer] = row.get(buffer, 0) + 1
    by_option = [rows([buffers.items() for buffers in option.buffers]) for option in program.options]
    buffers = list(dict.fromkeys(buffer for each in (of_default, *by_option) for row in each for buffer in row))
    counts = [_count_table(each, buffers) for each in (of_default, *by_option)]
    return ComponentCost(
        component,
        open_axes,
        tuple(tasks),
        _task_groups(tasks, open_axes),
        tables[0],
        tables[1:],
        tuple(buffers),
        _buffer_groups(buffers, open_axes, program.is_stored),
        sum(buffer.array.elements * buffer.array.itemsize for buffer in stored_here) / program.devices,
        counts[0],
        np.array(counts[1:]).reshape(len(counts) - 1, *counts[0].shape),
        frozenset(names for task in tasks for names in _meeting_axes(task)),
        frozenset(frozenset(array.logical_axes) for array in step.parameters if belongs(array)),
    )


def _count_tasks(program: ProgramCosts, tasks: Iterable[Task]) -> Counter[tuple[int, Task]]:
    """Return (row of `ComponentCost.numbers`, task) -> number of such tasks."""
    counted: Counter[tuple[int, Task]] = Counter()
    for task in tasks:
        window = copy_window(task)
        counted[0 if window is None else 1 + program.windows.index(window), task.cost_key] += 1
    return counted


def _count_option(program: ProgramCosts, option: Option) -> Counter[tuple[int, Task]]:
    """Return (row of `ComponentCost.numbers`, task) -> number of such tasks that an option adds."""
    counted: Counter[tuple[int, Task]] = Counter()
    for task, number in option.added:
        counted[0, task] += number
    for task, number in option.removed:
        counted[0, task] -= number
    for copy in option.copies:
        counted[1 + copy.window, copy.task] += copy.number
    return counted


def _table(counted: Counter[tuple[int, Task]], tasks: Sequence[Task], rows: int) -> np.ndarray:
    """Return a table of task counts, [row, task]."""
    columns = {task: i for i, task in enumerate(tasks)}
    table = np.zeros((rows, len(tasks)))
    for (row, task), number in counted.items():
        if task in columns:
            table[row, columns[task]] += number
    return table


def _count_table(rows: Sequence[Mapping[LiveBuffer, int]], buffers: Sequence[LiveBuffer]) -> np.ndarray:
    """Return a table of the count of each buffer in each row, [row, buffer]."""
    columns = {buffer: i for i, buffer in enumerate(buffers)}
    table = np.zeros((len(rows), len(buffers)))
    for i, row in enumerate(rows):
        for buffer, number in row.items():
            table[i, columns[buffer]] = number
    return table


def _task_groups(tasks: Sequence[Task], open_axes: Sequence[str]) -> tuple[TaskGroup, ...]:
    """Return the groups of tasks whose costs depend on the same choices."""
    groups: defaultdict[tuple[tuple[int, ...], tuple[int, ...], bool], list[int]] = defaultdict(list)
    for i, task in enumerate(tasks):
        arrays = (*task.operands, *task.results)
        methods = {"attends": task.kind in ATTENTION, "routes": task.kind == TaskKind.EXPERTS}
        compute = _key_indices(arrays, open_axes, stored=False, **methods)
        full = _key_indices(arrays, open_axes, stored=depends_on_params(task), **methods)
        groups[compute, full, task.kind in SEEING_MESH].append(i)
    return tuple(
        TaskGroup(np.array(indices), _axes_of_key(compute, open_axes), sees_mesh, _cache_key(compute), _cache_key(full))
        for (compute, full, sees_mesh), indices in groups.items()
    )


def _buffer_groups(
    buffers: Sequence[LiveBuffer], open_axes: Sequence[str], is_stored: Callable[[TracedArray], bool]
) -> tuple[BufferGroup, ...]:
    """Return the groups of buffers whose sizes depend on the same choices."""
    groups: defaultdict[tuple[tuple[int, ...], bool], list[int]] = defaultdict(list)
    for i, buffer in enumerate(buffers):
        arrays, role = (buffer.array, *buffer.related_arrays), ROLES[buffer.role]
        stored = buffer.is_read_by_grouped_matmuls or role.depends_on_storage or any(map(is_stored, arrays))
        methods = {"attends": role.depends_on_attention, "routes": role.depends_on_experts}
        groups[_key_indices(arrays, open_axes, stored=stored, **methods), stored].append(i)
    return tuple(
        BufferGroup(np.array(indices), _axes_of_key(key, open_axes), _cache_key(key), stored)
        for (key, stored), indices in groups.items()
    )


def _key_indices(
    arrays: Sequence[TracedArray], open_axes: Sequence[str], *, stored: bool, attends: bool, routes: bool
) -> tuple[int, ...]:
    """Return the indices, in `ComponentCost.all_choices`, of the choices that a cost depends on."""
    names = axis_names(arrays)
    # the methods of attention and of experts come before the axes
    computed = [2 + i for i, axis in enumerate(open_axes) if axis in names]
    in_params = [len(open_axes) + i for i in computed] if stored else []
    return tuple([0] * attends + [1] * routes + computed + in_params)


def _axes_of_key(indices: tuple[int, ...], open_axes: Sequence[str]) -> tuple[str, ...]:
    """Return the logical axes that a cost depends on, given their indices in `ComponentCost.all_choices`."""
    return tuple(axis for i, axis in enumerate(open_axes) if 2 + i in indices)


def _cache_key(indices: tuple[int, ...]) -> CacheKey:
    return itemgetter(*indices) if indices else lambda _: None


def on_host(buffers: Iterable[tuple[LiveBuffer, int]]) -> Iterator[tuple[LiveBuffer, int]]:
    """Yield the buffers of a point that are in host memory.

    >>> kept, moved = (LiveBuffer(BufferRole.LIVE, TracedArray((), 2, is_on_host=each)) for each in (False, True))
    >>> [count for _, count in on_host([(kept, 12), (moved, 3)])]
    [3]
    """
    return ((buffer, n) for buffer, n in buffers if buffer.array.is_on_host)


def _meeting_axes(task: Task) -> Iterator[frozenset[str]]:
    """Yield sets of logical axes that may not use the same mesh axis: the axes of one array, or of a matmul."""
    yield from (frozenset(array.logical_axes) for array in (*task.operands, *task.results))
    yield frozenset(task.results[0].logical_axes) | {name for name, _ in task.contracted if isinstance(name, str)}


def axis_names(arrays: Iterable[TracedArray]) -> set[str]:
    """Return the logical axes of arrays.

    >>> weight = TracedArray(((("embed", 768),), (("heads", 12), ("head_size", 64))), itemsize=2)
    >>> sorted(axis_names([weight]))
    ['embed', 'head_size', 'heads']
    """
    return {name for array in arrays for name in array.logical_axes}
