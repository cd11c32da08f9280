"""Predicted time and memory of every attention strategy and sequence layout for one shape, by the planner's cost model.

A forward pass of attention is two tasks, as the planner has them in a traced step (`shardplan.cost.attention`).
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from math import inf

from shardplan.cost.buffer_roles import buffer_bytes
from shardplan.cost.calibration import compiler_quirks, load_calibration
from shardplan.cost.gspmd import device_cost
from shardplan.cost.roofline import task_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import MeshPlacement, Slice, divisors, place_mesh
from shardplan.plan.attention_plan import AttentionPlan, Strategy
from shardplan.plan.mapping import MeshAxes
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.live_buffers import BufferRole, LiveBuffer
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.named_arrays import AxisCopy, Factor, TracedArray
from shardplan.program.tasks import Task, TaskKind

BATCH, POSITION = "batch", "position"
"""Logical axes of tokens in the tasks of this module; only mappings made here refer to them."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the attention of one device, except for positions."""

    batch: int
    key_heads: int
    queries_per_key_head: int
    """Number of query heads per key head."""
    head_size: int
    value_size: int
    itemsize: int = 2
    """Bytes per element."""


@dataclass(frozen=True)
class ShardedAttention:
    """The sizes and the mesh of a position-sharded attention, for which strategies are compared."""

    pattern: Pattern
    """The static part of the mask; documents that the layout does not know count as one document."""
    heads: HeadShape
    mesh_axes: MeshAxes
    """Mesh axes that shard positions, major to minor."""
    mesh: Mapping[str, int]
    """Mesh axis -> number of devices."""
    hardware: Slice


@dataclass(frozen=True)
class StrategyCost:
    """The cost on one device of a forward pass of attention, by one strategy and layout."""

    strategy: Strategy
    layout: SequenceLayout
    seconds: float
    received_bytes: float
    held_bytes: float
    """Bytes of keys, values and outputs of hops, beyond the device's own shards."""


def enumerate_layouts(
    length: int, degree: int, orders: Iterable[SequenceOrder] = SequenceOrder, documents: tuple[int, ...] | None = None
) -> list[SequenceLayout]:
    """Return every layout of a sequence sharded over `degree` devices, for every Ulysses degree.

    >>> [(each.ring, each.ulysses, each.kind.value) for each in enumerate_layouts(4096, 2)]
    [(2, 1, 'contiguous'), (2, 1, 'zigzag'), (2, 1, 'striped'), (1, 2, 'contiguous')]

    Args:
        documents: lengths of the documents, if they are known.
    """
    return [
        SequenceLayout(length, degree // ulysses, ulysses, order, documents)
        for ulysses, order in itertools.product(divisors(degree), orders)
        # all orders are the same for one ring index, and `documents` is zigzag for a single document
        if order == SequenceOrder.CONTIGUOUS or (ulysses < degree and (order != SequenceOrder.DOCUMENTS or documents))
    ]


def strategies_of(layout: SequenceLayout) -> tuple[Strategy, ...]:
    """Return the strategies that can run with a layout.

    >>> strategies_of(SequenceLayout(4096, ring=4))
    (<Strategy.ALL_GATHER: 'all_gather'>, <Strategy.RING: 'ring'>)
    >>> strategies_of(SequenceLayout(4096, ring=2, ulysses=4))
    (<Strategy.HYBRID: 'hybrid'>,)
    """
    if layout.ulysses == 1:
        return Strategy.ALL_GATHER, Strategy.RING
    return (Strategy.ULYSSES,) if layout.ring == 1 else (Strategy.HYBRID,)


def rank_strategies(
    layouts: Iterable[SequenceLayout], attention: ShardedAttention, available: float = inf
) -> list[StrategyCost]:
    """Return the cost of every strategy with every layout, fastest first.

    A layout is left out if its Ulysses groups would split a mesh axis unevenly.

    >>> from shardplan.hardware import parse_slice
    >>> heads = HeadShape(batch=1, key_heads=8, queries_per_key_head=4, head_size=128, value_size=128)
    >>> attention = ShardedAttention(Pattern(causal=True), heads, ("model",), {"model": 8}, parse_slice("v5p-16"))
    >>> layouts = [SequenceLayout(32768, ring=8, kind=order) for order in ("contiguous", "zigzag")]
    >>> [cost.layout.kind.value for cost in rank_strategies(layouts, attention) if cost.strategy == Strategy.RING]
    ['zigzag', 'contiguous']

    Args:
        available: bytes per device; strategies that hold more are left out.
    """
    possible: list[StrategyCost] = []
    for layout in layouts:
        for strategy in strategies_of(layout):
            cost = strategy_cost(strategy, layout, attention)
            if cost is not None and cost.held_bytes <= available:
                possible.append(cost)
    return sorted(possible, key=lambda cost: cost.seconds)


def strategy_cost(strategy: Strategy, layout: SequenceLayout, attention: ShardedAttention) -> StrategyCost | None:
    """Return the cost of one strategy with one layout; None if its Ulysses groups would split a mesh axis.

    >>> from shardplan.hardware import parse_slice
    >>> heads = HeadShape(batch=1, key_heads=8, queries_per_key_head=4, head_size=128, value_size=128)
    >>> attention = ShardedAttention(Pattern(causal=True), heads, ("model",), {"model": 8}, parse_slice("v5p-16"))
    >>> cost = strategy_cost(Strategy.RING, SequenceLayout(4096, ring=8), attention)
    >>> keys_and_values = 2 * 4096 * 8 * 128 * 2  # bytes
    >>> cost.received_bytes == keys_and_values * 7 / 8
    True
    """
    hardware = attention.hardware
    split = _split_for_ulysses(place_mesh(hardware, attention.mesh), attention.mesh_axes, layout.ulysses)
    if split is None:
        return None
    placement, position_axes = split
    assignment = ShardingAssignment(
        placement.mesh,
        {POSITION: position_axes},
        {},
        {},
        (BATCH, POSITION),
        compiler_quirks(hardware),
        AttentionPlan(strategy, layout.ulysses, layout.ring, layout.kind),
        documents=layout.documents,
    )
    scores, values = _attention_tasks(attention.heads, layout.length, AttentionKind(attention.pattern))
    calibration = load_calibration(hardware.generation.name)
    costs = [(task, device_cost(task, assignment)) for task in (scores, values)]
    buffers = (
        LiveBuffer(BufferRole.KEYS_OR_VALUES, scores.operands[-1]),
        LiveBuffer(BufferRole.KEYS_OR_VALUES, values.operands[-1], values.results),
    )
    return StrategyCost(
        strategy,
        layout,
        seconds=sum(task_seconds(task, cost, placement, calibration).total for task, cost in costs),
        received_bytes=sum(traffic.bytes for _, cost in costs for traffic in cost.traffic),
        held_bytes=sum(buffer_bytes(buffer, assignment) for buffer in buffers),
    )


def _split_for_ulysses(
    placement: MeshPlacement, mesh_axes: MeshAxes, ulysses: int
) -> tuple[MeshPlacement, MeshAxes] | None:
    """Split a mesh axis, if necessary, so that the minor mesh axes of positions have `ulysses` devices in total.

    Returns:
        The placement, and its mesh axes that shard positions; None if no part of an axis makes up that number.
    """
    left = ulysses
    for i, axis in reversed([*enumerate(mesh_axes)]):
        if left == 1:
            break
        size = placement.mesh[axis]
        if left % size == 0:
            left //= size
            continue
        minor = f"minor part of {axis}"
        split = placement.split_axis(axis, left, minor) if size % left == 0 else None
        return None if split is None else (split, (*mesh_axes[: i + 1], minor, *mesh_axes[i + 1 :]))
    return (placement, mesh_axes) if left == 1 else None


def _attention_tasks(heads: HeadShape, length: int, kind: AttentionKind) -> tuple[Task, Task]:
    """Return the two matmuls of a forward pass of attention: queries x keys, and scores x values."""
    batch, position, key_position = (BATCH, heads.batch), (POSITION, length), (AxisCopy(POSITION), length)
    key_heads, groups = ("key_heads", heads.key_heads), ("queries_per_key_head", heads.queries_per_key_head)
    head_size, value_size = ("head_size", heads.head_size), ("value_size", heads.value_size)

    def array(*factors: Factor) -> TracedArray:
        return TracedArray(tuple((factor,) for factor in factors), heads.itemsize)

    scores = array(batch, key_heads, groups, position, key_position)
    make_scores = Task(
        kind=TaskKind.ATTENTION,
        operands=(array(batch, key_heads, groups, position, head_size), array(batch, key_heads, position, head_size)),
        results=(scores,),
        contracted=(head_size,),
        batched=(batch, key_heads),
        groups=1,
        executions=1,
        first_used_weights=(),
        reduces_partial_sums=True,
        routed=frozenset(),
        is_backward=False,
        collective=None,
        mesh_axes=(),
        label="scores",
        attention=kind,
    )
    sum_values = replace(
        make_scores,
        operands=(scores, array(batch, key_heads, position, value_size)),
        results=(array(batch, key_heads, groups, position, value_size),),
        contracted=(key_position,),
        label="values",
    )
    return make_scores, sum_values
