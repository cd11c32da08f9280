"""Tasks and the traced step: what a step computes, independent of any sharding."""

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import NamedTuple

from shardplan.hardware import CollectiveKind
from shardplan.plan.mapping import MeshAxes
from shardplan.program.live_buffers import ProgramPoint
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.marked.block_attention_kind import BlockAttentionKind
from shardplan.program.marked.expert_kind import ExpertKind
from shardplan.program.named_arrays import Dim, Factor, TracedArray, is_scores, score_length, score_positions
from shardplan.program.task_axes import AttentionAxes, ExpertAxes


class TaskKind(StrEnum):
    """The kinds of tasks, each with its own cost formula."""

    CONTRACTION = "contraction"
    """A matmul outside of attention; with `groups > 1`, a grouped matmul."""
    ATTENTION = "attention"
    """A matmul with both query and key positions."""
    LOOKUP = "lookup"
    """A gather of rows of a table."""
    SCATTER_ADD = "scatter-add"
    """The gradient of a lookup."""
    SELECTION = "selection"
    """The largest elements along a dimension; devices that share the dimension exchange their largest elements."""
    RESHARD = "reshard"
    """A change of sharding at the start or end of a `shard_map`."""
    COLLECTIVE = "collective"
    """A collective over mesh axes that a `shard_map` calls."""
    EXPERTS = "experts"
    """A block of routed experts, or its gradient."""
    SPARSE_ATTENTION = "sparse attention"
    """A call of Native Sparse Attention, or its gradient."""
    BLOCK_ATTENTION = "attention to given blocks"
    """A call of `attend_to_blocks`, or its gradient."""
    CONVERSION = "conversion"
    """The decoding of a weight kept as stored: its codes are gathered, and each device decodes them."""
    HOST_COPY = "host copy"
    """A copy between the memories of a device and of its host."""
    ELEMENTWISE = "elementwise"
    """Everything that is fused into one pass over memory."""


@dataclass(frozen=True)
class Task:
    """One operation on the devices, and how often a step executes it."""

    kind: TaskKind
    operands: tuple[TracedArray, ...]
    results: tuple[TracedArray, ...]
    contracted: Dim
    """Axes that a matmul sums over, or along which a selection selects."""
    batched: Dim
    """Batch axes, which index independent matmuls."""
    groups: int
    """Number of matrices of a grouped matmul; 1 for every other task."""
    executions: int
    """Number of executions per step."""
    first_used_weights: tuple[str, ...]
    """Paths of the parameters that no earlier matmul or change of sharding in the loop's body uses; the task's gather
    of them serves the rest of the body."""
    reduces_partial_sums: bool
    """For a matmul: whether partial sums in its result are added up over devices here, rather than after the results of
    later matmuls are added."""
    routed: frozenset[TracedArray]
    """Operands and results, except a lookup's, that only grouped matmuls consume, directly or through elementwise work;
    they are sharded like stored parameters, because grouped matmuls use parameters in that sharding."""
    is_backward: bool
    """Whether the task belongs to the backward pass, recomputation of the forward pass excluded."""
    collective: CollectiveKind | None
    """For a collective: its kind."""
    mesh_axes: MeshAxes
    """For a collective: its mesh axes."""
    label: str
    """Path of the first parameter among the operands, or else the named scopes of the operation."""
    is_on_parameters: bool = False
    """For elementwise work and host copies: whether all arrays are parameters, copies or gradients of them, which have
    the stored sharding between matmuls."""
    is_move: bool = False
    """For elementwise work: whether the last operation chooses or moves elements without computing any."""
    is_local: bool = False
    """Whether each device computes the task separately, in a `shard_map`; a collective there sums the devices' results
    along the mesh axes that do not shard its result."""
    attention: AttentionKind | None = None
    """For a matmul of attention and a call of Native Sparse Attention: its kind of attention."""
    is_in_gradient_kernels: bool = False
    """For a recomputed attention matmul: whether gradient kernels compute it, because the attention's result is kept
    and only gradients need the matmul."""
    experts: ExpertKind | None = None
    """For a block of routed experts, and for its gradient: its kind."""
    blocks: BlockAttentionKind | None = None
    """For a call of `attend_to_blocks`, and for its gradient: its kind."""
    layer_flops: float = 0.0
    """For a block of routed experts and its gradient: FLOPs of its layer's other matmuls in one execution, over all
    devices. For a host copy in a loop: FLOPs of the matmuls in the loop's body that hide it."""
    has_first_weight: bool = False
    """For a matmul of a training: whether a layer of a loop uses its parameter first (`variants.first_weights`)."""
    loop: int | None = None
    """For a host copy: identifier of the loop whose body contains it (index of the loop's first result); None outside
    of loops. Copies of one loop run one after the other."""

    @property
    def is_to_host(self) -> bool:
        """For a host copy: whether it is to the host."""
        return self.results[0].is_on_host

    @cached_property
    def stored_arrays(self) -> frozenset[TracedArray]:
        """Operands and results that have the parameters' stored sharding."""
        return frozenset((*self.operands, *self.results)) if self.is_on_parameters else self.arrays_of_experts

    @cached_property
    def arrays_of_experts(self) -> frozenset[TracedArray]:
        """Operands and results in the stored sharding of the experts' parameters: these parameters, and `routed`."""
        if self.groups == 1:
            return self.routed
        gradients = self.results if all(array.weight is None for array in self.operands) else ()
        return self.routed.union(gradients, (array for array in self.operands if array.weight is not None))

    @cached_property
    def matmul_extents(self) -> tuple[tuple[float, Dim], ...]:
        """Number of matmuls, and sizes of their inner dimension, rows and columns, each with its axes."""
        (left, right, *_), result = self.operands, self.results[0]
        free = set(result.axes) - {name for name, _ in (*self.batched, *self.contracted)}
        inner: float = math.prod(size for _, size in self.contracted)
        count = math.prod(size for _, size in self.batched)
        if self.groups == 1:
            # a convolution multiplies an element of the first operand several times
            columns = right.elements / (inner * count)
            rows = result.elements / (columns * count)
        else:
            rows = left.elements / (inner * count)
            columns = result.elements / (rows * count)
            if any(name is None for name, _ in self.contracted):
                # a gradient of the matrices: each sums over the rows of its own group
                count, inner, columns = self.groups, inner / self.groups, columns / self.groups
        row_axes, column_axes = (
            tuple(factor for factor in array.factors if factor[0] in free) for array in (left, right)
        )
        return (count, self.batched), (inner, self.contracted), (rows, row_axes), (columns, column_axes)

    @cached_property
    def head_axis(self) -> Factor | None:
        """For a matmul: the head size of its weight, if that has its heads before its last axis; else None.

        Such a weight is stored as {kv_head, head_size, embed}, for example: either the embedding or all axes of heads
        are contracted, and the columns (or rows) of one head are together in memory, those of several are not.
        """
        weights = [array for array in self.operands if array.weight is not None]
        if len(weights) != 1 or self.groups > 1:
            return None
        factors = [factor for factor in weights[0].factors if factor[1] > 1 and factor not in self.batched]
        if len(factors) < 3:
            return None
        *heads, last = (factor in self.contracted for factor in factors)
        return factors[-2] if all(head != last for head in heads) else None

    @property
    def flops(self) -> float:
        """For a matmul: FLOPs of one execution over all devices, masked scores excluded."""
        flops = 2 * math.prod(size for size, _ in self.matmul_extents)
        if self.attention is None:
            return flops
        return self.attention.pattern.density(score_length(self.scores)) * flops

    @cached_property
    def cost_key(self) -> "Task":
        """The task without its label and without paths of parameters; tasks of equal cost have equal keys."""
        weights = dict.fromkeys(array.weight for array in (*self.operands, *self.results) if array.weight is not None)
        numbers = {weight: str(number) for number, weight in enumerate(weights)}

        def renamed(arrays: tuple[TracedArray, ...]) -> tuple[TracedArray, ...]:
            return tuple(each if each.weight is None else replace(each, weight=numbers[each.weight]) for each in arrays)

        first_used = tuple(map(numbers.__getitem__, self.first_used_weights))
        operands = renamed(self.operands)
        return replace(self, operands=operands, results=renamed(self.results), first_used_weights=first_used, label="")

    @cached_property
    def moved_arrays(self) -> tuple[TracedArray, ...]:
        """Operands and results that are read from or written to memory: all but scores."""
        return tuple(array for array in (*self.operands, *self.results) if not is_scores(array))

    @cached_property
    def scores(self) -> TracedArray:
        """For attention: the scores that the matmul computes or reads."""
        return next(filter(is_scores, (*self.operands, *self.results)))

    @cached_property
    def keys(self) -> TracedArray:
        """For attention: the keys or values, or the gradient of either, that the matmul reads or computes."""
        arrays = self.results if self.computes_kv_gradients else self.operands
        return [array for array in arrays if not is_scores(array)][-1]

    @cached_property
    def axes_of_one_operand(self) -> frozenset[str]:
        """For attention: all logical axes except the axes that keys and scores share; positions are included.

        Levanter's kernel requires all of them unsharded.
        """
        shared = {name for name in self.keys.axes if name in self.scores.axes} - score_positions(self.scores)
        names = {name for array in (*self.operands, *self.results) for name in array.logical_axes}
        return frozenset(names - shared)

    @cached_property
    def is_sparse_gradient(self) -> bool:
        """For Native Sparse Attention and attention to given blocks: whether the task computes the gradient."""
        return len(self.results) > (3 if self.blocks is None else 1)

    @property
    def sparse_queries(self) -> TracedArray:
        """For Native Sparse Attention and attention to given blocks: the queries.

        Their dimensions are {batch, position, groups, heads of a group, channels}.
        """
        return self.operands[1 if self.is_sparse_gradient else 0]

    @property
    def computes_kv_gradients(self) -> bool:
        """For attention: whether the result is a gradient of keys or values, and so sums over queries."""
        return sums_over_queries(self.contracted, self.results[0])


def sums_over_queries(contracted: Dim, result: TracedArray) -> bool:
    """Return whether an attention matmul sums over queries for every key position, as key gradients do."""
    return any(name in result.axes for name, _ in contracted)


class PointLabel(NamedTuple):
    """Describes the operation that runs at a point of the program, for people to read."""

    text: str
    """The label of the task."""
    executions: int
    """Executions per step."""


@dataclass(frozen=True)
class Step:
    """A traced step, prepared for planning."""

    tasks: tuple[Task, ...]
    points: tuple[ProgramPoint, ...]
    merged_axes: dict[str, Dim]
    """Logical axis -> the axes into which other parts of the program split it."""
    unnamed: dict[str, int]
    """Primitive -> number of its results that could not be named."""
    resized_axes: frozenset[str] = frozenset()
    """Logical axes along which slices are taken."""
    stacked_axes: frozenset[str] = frozenset()
    """Logical axes that a loop slices, one index per iteration, such as the axis of stacked layers."""
    approximations: dict[str, int] = field(default_factory=dict)
    """Note on an assumed cost, for work that the jaxpr does not determine -> number of occurrences."""
    unpriced: dict[str, int] = field(default_factory=dict)
    """Primitive without a rule, counted as elementwise work by its bytes -> number of occurrences."""
    parameters: tuple[TracedArray, ...] = ()
    """The parameters, in their stored dtype."""
    state: tuple[TracedArray, ...] = ()
    """Arrays stored besides the parameters, such as an optimizer's moments."""
    activation_axes: tuple[str, ...] = ()
    """The logical axes of tokens: batch and position."""
    vocab: str = ""
    """The logical axis of logits."""
    point_labels: tuple[PointLabel, ...] = ()
    """The operation that runs at each point, for people to read."""
    attention_calls: tuple[AttentionKind, ...] = ()
    """The kind of each call of attention in the forward pass, in the order of the program."""

    @cached_property
    def has_gradients(self) -> bool:
        """Whether the step computes gradients."""
        return any(task.is_backward for task in self.tasks)

    @cached_property
    def weight_matmuls(self) -> tuple[tuple[Task, TracedArray], ...]:
        """Matmuls with a parameter, each paired with the parameter."""
        pairs = []
        for task in self.tasks:
            if task.kind == TaskKind.CONTRACTION:
                pairs += [(task, array) for array in task.operands if array.weight is not None]
        return tuple(pairs)

    @cached_property
    def used_weights(self) -> tuple[TracedArray, ...]:
        """Parameters that matmuls use, including matmuls within a `shard_map`."""
        used = []
        for task in self.tasks:
            if task.kind in (TaskKind.CONTRACTION, TaskKind.RESHARD, TaskKind.CONVERSION):
                used += [array for array in task.operands if array.weight is not None]
        return tuple(used)

    @cached_property
    def computed_axes(self) -> frozenset[str]:
        """Logical axes of the tasks' arrays, except the axes along which layers are stacked."""
        names = set[str]()
        for task in self.tasks:
            for array in (*task.operands, *task.results):
                names.update(array.logical_axes)
        return frozenset(names - self.stacked_axes)

    @cached_property
    def expert_axes(self) -> frozenset[str]:
        """Logical axes of parameters that index experts, among which tokens are routed."""
        names = set[str]()
        for task, array in self.weight_matmuls:
            if task.groups == 1:
                continue
            # a grouped matmul takes one matrix per group, and its result has no axis of groups
            for name, size in array.factors:
                if isinstance(name, str) and size == task.groups and name not in task.results[0].axes:
                    names.add(name)
        return frozenset(names)

    @property
    def has_experts(self) -> bool:
        """Whether tokens are routed to experts, in shardplan's blocks or Levanter's."""
        return bool(self.expert_axes or self.expert_blocks)

    @cached_property
    def expert_blocks(self) -> tuple[ExpertAxes, ...]:
        """The axes of each kind of block of routed experts."""
        blocks = []
        for task in self.tasks:
            if task.experts is not None:
                # numbers of kept weights are each device's own
                weights = (array for array in task.operands if array.weight is not None or array.is_local)
                matrices = (array for array in weights if len(array.dims) == 3)
                blocks.append(ExpertAxes(*map(str, next(matrices).majors)))
        return tuple(dict.fromkeys(blocks))

    @cached_property
    def sparse_tasks(self) -> tuple[Task, ...]:
        """The calls of Native Sparse Attention, and their gradients."""
        return tuple(task for task in self.tasks if task.kind == TaskKind.SPARSE_ATTENTION)

    @cached_property
    def sparse_axes(self) -> frozenset[str]:
        """Logical axes that Native Sparse Attention needs unsharded: all but batch, positions and groups."""
        names = set[str]()
        for task in self.sparse_tasks:
            *sharded, _, _ = task.sparse_queries.majors
            names |= {name for array in task.operands for name in array.logical_axes} - {*sharded}
        return frozenset(names)

    @cached_property
    def has_attention(self) -> bool:
        """Whether any attention of the step is computed by matmuls."""
        return any(task.kind == TaskKind.ATTENTION for task in self.tasks)

    @cached_property
    def copies_to_hosts(self) -> bool:
        """Whether activations are copied to host memory and back."""
        return any(task.kind == TaskKind.HOST_COPY for task in self.tasks)

    @cached_property
    def score_elements(self) -> Mapping[AttentionKind, int]:
        """Kind of attention -> number of scores that its matmuls compute or read, masked ones included."""
        elements: defaultdict[AttentionKind, int] = defaultdict(int)
        for task in self.tasks:
            if task.kind == TaskKind.ATTENTION and task.attention is not None:
                elements[task.attention] += task.executions * task.scores.elements
        return elements

    @cached_property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """The kinds of attention in the model, the one with the most work first."""
        work: defaultdict[AttentionKind, float] = defaultdict(float)
        for task in self.tasks:
            if task.kind == TaskKind.SPARSE_ATTENTION and task.attention is not None:
                work[task.attention] += task.executions * task.sparse_queries.elements
            elif task.attention is not None:
                scores = task.scores
                density = task.attention.pattern.density(score_length(scores))
                work[task.attention] += density * task.executions * scores.elements
        return tuple(sorted(work, key=lambda kind: -work[kind]))

    @cached_property
    def attention_axes(self) -> tuple[AttentionAxes, ...]:
        """The axes of each kind of attention in the model."""
        kinds = []
        for task in self.tasks:
            if task.kind != TaskKind.ATTENTION or not is_scores(task.results[0]):
                continue
            scores = task.results[0]
            others = {*score_positions(scores), *self.activation_axes}
            head_factors = [(n, size) for n, size in scores.factors if isinstance(n, str) and n not in others]
            heads = tuple(name for name, _ in head_factors)
            several = [factor for factor in head_factors if factor[1] > 1]  # reshapes drop axes of size 1
            head_sizes = [name for name, _ in task.contracted if isinstance(name, str)]
            if heads and head_sizes:
                flat = [name for name, parts in self.merged_axes.items() if [*parts] == several]
                kinds.append(AttentionAxes(heads, (*flat, heads[0])[0], head_sizes[0]))
        return tuple(dict.fromkeys(kinds))
