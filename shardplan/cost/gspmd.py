"""What a mapping makes of a task: the share of one device, and the collectives that the partitioner must add.

The rules are those of GSPMD (https://arxiv.org/abs/2105.04663): a value is cut by the mesh axes that its logical axes
are mapped to; contracting a cut axis leaves partial sums, to be added up; a parameter that rests in more parts than it
is used in is gathered, and its gradient is scattered back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.cost import attention
from shardplan.cost.collectives import Traffic, all_gather, all_reduce, all_to_all, reduce_scatter
from shardplan.cost.lookup import lookup
from shardplan.cost.matmul import NO_PRODUCT, Product, product
from shardplan.cost.sharding import Gather, ShardingAssignment
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.fusion import is_scores
from shardplan.program.named_arrays import Array
from shardplan.program.tasks import Task

GATHER = "weights of"
"""How the causes of gathers of parameters begin."""


@dataclass(frozen=True)
class DeviceCost:
    """What one device has of a task, over all its executions."""

    product: Product
    memory_bytes: float
    """Read from and written to HBM."""
    traffic: tuple[Traffic, ...]
    rearranged_bytes: float = 0.0
    """Of parameters that a gather does not leave in order: along several dimensions at once, or written as a sum."""
    own_bytes: float = 0.0
    """Of parameters that are gathered, the parts that the device has itself and copies into what it gathers."""
    merged_bytes: float = 0.0
    """Of attention: read and written to add up what the hops of a ring give."""
    has_kernel: bool = False
    """Of attention: whether one kernel does it, on each device alone, and never writes scores."""
    unmasked: float = 1.0
    """Of attention: the part of its scores that the mask leaves to the device with most of them."""


def device_cost(task: Task, layout: ShardingAssignment, least: DeviceCost | None = None) -> DeviceCost:
    """One device's part of `task`.

    Args:
        least: `device_cost_lower_bound` of a layout that differs in how parameters rest, where it is known already.
    """
    least = least or device_cost_lower_bound(task, layout)
    if task.kind not in RESTING:
        return least
    gathers = [(array, gather) for array in task.operands if (gather := gather_of(array, task, layout))]
    # each copy is written and read again
    rearranged = task.times * sum(gather.bytes for _, gather in gathers if gather.copies > 1)
    own = task.times * sum(layout.bytes(array, layout.params) for array, _ in gathers)
    traffic = (*least.traffic, *_sent(RESTING[task.kind](task, layout)))
    mine = product(task, layout) if task.groups > 1 else least.product
    return replace(least, product=mine, rearranged_bytes=rearranged, own_bytes=own, traffic=traffic)


def device_cost_lower_bound(task: Task, layout: ShardingAssignment) -> DeviceCost:
    """What a device has of `task` at least, however parameters rest."""
    moved = sum(
        layout.bytes(array, layout.compute) for array in (*task.operands, *task.results) if not is_scores(array)
    )
    traffic = _sent(COMPUTING[task.kind](task, layout)) if task.kind in COMPUTING else ()
    if task.kind not in ("contraction", "attention"):
        return DeviceCost(NO_PRODUCT, task.times * moved, traffic)
    if task.groups > 1:  # what is computed follows from how the parameters rest, cut by all devices at best
        whole = product(task, replace(layout, params={}))
        mine = replace(whole, count=whole.count / math.prod(layout.mesh.values()))
    else:
        mine = product(task, layout)
    if task.kind == "contraction":
        return DeviceCost(mine, task.times * moved, traffic)
    is_kernel = attention.has_kernel(task, layout)
    return DeviceCost(
        mine,
        task.times * (moved if is_kernel else moved + attention.score_bytes(task, layout)),
        traffic,
        merged_bytes=attention.merged_bytes(task, layout),
        has_kernel=is_kernel,
        unmasked=attention.unmasked(task, layout),
    )


def _sent(traffic: Iterator[Traffic]) -> tuple[Traffic, ...]:
    return tuple(each for each in traffic if each.bytes > 0)


def weight_bytes(task: Task, layout: ShardingAssignment) -> float:
    """Of the parameters that a product is the first to use, on a device while computing, over all executions."""
    if task.kind != "contraction" or task.groups > 1:
        return 0.0
    return task.times * sum(
        layout.bytes(array, layout.compute) for array in task.operands if array.weight in task.fresh
    )


def gather_of(array: Array, task: Task, layout: ShardingAssignment) -> Gather | None:
    """How an operand is gathered here, where it is a parameter that is neither used as it rests nor there already."""
    is_new = array.weight is not None and array.weight in task.fresh and task.groups == 1
    return layout.gather(array) if is_new else None


def _grouped(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """A product with a matrix for every group of rows (experts): rows are whole, and parameters used as they rest."""
    if all(array.weight is None for array in task.operands):
        return  # the gradient of the parameters, each device its part
    result = task.results[0]
    partial = layout.mesh_axes(task.contracted, layout.params)
    if partial:
        size = layout.bytes(result, layout.params)
        yield all_reduce(size, layout, partial, task.times, f"partial sums of {task.cause}")
    used = layout.mesh_axes(result.factors)
    spread = tuple(axis for axis in layout.mesh_axes(result.factors, layout.params) if axis not in used)
    if spread and not task.stays_cut:
        yield all_gather(layout.bytes(result, layout.compute), layout, spread, task.times, f"result of {task.cause}")


def _sum(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """The gradient of what a shard_map takes whole: every device has a part of the sum."""
    everywhere = tuple(axis for axis, size in layout.mesh.items() if size > 1)
    if everywhere:
        size = sum(layout.bytes(array, layout.compute) for array in task.results)
        yield all_reduce(size, layout, everywhere, task.times, f"sums of {task.cause}")


def _contraction(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    if task.groups > 1:
        return
    for operand in task.operands:
        if operand.weight is None:
            yield from _flattened(task, operand, layout)
    partial, result = _partial(task, layout), task.results[0]
    if partial and not layout.rests(result):
        size = layout.bytes(result, layout.compute)
        yield all_reduce(size, layout, partial, task.times, f"partial sums of {task.cause}")


def _parameters(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """Parameters of a product, and what becomes a gradient."""
    if task.groups > 1:
        yield from _grouped(task, layout)
        return
    result = task.results[0]
    for operand in task.operands:
        gather = gather_of(operand, task, layout)
        if gather:
            yield all_gather(gather.bytes, layout, gather.axes, task.times, f"{GATHER} {operand.weight}")
    partial = _partial(task, layout)
    if not partial or not layout.rests(result):
        return
    # each device needs its part of what rests cut, and all of what does not
    size = layout.bytes(result, layout.compute)
    resting = layout.mesh_axes(result.factors, layout.params)
    scattered = tuple(axis for axis in partial if axis in resting)
    summed = tuple(axis for axis in partial if axis not in resting)
    cause = f"gradient of {task.cause}"
    if scattered:
        yield reduce_scatter(size, layout, scattered, task.times, cause)
    if summed:
        yield all_reduce(size / mesh_size(layout.mesh, scattered), layout, summed, task.times, cause)


def _partial(task: Task, layout: ShardingAssignment) -> MeshAxes:
    """Mesh axes along which devices have partial sums of a result, to be added up here."""
    return layout.mesh_axes(task.contracted) if task.completes else ()


def _flattened(task: Task, operand: Array, layout: ShardingAssignment) -> Iterator[Traffic]:
    """An operand with merged axes: a cut of the major one stays in place where the whole is cut alike."""
    for dim in operand.dims:
        whole = next((name for name, parts in layout.merged.items() if parts == dim), None)
        if whole is None or (whole, math.prod(size for _, size in dim)) not in task.contracted:
            continue
        cut = layout.mesh_axes(dim)
        if cut and not layout.mesh_axes(dim[:1]) == cut == layout.compute.get(whole, ()):
            size = layout.bytes(operand, {**layout.compute, **dict.fromkeys((name for name, _ in dim if name), ())})
            yield all_gather(size, layout, cut, task.times, f"{whole} of {task.cause} cut differently before")


def _lookup(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """A lookup in a cut table."""
    table, result = task.operands[0], task.results[0]
    if table.weight is None:
        return
    way, cause = lookup(table, result, layout), f"rows of {table.weight}"
    if way.gathered:
        yield all_gather(way.table, layout, way.gathered, task.times, cause)
    if way.rows:
        yield all_reduce(way.found, layout, way.rows, task.times, cause)
    if way.shared:
        yield all_gather(way.together, layout, way.shared, task.times, cause)
    if way.by_turning:
        yield all_to_all(way.together, layout, way.columns, task.times, cause)
    elif way.columns:
        yield all_gather(way.turned, layout, way.columns, task.times, cause)


def _update(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """The gradient of a lookup."""
    result, rows = task.results[0], task.operands[-1]
    if not layout.rests(result):
        return
    busy = layout.mesh_axes(tuple(f for f in rows.factors if f[0] not in result.axes))
    columns = layout.mesh_axes(tuple(f for f in result.factors if f[0] in rows.axes), layout.params)
    table_rows = layout.mesh_axes(tuple(f for f in result.factors if f[0] not in rows.axes), layout.params)
    size = layout.bytes(rows, layout.compute)
    turned = tuple(axis for axis in busy if axis in columns)
    spread = tuple(axis for axis in busy if axis in table_rows)
    summed = tuple(axis for axis in busy if axis not in (*turned, *spread))
    cause = "gradient of the lookup"
    if turned:
        yield all_to_all(size, layout, turned, task.times, cause)
    if spread:
        yield all_gather(size * mesh_size(layout.mesh, spread), layout, spread, task.times, cause)
    if summed:
        yield all_reduce(layout.bytes(result), layout, summed, task.times, cause)


def _reshard(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """What was cut and is whole from here on."""
    before, after = task.operands[0], task.results[0]
    kept = {axis for axes in layout.cut(after, layout.compute) for axis in axes}
    # of merged axes a cut of the minor one does not even reach the merged one
    lost = tuple(axis for axis in layout.mesh_axes(before.factors) if axis not in kept)
    if lost:
        yield all_gather(layout.bytes(after, layout.compute), layout, lost, task.times, f"whole for {task.cause}")


COMPUTING = {"contraction": _contraction, "attention": attention.collectives, "reshard": _reshard, "sum": _sum}
"""Kind of task -> its collectives that follow from the mapping while computing."""
RESTING = {"contraction": _parameters, "lookup": _lookup, "update": _update}
"""Kind of task -> those that follow from how parameters rest too."""
