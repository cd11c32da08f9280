"""What the planner chooses from: meshes, and for each what logical axes can be mapped to, and what depends on it.

All factorisations of the devices into (replica, data, model); the batch on any of replica and data; but in training,
the positions on one of these that the batch leaves; every other logical axis that is computed with on `model`, with or
without `replica` behind it; parameters rest cut like that, and in addition by `data`, `replica` or
both, along any axis. No array has a mesh axis twice. While computing, the residual stream is not cut by its own axis,
nor are axes that layers are stacked along, those that attention sums over, and those that a token chooses parameters by
(experts). What the user pins or forbids changes that.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter
from typing import Any

import numpy as np

from shardplan.config import MESH_AXES
from shardplan.cost.calibration import Calibration
from shardplan.cost.gspmd import RESTING
from shardplan.cost.matmul import product
from shardplan.cost.memory import ATTENDING, CUT_AS_RESTING, stored_buffers
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.errors import ConfigError
from shardplan.hardware import Slice, divisors
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, mesh_size
from shardplan.plan.pins import Rules
from shardplan.plan.plan import GATHERED, HYBRID, RING, ULYSSES, AttentionPlan
from shardplan.positions.sequence_layout import CONTIGUOUS, ZIGZAG
from shardplan.program.named_arrays import SECOND, Array
from shardplan.program.tasks import LiveBuffer, Step, Task

BATCH_AXES: tuple[MeshAxes, ...] = (("replica", "data"), ("data",), ("replica",), ())
POSITION_AXES: tuple[MeshAxes, ...] = ((), ("replica",), ("data",), ("replica", "data"), ("data", "replica"))
METHODS: tuple[MeshAxes, ...] = (
    (GATHERED, CONTIGUOUS), (GATHERED, ZIGZAG), (RING, CONTIGUOUS), (RING, ZIGZAG), (ULYSSES, CONTIGUOUS),
    (HYBRID, CONTIGUOUS), (HYBRID, ZIGZAG),
)  # fmt: skip
"""Strategies of attention, each with a layout."""
METHOD = "attention"
"""Beside logical axes, mappings while computing have here one of `METHODS`, which are no mesh axes."""
TENSOR_AXES: tuple[MeshAxes, ...] = ((), ("model",), ("model", "replica"))
RESTING_AXES: tuple[MeshAxes, ...] = ((), ("data",), ("replica",), ("replica", "data"))


@dataclass(frozen=True)
class Space:
    """What is planned, and for what."""

    step: Step
    batch: str
    position: str
    residual: str
    """Logical axis of the residual stream."""
    hardware: Slice
    calibration: Calibration
    quirks: CompilerQuirks
    available: float
    """Bytes per device that a plan may use."""
    rules: Rules
    """What the user pins or forbids."""
    positions: tuple[MeshAxes, ...] = POSITION_AXES
    """What positions can be mapped to, where no pin says so."""
    kernels: bool = True
    """Only mappings under which a kernel can do attention."""
    methods: tuple[MeshAxes, ...] = METHODS
    """How attention can be done where positions are cut; without any by Levanter's own, which gathers as well."""

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Logical axis of parameters, of the batch and of positions -> size."""
        arrays = [*self.step.parameters, *(array for task in self.step.tasks for array in task.operands)]
        return {name: size for array in arrays for name, size in array.factors if name and not name.endswith(SECOND)}

    @cached_property
    def tensor(self) -> tuple[str, ...]:
        """Logical axes of parameters that are computed with, but for those of tokens and of the residual stream."""
        known = {name for array in self.step.parameters for name in array.axes}
        others = (self.batch, self.position, self.residual)
        return tuple(name for name in self.sizes if name in self.step.multiplied & known and name not in others)

    @cached_property
    def whole(self) -> frozenset[str]:
        """Logical axes that are not cut while computing."""
        return self.step.routed | self.step.resized | {attention.head_size for attention in self.step.attention}

    @cached_property
    def components(self) -> tuple[tuple[str, ...], ...]:
        """Logical axes of `tensor`, those together that meet in a task."""
        groups: list[set[str]] = [{axis} for axis in self.tensor]
        for task in self.step.tasks:
            met = {name for array in (*task.operands, *task.results) for name in array.axes} & set(self.tensor)
            touched = [group for group in groups if group & met]
            if len(touched) > 1:
                groups = [group for group in groups if not group & met] + [set().union(*touched)]
        return tuple(tuple(axis for axis in self.tensor if axis in group) for group in groups)

    @cached_property
    def component_costs(self) -> tuple["ComponentCost", ...]:
        """What depends on each of `components`."""
        return tuple(_work(self, component) for component in self.components)

    @cached_property
    def least_at_rest(self) -> float:
        """Bytes per device of what rests of the components, cut by all devices."""
        return sum(work.least_bytes for work in self.component_costs)

    @cached_property
    def least_seconds(self) -> float:
        """Time of the products on one device, were they all of matrices that fill its matrix unit."""
        nowhere = self.layout({}, {}, {})
        tasks = (task for task in self.step.tasks if task.kind == "contraction" and not task.batched)
        flops = sum(product(task, nowhere).flops for task in tasks)
        return self.calibration.products * flops / self.hardware.generation.flops

    @cached_property
    def gathers_once(self) -> bool:
        """Whether a step gathers parameters at most once each, as no training step does."""
        uses = Counter(weight for task in self.step.tasks if task.kind == "contraction" for weight in task.fresh)
        return max(uses.values(), default=0) <= 1

    @cached_property
    def base(self) -> "ComponentCost":
        """What depends on none."""
        return _work(self, ())

    def layout(self, mesh: dict[str, int], compute: AxisMapping, params: AxisMapping) -> ShardingAssignment:
        """A point of the space."""
        mapping = {axis: cut for axis, cut in compute.items() if axis != METHOD}
        method = self._attention(mesh, compute)
        step = self.step
        return ShardingAssignment(
            mesh, mapping, params, step.merged, step.activation_axes, self.quirks, method, step.pattern
        )

    def methods_for(self, mesh: MeshShape, cut: MeshAxes) -> list[MeshAxes]:
        """What `METHOD` can be where `cut` cuts positions; nothing for Levanter's own.

        On several mesh axes it is the hybrid, the last for Ulysses and the others for its ring; keys are gathered over
        several only where a pin or the step wants no other way.
        """
        if not cut or not self.methods:
            return [()]
        strategies = {strategy for strategy, _ in self.methods}
        fitting = strategies - {HYBRID} if len(cut) == 1 else strategies & {HYBRID} or strategies & {GATHERED}
        # where all of a window is near, only the order of the sequence leaves out hops
        can_turn = self.step.pattern.window is None and self.sizes[self.position] % (2 * mesh_size(mesh, cut)) == 0
        return [
            (strategy, kind) for strategy, kind in self.methods
            if strategy in fitting and (can_turn or kind == CONTIGUOUS)
        ]  # fmt: skip

    def _attention(self, mesh: MeshShape, compute: AxisMapping) -> AttentionPlan:
        """How attention is done."""
        if not compute.get(METHOD):
            return AttentionPlan()
        strategy, kind = compute[METHOD]
        parts = [mesh[axis] for axis in compute[self.position]]
        ulysses = {ULYSSES: parts[0], HYBRID: parts[-1]}.get(strategy, 1)
        return AttentionPlan(strategy, ulysses, math.prod(parts) // ulysses, kind)


def mesh_shapes(hardware: Slice, pinned: dict[str, int | None]) -> list[dict[str, int]]:
    """Every (replica, data, model) whose product is the number of devices, with the pinned sizes.

    Raises:
        ConfigError: the pinned sizes leave none.
    """
    n = hardware.devices
    fixed = {axis: size for axis, size in pinned.items() if size is not None}
    shapes = [
        {"replica": replica, "data": data, "model": n // replica // data}
        for replica in divisors(n)
        for data in divisors(n // replica)
    ]
    kept = [shape for shape in shapes if all(shape[axis] == size for axis, size in fixed.items())]
    if kept and hardware.slices > 1:
        # only replica and data cross the network between slices
        across = [shape for shape in kept if shape["replica"] * shape["data"] % hardware.slices == 0]
        if not across:
            keys = " x ".join(f"mesh.{axis} {size}" for axis, size in fixed.items())
            raise ConfigError(
                f"{keys}: with replica x data = {kept[0]['replica'] * kept[0]['data']} a part of the model would be on "
                f"several of the {hardware.slices} slices of {hardware.name}; that product must be a multiple of "
                f"{hardware.slices}"
            )
        return across
    if not kept:
        wanted = " x ".join(f"mesh.{axis} {size}" for axis, size in fixed.items())
        product = math.prod(fixed.values())
        problem = "does not divide" if n % product or len(fixed) < len(MESH_AXES) else "is not all of"
        raise ConfigError(
            f"{wanted} {problem} the {n} devices of {hardware.name}; {' x '.join(MESH_AXES)} must be {n}, "
            f"each one of {', '.join(map(str, divisors(n)))}"
        )
    return kept


Pick = Callable[[Sequence[MeshAxes | None]], Any]
"""Takes some of the values, as a key."""


@dataclass(frozen=True)
class ComponentCost:
    """The tasks and the memory that depend on the axes of one component; without axes, on batch and position alone."""

    component: tuple[str, ...]
    axes: tuple[str, ...]
    """Logical axes whose mapping is still open: those of the component, and the residual axis at rest; and `METHOD`."""
    tasks: tuple[tuple[Task, Pick, Pick], ...]
    """With what they depend on of the mappings of `axes` while computing, and of both, these and those at rest."""
    items: tuple[tuple[LiveBuffer, Pick], ...]
    """With what they depend on of both."""
    least_bytes: float
    """Bytes per device of those that rest, cut by all devices."""
    counts: np.ndarray
    """[point, item]: how many of an item there are at a point."""
    computed: frozenset[frozenset[str]]
    """Axes that meet while computing."""
    resting: frozenset[frozenset[str]]
    """Axes that meet in a parameter."""

    @cached_property
    def attends(self) -> bool:
        """Whether attention is among the tasks."""
        return any(task.kind == "attention" for task, *_ in self.tasks)


def _work(space: Space, component: tuple[str, ...]) -> ComponentCost:
    own = set(component)

    def belongs(*arrays: Array) -> bool:
        met = _names(arrays) & set(space.tensor)
        return bool(met & own) or not (own or met)

    step = space.step
    tasks = [task for task in step.tasks if belongs(*task.operands, *task.results)]
    resting = [item for item in stored_buffers(step) if belongs(item.array)]
    points = [
        Counter([*resting, *(item for item in point if belongs(item.array, *item.tables))]) for point in step.points
    ]
    items = list(dict.fromkeys(item for counter in points for item in counter))
    axes = (*component, space.residual, METHOD)
    rests = space.layout({}, {}, {}).rests

    def pick(arrays: Sequence[Array], with_resting: bool, attends: bool) -> Pick:
        names = _names(arrays) | ({METHOD} if attends else set())
        places = [i for i, axis in enumerate(axes) if axis in names]
        resting = [len(axes) + i for i in places if with_resting]
        return itemgetter(*places, *resting) if places else lambda _: None

    def picks(task: Task) -> tuple[Pick, Pick]:
        arrays = (*task.operands, *task.results)
        attends = task.kind == "attention"
        return pick(arrays, False, attends), pick(arrays, task.kind in RESTING, attends)

    def of_item(item: LiveBuffer) -> Pick:
        arrays = (item.array, *item.tables)
        with_resting = item.stays_cut or item.role in CUT_AS_RESTING or any(map(rests, arrays))
        return pick(arrays, with_resting, item.role in ATTENDING)

    counts = np.array([[counter[item] for item in items] for counter in points], float)
    return ComponentCost(
        component,
        axes,
        tuple((task, *picks(task)) for task in tasks),
        tuple((item, of_item(item)) for item in items),
        sum(item.array.elements * item.array.itemsize for item in resting) / space.hardware.devices,
        counts.reshape(len(points), len(items)),
        frozenset(met for task in tasks for met in _meetings(task)),
        frozenset(frozenset(a.axes) for a in step.parameters if belongs(a)),
    )


def _meetings(task: Task) -> Iterator[frozenset[str]]:
    """Logical axes that cannot share a mesh axis: those of an array, and those of a product and what it sums over."""
    yield from (frozenset(array.axes) for array in (*task.operands, *task.results))
    yield frozenset(task.results[0].axes) | {name for name, _ in task.contracted if name}


def _names(arrays: Iterable[Array]) -> set[str]:
    return {name for array in arrays for name in array.axes}
