"""What a mapping makes of a task: the share of one device, and the collectives that the partitioner must add.

The rules are those of GSPMD (https://arxiv.org/abs/2105.04663): a value is cut by the mesh axes that its logical axes
are mapped to; contracting a cut axis leaves partial sums, to be added up; a parameter that rests in more parts than it
is used in is gathered, and its gradient is scattered back.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.model.named import SECOND, Array
from shardplan.plan.fusion import is_scores
from shardplan.plan.layout import Gather, Layout
from shardplan.plan.lookup import lookup
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.plan.product import NO_PRODUCT, Product, product
from shardplan.plan.tasks import Task

SCORE_PASSES, SCORE_BYTES = 3, 4
"""How often attention without a kernel writes or reads its scores, per product, and their bytes."""
KERNEL_LANES = 128
"""Levanter's splash attention takes positions and head sizes that are multiples of this."""
KERNEL_BLOCK = 512
"""Side of the kernel's blocks, tokens. Some of Levanter's models ask for more than the memory of a v4 core can hold."""
CAUSAL = 0.5
"""Part of the position x position products that a causal mask leaves."""
GATHER = "weights of"
"""How the causes of gathers of parameters begin."""


@dataclass(frozen=True)
class Traffic:
    """Collectives of one cause in one step."""

    kind: str
    mesh_axes: MeshAxes
    bytes: float
    """Received per device, over all executions."""
    count: int
    cause: str


@dataclass(frozen=True)
class Share:
    """What one device has of a task, over all its executions."""

    product: Product
    memory_bytes: float
    """Read from and written to HBM."""
    rearranged_bytes: float
    """Of parameters that a gather does not leave in order: along several dimensions at once, or written as a sum."""
    own_bytes: float
    """Of parameters that are gathered, the parts that the device has itself and copies into what it gathers."""
    has_kernel: bool
    """Of attention: whether one kernel does it, on each device alone, and never writes scores."""
    unmasked: float
    """Of attention: the part of its scores that a causal mask leaves to the device with most of them."""
    traffic: tuple[Traffic, ...]


def all_gather(result_bytes: float, layout: Layout, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device gets the parts of the others; `result_bytes` is what it then has, per execution."""
    if layout.sums_to_gather(axes):
        return all_reduce(result_bytes, layout, axes, count, cause)
    n = mesh_size(layout.mesh, axes)
    return Traffic("all-gather", axes, count * result_bytes * (n - 1) / n, count, cause)


def all_reduce(array_bytes: float, layout: Layout, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """A reduce-scatter and an all-gather of `array_bytes`, per execution."""
    n = mesh_size(layout.mesh, axes)
    return Traffic("all-reduce", axes, 2 * count * array_bytes * (n - 1) / n, count, cause)


def reduce_scatter(array_bytes: float, layout: Layout, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device gets the sum of its part of `array_bytes`, per execution; over the whole mesh, the sum of all."""
    if layout.is_whole(axes):
        return all_reduce(array_bytes, layout, axes, count, cause)
    n = mesh_size(layout.mesh, axes)
    return Traffic("reduce-scatter", axes, count * array_bytes * (n - 1) / n, count, cause)


def all_to_all(array_bytes: float, layout: Layout, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device sends a part of its `array_bytes` to every other, per execution."""
    n = mesh_size(layout.mesh, axes)
    return Traffic("all-to-all", axes, count * array_bytes * (n - 1) / n, count, cause)


def share(task: Task, layout: Layout, least: Share | None = None) -> Share:
    """One device's part of `task`.

    Args:
        least: `least_share` of a layout that differs in how parameters rest, where it is known already.
    """
    least = least or least_share(task, layout)
    if task.kind not in RESTING:
        return least
    gathers = [(array, gather) for array in task.operands if (gather := gather_of(array, task, layout))]
    # each copy is written and read again
    rearranged = task.times * sum(gather.bytes for _, gather in gathers if gather.copies > 1)
    own = task.times * sum(layout.bytes(array, layout.params) for array, _ in gathers)
    traffic = (*least.traffic, *_sent(RESTING[task.kind](task, layout)))
    mine = product(task, layout) if task.groups > 1 else least.product
    return replace(least, product=mine, rearranged_bytes=rearranged, own_bytes=own, traffic=traffic)


def least_share(task: Task, layout: Layout) -> Share:
    """What a device has of `task` at least, however parameters rest."""
    moved = sum(
        layout.bytes(array, layout.compute) for array in (*task.operands, *task.results) if not is_scores(array)
    )
    traffic = _sent(COMPUTING[task.kind](task, layout)) if task.kind in COMPUTING else ()
    if task.kind not in ("contraction", "attention"):
        return Share(NO_PRODUCT, task.times * moved, 0.0, 0.0, False, 1.0, traffic)
    if task.groups > 1:  # what is computed follows from how the parameters rest, cut by all devices at best
        whole = product(task, replace(layout, params={}))
        mine = replace(whole, count=whole.count / math.prod(layout.mesh.values()))
    else:
        mine = product(task, layout)
    if task.kind == "contraction":
        return Share(mine, task.times * moved, 0.0, 0.0, False, 1.0, traffic)
    has_kernel = attention_has_kernel(task, layout)
    if not has_kernel:
        scores, _ = _positions(task)
        moved += SCORE_PASSES * SCORE_BYTES * scores.elements / layout.parts(scores, layout.compute)
    return Share(mine, task.times * moved, 0.0, 0.0, has_kernel, unmasked_part(task, layout), traffic)


def _sent(traffic: Iterator[Traffic]) -> tuple[Traffic, ...]:
    return tuple(each for each in traffic if each.bytes > 0)


def gather_of(array: Array, task: Task, layout: Layout) -> Gather | None:
    """How an operand is gathered here, where it is a parameter that is neither used as it rests nor there already."""
    is_new = array.weight is not None and array.weight in task.fresh and task.groups == 1
    return layout.gather(array) if is_new else None


def attention_has_kernel(task: Task, layout: Layout) -> bool:
    """Whether a kernel can do attention on each device alone: with all keys, and each query head's key head.

    Of the axes of scores those may be cut that keys have too, and positions, of which keys and values are gathered: a
    cut of the query heads of a group alone would pair them with the wrong key heads.
    """
    if layout.habits.plain_attention:
        return False
    met = (*task.operands, *task.results)
    keys = [array for array in task.operands if not is_scores(array)][-1]
    scores, positions = _positions(task)
    separable = {name for name in keys.axes if name in scores.axes} - positions
    separable |= positions if layout.habits.gathers_keys else set()
    if any(layout.compute.get(name) for array in met for name in array.axes if name not in separable):
        return False
    heads = [size for name, size in keys.factors if size > 1 and name not in scores.axes]
    lengths = [size // mesh_size(layout.mesh, layout.compute.get(name or "", ())) for name, size in scores.factors
               if name in positions]  # fmt: skip
    return all(size % KERNEL_LANES == 0 for size in (*heads, *lengths)) and all(
        size % min(KERNEL_BLOCK, size) == 0 for size in lengths
    )


def unmasked_part(task: Task, layout: Layout) -> float:
    """The part of its scores that a causal mask leaves to the device with the last of the positions."""
    parts = max(mesh_size(layout.mesh, layout.compute.get(name, ())) for name in _positions(task)[1])
    return 1 - (1 - CAUSAL) / parts


def _positions(task: Task) -> tuple[Array, set[str]]:
    """The scores of an attention task, and the names of their positions."""
    scores = next(filter(is_scores, (*task.operands, *task.results)))
    return scores, {name for name in scores.axes if name.endswith(SECOND) or name + SECOND in scores.axes}


def _grouped(task: Task, layout: Layout) -> Iterator[Traffic]:
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


def _sum(task: Task, layout: Layout) -> Iterator[Traffic]:
    """The gradient of what a shard_map takes whole: every device has a part of the sum."""
    everywhere = tuple(axis for axis, size in layout.mesh.items() if size > 1)
    if everywhere:
        size = sum(layout.bytes(array, layout.compute) for array in task.results)
        yield all_reduce(size, layout, everywhere, task.times, f"sums of {task.cause}")


def _contraction(task: Task, layout: Layout) -> Iterator[Traffic]:
    if task.groups > 1:
        return
    for operand in task.operands:
        if operand.weight is None:
            yield from _flattened(task, operand, layout)
    partial, result = _partial(task, layout), task.results[0]
    if partial and not layout.rests(result):
        size = layout.bytes(result, layout.compute)
        yield all_reduce(size, layout, partial, task.times, f"partial sums of {task.cause}")


def _parameters(task: Task, layout: Layout) -> Iterator[Traffic]:
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


def _partial(task: Task, layout: Layout) -> MeshAxes:
    """Mesh axes along which devices have partial sums of a result, to be added up here."""
    return layout.mesh_axes(task.contracted) if task.completes else ()


def _flattened(task: Task, operand: Array, layout: Layout) -> Iterator[Traffic]:
    """An operand with merged axes: a cut of the major one stays in place where the whole is cut alike."""
    for dim in operand.dims:
        whole = next((name for name, parts in layout.merged.items() if parts == dim), None)
        if whole is None or (whole, math.prod(size for _, size in dim)) not in task.contracted:
            continue
        cut = layout.mesh_axes(dim)
        if cut and not layout.mesh_axes(dim[:1]) == cut == layout.compute.get(whole, ()):
            size = layout.bytes(operand, {**layout.compute, **dict.fromkeys((name for name, _ in dim if name), ())})
            yield all_gather(size, layout, cut, task.times, f"{whole} of {task.cause} cut differently before")


def _attention(task: Task, layout: Layout) -> Iterator[Traffic]:
    """Keys and values of other positions, and sums of scores over a cut head size."""
    result = task.results[0]
    partial = layout.mesh_axes(task.contracted)
    if partial and not any(name and name.endswith(SECOND) for name, _ in task.contracted):
        yield all_reduce(layout.bytes(result, layout.compute), layout, partial, task.times, "attention over a cut axis")
    positions = [name for name in result.axes if name + SECOND in result.axes] or [
        name.removesuffix(SECOND) for name, _ in task.contracted if name and name.endswith(SECOND)
    ]
    for name in positions:
        axes = layout.compute.get(name, ())
        keys = task.operands[1]
        if axes and name in keys.axes:
            size = layout.bytes(keys, {**layout.compute, name: ()})
            yield all_gather(size, layout, axes, task.times, "keys and values of other positions")


def _lookup(task: Task, layout: Layout) -> Iterator[Traffic]:
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


def _update(task: Task, layout: Layout) -> Iterator[Traffic]:
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


def _reshard(task: Task, layout: Layout) -> Iterator[Traffic]:
    """What was cut and is whole from here on."""
    before, after = task.operands[0], task.results[0]
    kept = {axis for axes in layout.cut(after, layout.compute) for axis in axes}
    # of merged axes a cut of the minor one does not even reach the merged one
    lost = tuple(axis for axis in layout.mesh_axes(before.factors) if axis not in kept)
    if lost:
        yield all_gather(layout.bytes(after, layout.compute), layout, lost, task.times, f"whole for {task.cause}")


COMPUTING = {"contraction": _contraction, "attention": _attention, "reshard": _reshard, "sum": _sum}
"""Kind of task -> its collectives that follow from the mapping while computing."""
RESTING = {"contraction": _parameters, "lookup": _lookup, "update": _update}
"""Kind of task -> those that follow from how parameters rest too."""
