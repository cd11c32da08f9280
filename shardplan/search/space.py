"""The search space: meshes, and the mesh axes to which each logical axis may be mapped.

It holds every factorisation of the devices into (replica, data, model) and, for each of these meshes, the choices in
`shardplan.hardware.mesh_axes`:

- batch: `replica`, `data`, both or none;
- positions: those of `replica` and `data` that the batch does not use; in training on TPUs only for Native Sparse
  Attention;
- experts that tokens are routed to, and their hidden states, compute sharding: any of the mesh axes;
- every other logical axis of computations, compute sharding: `model`, `model` and `replica`, or none; beside experts,
  none for axes of small parameters;
- stored parameters, any logical axis: the mesh axes of the compute sharding, then those of `data` and `replica` that
  the batch or positions use, or a part of them.

No array has a mesh axis twice. Every mesh axis of several devices shards some computation: along another one, devices
would repeat the same work; such plans are in the space only where nothing else fits (`Space.allows_idle`). Unsharded in
the compute sharding are the residual axis, axes that layers are stacked along, axes that attention sums over, and axes
that a token chooses parameters by (experts). The user's pins and forbidden mappings override these choices.
"""

import itertools
import math
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import product

import numpy as np

from shardplan.cost.calibration import Calibration
from shardplan.cost.matmul import local_matmul
from shardplan.cost.roofline import seconds_beside
from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.cost.sparse.kernels import kernel_obstacle
from shardplan.cost.sparse.transfers import can_shard_positions
from shardplan.errors import ConfigError
from shardplan.experts.method import ExpertMethod, ExpertStrategy
from shardplan.hardware import Slice, divisors
from shardplan.hardware.mesh_axes import MESH_AXES, POSITION_CHOICES, SLICE_AXES
from shardplan.plan.attention_plan import AttentionPlan, KernelName, Strategy
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, mesh_size
from shardplan.plan.pins import Rules
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.layer_flops import CopyWindow, copy_window
from shardplan.program.live_buffers import ProgramPoint
from shardplan.program.marked.block_attention_kind import BlockAttentionKind
from shardplan.program.named_arrays import MajorAxes
from shardplan.program.tasks import Step, Task, TaskKind
from shardplan.program.variants.kept_activations import KeptActivations, Option
from shardplan.search.components.component_cost import ComponentCost, ProgramCosts, axis_names, component_cost, on_host
from shardplan.search.components.compute_sharding import (
    METHODS,
    UNSHARDED,
    AttentionMethod,
    KindMethods,
    sparse_methods,
)
from shardplan.search.components.keeping import Keeping
from shardplan.search.components.shared_costs import SharedCosts

MINOR_PART = 0.01
"""Fraction of a model's parameter bytes below which an axis's parameters count as small."""

MAX_KERNEL_WAIT = 0.5
"""Tokens are gathered all at once, rather than in chunks, if more than this fraction of their transfers is exposed:
kernels for chunks then take longer than overlap gains."""


@dataclass(frozen=True)
class Space:
    """All plans for one step on one slice, with lower bounds on their time and memory."""

    step: Step
    batch: str
    """Logical axis of the sequences of a step."""
    position: str
    """Logical axis of the tokens of a sequence."""
    residual: str
    """Logical axis of the residual stream."""
    hardware: Slice
    calibration: Calibration
    quirks: CompilerQuirks
    available_bytes: float
    """Bytes per device that a plan may use."""
    rules: Rules
    """The user's pins and prohibitions."""
    host_available_bytes: float = math.inf
    """Bytes of host memory that a plan may use per device."""
    logit_blocks: int = 1
    """Number of blocks of positions whose logits are in memory one after the other."""
    position_choices: tuple[MeshAxes, ...] = POSITION_CHOICES
    """Mesh axes to which positions may be mapped, unless they are pinned."""
    requires_kernel: bool = True
    """Whether the space holds only plans under which a kernel can run attention."""
    allows_idle: bool = False
    """Whether the space includes plans in which devices along a mesh axis repeat the same work."""
    methods: tuple[AttentionMethod, ...] = METHODS
    """Attention methods for sharded positions; if empty, Levanter's own attention, which gathers keys and values."""
    kept: KeptActivations | None = None
    """Options for activations, relative to the step under the default policy; None if the policy is given."""

    @cached_property
    def points(self) -> tuple[ProgramPoint, ...]:
        """The live buffers at every point of the program."""
        return self.step.points if self.kept is None else self.kept.points

    @cached_property
    def options(self) -> tuple[Option, ...]:
        """The options of all activations, one activation after the other."""
        return () if self.kept is None else tuple(itertools.chain(*self.kept.activations))

    @cached_property
    def keeping(self) -> Keeping:
        """The combinations of `options`, and the matmuls that hide host copies."""
        loops, flops = tuple(zip(*self.copy_windows, strict=True)) or ((), ())
        saved = [option.saved_flops for option in self.options]
        beside = seconds_beside(1.0, self.hardware, self.calibration)
        return Keeping.of(
            () if self.kept is None else tuple(map(len, self.kept.activations)),
            loops,
            beside * np.array(flops, float),
            beside * np.array(saved, float).reshape(len(saved), len(flops)),
            np.array([bool(option.copies) for option in self.options], bool),
        )

    @cached_property
    def copy_windows(self) -> tuple[CopyWindow, ...]:
        """Windows behind which host copies can hide; windows of one loop are adjacent, the shortest first."""
        if self.kept is not None:
            return self.kept.windows
        windows = {copy_window(task) for task in self.step.tasks}
        return tuple(sorted(window for window in windows if window is not None))

    @cached_property
    def host_rows(self) -> tuple[int, ...]:
        """Points of the program with buffers in host memory; of several points with equal buffers, only the first."""
        rows: dict[object, int] = {}
        for i, point in enumerate(self.points):
            by_option = [option.buffers[i].items() for option in self.options]
            parts = tuple(frozenset(on_host(each)) for each in (point, *by_option))
            if any(parts):
                rows.setdefault(parts, i)
        return tuple(rows.values())

    @cached_property
    def limits(self) -> np.ndarray:
        """Bytes that a plan may use at every point of the program, and then in host memory at each of `host_rows`."""
        return self._limits(self.available_bytes, self.host_available_bytes)

    def device_limits(self, available_bytes: float) -> np.ndarray:
        """Return `limits` for devices with `available_bytes`, without a limit of host memory."""
        return self._limits(available_bytes, math.inf)

    def _limits(self, device_bytes: float, host_bytes: float) -> np.ndarray:
        return np.repeat([device_bytes, host_bytes], [len(self.points), len(self.host_rows)])

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Size of every logical axis of parameters, batch and positions.

        Parameters decide the size, because a reshape may later leave only a part of an axis. If an axis has several
        sizes in parameters (an MLP beside shared experts), the result is their greatest common divisor. The first
        operand decides for axes that no parameter has.
        """
        sizes: dict[str, int] = {}
        for name, size in (factor for array in self.step.parameters for factor in array.factors):
            if isinstance(name, str):
                sizes[name] = math.gcd(sizes.get(name, 0), size)
        operands = (array for task in self.step.tasks for array in task.operands)
        for name, size in (factor for array in operands for factor in array.factors):
            if isinstance(name, str):
                sizes.setdefault(name, size)
        return sizes

    @cached_property
    def tensor_axes(self) -> tuple[str, ...]:
        """Logical axes of parameters that occur in computations, except batch, positions and the residual axis."""
        known = {name for array in self.step.parameters for name in array.logical_axes}
        others = (self.batch, self.position, self.residual)
        return tuple(name for name in self.sizes if name in self.step.computed_axes & known and name not in others)

    @cached_property
    def unsharded_axes(self) -> frozenset[str]:
        """Logical axes that the compute sharding leaves unsharded."""
        return (
            self.step.expert_axes
            | self.step.resized_axes
            | {attention.head_size for attention in self.step.attention_axes}
            | {block.embed for block in self.step.expert_blocks}
            | self.step.sparse_axes
            | self._channels_of_blocks
        )

    @cached_property
    def _channels_of_blocks(self) -> frozenset[str]:
        """Logical axes of channels and of selected blocks, which must be unsharded in `attend_to_blocks`."""
        operands = (array for task in self.step.tasks if task.blocks is not None for array in task.operands)
        return frozenset(name for array in operands for name, _ in array.dims[-1] if isinstance(name, str))

    @cached_property
    def block_kinds(self) -> tuple[BlockAttentionKind, ...]:
        """The kinds of calls of `attend_to_blocks`."""
        return tuple(dict.fromkeys(task.blocks for task in self.step.tasks if task.blocks is not None))

    @cached_property
    def minor_axes(self) -> frozenset[str]:
        """Logical axes whose parameters together have less than `MINOR_PART` of a model's bytes.

        Only models with experts or with Native Sparse Attention have such axes. They stay unsharded unless they are
        pinned, because each would multiply the number of choices and save little memory. Their parameters are sharded
        along other axes.
        """
        if not (self.step.expert_blocks or self.step.sparse_tasks):
            return frozenset()
        sizes = Counter[str]()
        total = 0
        for array in self.step.parameters:
            size = array.elements * array.itemsize
            total += size
            sizes.update(dict.fromkeys(array.logical_axes, size))
        return frozenset(axis for axis in self.tensor_axes if sizes[axis] < MINOR_PART * total)

    @cached_property
    def block_axes(self) -> frozenset[str]:
        """Logical axes of experts and their hidden states, which any mesh axis can shard in computations."""
        return frozenset(axis for block in self.step.expert_blocks for axis in (block.experts, block.mlp))

    def expert_strategies(self, token_axes: Container[str], expert_axes: MeshAxes) -> tuple[ExpertStrategy, ...]:
        """Return the possible strategies of experts.

        Args:
            token_axes: mesh axes that shard tokens.
            expert_axes: mesh axes that shard experts in computations; without any, devices have all experts.
        """
        can_exchange = bool(expert_axes) and all(axis in token_axes for axis in expert_axes)
        # XLA has no ragged all-to-all for CPUs
        exchange = (ExpertStrategy.EXCHANGE_TOKENS,) if can_exchange and not self.hardware.is_cpu else ()
        return (ExpertStrategy.GATHER_TOKENS, *exchange)

    @cached_property
    def components(self) -> tuple[tuple[str, ...], ...]:
        """Connected components of `tensor_axes`; two axes are connected if they occur in the same task."""
        groups: list[set[str]] = [{axis} for axis in self.tensor_axes]
        for task in self.step.tasks:
            names = axis_names((*task.operands, *task.results)) & set(self.tensor_axes)
            touched = [group for group in groups if group & names]
            if len(touched) > 1:
                groups = [group for group in groups if not group & names] + [set().union(*touched)]
        return tuple(tuple(axis for axis in self.tensor_axes if axis in group) for group in groups)

    @cached_property
    def component_costs(self) -> tuple["ComponentCost", ...]:
        """Tasks and buffers that depend on each of `components`."""
        return tuple(component_cost(self._program_costs, component) for component in self.components)

    @cached_property
    def component_chooses_method(self) -> bool:
        """Whether one component contains all attention, so that it can choose the attention method by itself."""
        attending = [component for component in self.component_costs if component.has_attention]
        return len(attending) == 1 and not self.base_cost.has_attention

    @cached_property
    def base_cost(self) -> "ComponentCost":
        """Tasks and buffers that depend on no component."""
        return component_cost(self._program_costs, ())

    @cached_property
    def _program_costs(self) -> ProgramCosts:
        return ProgramCosts(
            self.step, self.points, self.options, self.host_rows, self.copy_windows, frozenset(self.tensor_axes),
            self.residual, self.hardware.devices, self.assignment({}, {}, {}).is_stored_like_a_parameter,
        )  # fmt: skip

    @cached_property
    def shared_costs(self) -> SharedCosts:
        """Costs of components that several meshes share."""
        return SharedCosts()

    @cached_property
    def min_stored_bytes(self) -> float:
        """Bytes per device of the parameters and optimizer state of all components, sharded over all devices."""
        return sum(cost.min_stored_bytes for cost in self.component_costs)

    def compute_limits(self, limits: np.ndarray) -> np.ndarray:
        """Return the part of `limits` that remains for buffers whose sizes the compute mapping determines.

        All other buffers take at least the bytes of parameters and optimizer state, sharded over all devices. There is
        no limit at a row where several options remove the same buffer, because the search then counts it as negative
        bytes.
        """
        costs = (self.base_cost, *self.component_costs)
        stored = self._limits(sum(cost.param_bytes for cost in costs) / self.hardware.devices, 0.0)
        is_open = np.any([cost.has_negative_counts(self.keeping) for cost in costs], axis=0)
        return np.where(is_open, math.inf, limits - stored)

    @cached_property
    def min_matmul_seconds(self) -> float:
        """Seconds of all unbatched matmuls on a single device, if each filled the matrix unit.

        Recomputed matmuls that an option can remove do not count.
        """
        unsharded = self.assignment({}, {}, {})

        def flops_of(tasks: Iterable[tuple[Task, int]]) -> float:
            plain = ((task, n) for task, n in tasks if task.kind == TaskKind.CONTRACTION and not task.batched)
            return sum(n * local_matmul(task, unsharded).flops for task, n in plain)

        flops = flops_of((task, 1) for task in self.step.tasks)
        for options in () if self.kept is None else self.kept.activations:
            flops -= max(0.0, *(flops_of(option.removed) - flops_of(option.added) for option in options))
        return self.calibration.products * flops / self.hardware.generation.flops

    @cached_property
    def sparse_obstacles(self) -> list[str]:
        """Reasons why kernels cannot compute kinds of Native Sparse Attention."""
        configs = [kind.sparse for kind in self.step.attention_kinds if kind.sparse is not None]
        obstacles = (kernel_obstacle(config, self.quirks) for config in configs)
        return [obstacle for obstacle in obstacles if obstacle is not None]

    @cached_property
    def gathers_once(self) -> bool:
        """Whether a step gathers every parameter at most once; no training step does."""
        uses = Counter(
            weight
            for task in self.step.tasks
            if task.kind == TaskKind.CONTRACTION
            for weight in task.first_used_weights
        )
        return max(uses.values(), default=0) <= 1

    def assignment(
        self,
        mesh: dict[str, int],
        compute: AxisMapping,
        params: AxisMapping,
        methods: KindMethods | None = None,
        shard_counts: dict[MajorAxes, int] | None = None,
        experts: ExpertStrategy | None = None,
    ) -> ShardingAssignment:
        """Return the sharding under a mesh, both mappings, and methods of attention and experts.

        Args:
            shard_counts: the counts of an assignment with the same mesh and compute mapping, if there is one.
        """
        attention = AttentionPlan()
        if methods is not None:
            names = tuple(kind.name for kind in self.step.attention_kinds)
            position_axes = compute.get(self.position, ())
            attention = _attention_plan(names, methods, tuple(mesh[axis] for axis in position_axes))
        step = self.step
        return ShardingAssignment(
            mesh, compute, params, step.merged_axes, step.activation_axes, self.quirks, attention,
            self._expert_method(experts),
            shard_counts={} if shard_counts is None else shard_counts,
        )  # fmt: skip

    def _expert_method(self, strategy: ExpertStrategy | None) -> ExpertMethod:
        """Return the method for a strategy, in chunks only if the compiler overlaps their transfers."""
        method = ExpertMethod() if strategy is None else ExpertMethod(strategy)
        return replace(method, token_chunks=1) if self.calibration.kernel_wait > MAX_KERNEL_WAIT else method

    def methods_for(self, mesh: MeshShape, position_axes: MeshAxes) -> list[KindMethods | None]:
        """Return the possible methods of each kind of attention if `position_axes` shard the positions.

        If positions are unsharded, the only method is None, Levanter's own attention. Over several mesh axes, the only
        strategy is the hybrid, with Ulysses on the last axis and the ring on the others; keys are gathered over several
        mesh axes only if a pin or the step excludes the hybrid. The result is empty if a block of `attend_to_blocks`
        would be on two devices.
        """
        length, devices = self.sizes[self.position], mesh_size(mesh, position_axes)
        if devices > 1 and not all(
            can_shard_positions(kind, length, devices, kind.layout) for kind in self.block_kinds
        ):
            return []
        if any(kind.sparse for kind in self.step.attention_kinds):
            return self._methods_with_sparse(mesh, position_axes)
        if not position_axes or not self.methods:
            return [None]
        strategies = {method.strategy for method in self.methods}
        # over several mesh axes the other strategies are those over one axis of the product of the sizes (docs/log.md)
        if len(position_axes) == 1:
            possible = strategies - {Strategy.HYBRID}
        else:
            possible = strategies & {Strategy.HYBRID} or strategies & {Strategy.ALL_GATHER}
        kinds = self.step.attention_kinds
        result: list[KindMethods | None] = []
        for order in self._orders(mesh, position_axes):
            methods = [each for each in self.methods if each.strategy in possible and each.order == order]
            result.extend(product(methods, repeat=len(kinds)))
        return result

    def _orders(self, mesh: MeshShape, position_axes: MeshAxes) -> list[SequenceOrder]:
        """Return the orders to try for sharded positions: contiguous, and also zigzag if that suits the model."""
        # zigzag gives every device a part of both halves of the sequence
        is_even = self.sizes[self.position] % (2 * mesh_size(mesh, position_axes)) == 0
        kinds = self.step.attention_kinds
        has_full_attention = any(kind.pattern.difference_bounds == (None, None) for kind in kinds)
        return [SequenceOrder.CONTIGUOUS, *([SequenceOrder.ZIGZAG] if is_even and has_full_attention else [])]

    def _methods_with_sparse(self, mesh: MeshShape, position_axes: MeshAxes) -> list[KindMethods | None]:
        """Return the methods of each kind of attention, if some kinds are Native Sparse Attention.

        If positions are sharded, other kinds gather keys and values too. The result is empty if every order would
        divide a selection block among devices, or if Levanter's own attention computes the other kinds.
        """
        length, devices = self.sizes[self.position], mesh_size(mesh, position_axes)
        orders = [SequenceOrder.CONTIGUOUS]
        if devices > 1:
            known = {each.order for each in self.methods}
            orders = [order for order in self._orders(mesh, position_axes) if order in known]
        result: list[KindMethods | None] = []
        for order in orders:
            of_kinds = []
            for kind in self.step.attention_kinds:
                if kind.sparse is None:
                    of_kinds.append([AttentionMethod(Strategy.ALL_GATHER, order)] if devices > 1 else [UNSHARDED])
                elif devices == 1 or can_shard_positions(kind.sparse, length, devices, order):
                    has_kernel = kernel_obstacle(kind.sparse, self.quirks) is None
                    of_kinds.append(sparse_methods(devices > 1, order, has_kernel))
                else:
                    of_kinds.append([])
            result.extend(product(*of_kinds))
        return result


@lru_cache(maxsize=1024)
def _attention_plan(kinds: tuple[str, ...], methods: KindMethods, sizes: tuple[int, ...]) -> AttentionPlan:
    """Return the attention plan with a method for each kind, over mesh axes of `sizes` that shard positions."""
    plans = {}
    for kind, method in zip(kinds, methods, strict=True):
        ulysses = sizes[-1] if method.strategy in (Strategy.ULYSSES, Strategy.HYBRID) else 1
        kernel = method.sparse_kernel or KernelName.BLOCKWISE
        plans[kind] = AttentionPlan(method.strategy, ulysses, math.prod(sizes) // ulysses, method.order, kernel)
    return AttentionPlan.of_kinds(plans)


def mesh_shapes(hardware: Slice, pinned: dict[str, int | None]) -> list[dict[str, int]]:
    """Return every mesh with the pinned sizes whose product is the number of devices.

    >>> from shardplan.hardware import parse_slice
    >>> [tuple(shape.values()) for shape in mesh_shapes(parse_slice("v5e-4"), {"replica": 1})]
    [(1, 1, 4), (1, 2, 2), (1, 4, 1)]

    Raises:
        ConfigError: no such mesh exists, or in every such mesh an axis that must not spans several slices.
    """
    n = hardware.devices
    fixed = {axis: size for axis, size in pinned.items() if size is not None}
    keys = " x ".join(f"mesh.{axis} {size}" for axis, size in fixed.items())
    shapes = list(_shapes(MESH_AXES, n))
    kept = [shape for shape in shapes if all(shape[axis] == size for axis, size in fixed.items())]
    if kept and hardware.slices > 1:
        across = [shape for shape in kept if mesh_size(shape, SLICE_AXES) % hardware.slices == 0]
        if not across:
            crossing, others = " x ".join(SLICE_AXES), [axis for axis in MESH_AXES if axis not in SLICE_AXES]
            raise ConfigError(
                f"{keys}: with {crossing} = {mesh_size(kept[0], SLICE_AXES)}, mesh axis {' or '.join(others)} would "
                f"span several of the {hardware.slices} slices of {hardware.name}; {crossing} must be a multiple of "
                f"{hardware.slices}"
            )
        return across
    if not kept:
        total = math.prod(fixed.values())
        problem = "does not divide" if n % total or len(fixed) < len(MESH_AXES) else "is not all of"
        raise ConfigError(
            f"{keys} {problem} the {n} devices of {hardware.name}; {' x '.join(MESH_AXES)} must be {n}, "
            f"each one of {', '.join(map(str, divisors(n)))}"
        )
    return kept


def _shapes(axes: Sequence[str], devices: int) -> Iterator[dict[str, int]]:
    """Yield every mesh of `axes` over a number of devices."""
    first, *others = axes
    if not others:
        yield {first: devices}
        return
    for size in divisors(devices):
        for rest in _shapes(others, devices // size):
            yield {first: size, **rest}
