"""What a mapping and an `AttentionPlan` make of attention's products: kernels, collectives, what is masked, merging.

Bytes are those of the table in `shardplan.attention.choice`, product by product: queries and
keys with the scores, outputs and values with the sum over these.
"""

from collections.abc import Iterable, Iterator
from math import prod

from shardplan.cost.collectives import Traffic, all_gather, all_reduce, all_to_all, permute, reduce_scatter
from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.plan.plan import BLOCKWISE, GATHERED, SPLASH, UNCUT
from shardplan.positions.heads import HeadCut
from shardplan.positions.sequence_layout import KERNEL_BLOCK, SequenceLayout, attended, hops
from shardplan.program.fusion import is_scores
from shardplan.program.named_arrays import SECOND, Array
from shardplan.program.tasks import LiveBuffer, Task, sums_queries

KERNEL_LANES = 128
"""Attention kernels take positions that are multiples of this, and Levanter's head sizes too."""
HEAD_SIZES = range(64, 257)
"""What shardplan's takes."""
FLOAT32 = 4
"""Bytes of a number."""
SCORE_PASSES = 3
"""How often attention without a kernel writes or reads its scores, in float32, per product."""
MERGE_PASSES = 7
"""How often outputs, in float32, are read or written for each hop of a ring, by the TPU compiler's cycles: both parts
and the sum, and the sums of weights, that kernels write 128 times over. As elementwise work: by these cycles that takes
longer than at HBM bandwidth."""


def has_kernel(task: Task, layout: ShardingAssignment) -> bool:
    """Whether a kernel can do attention on each device alone: with all keys, and each query head's key head.

    Of the axes of scores those may be cut that keys have too, and, of shardplan's attention, positions: a cut of the
    query heads of a group alone would pair them with the wrong key heads.
    """
    if layout.quirks.plain_attention:
        return False
    keys, scores, positions = _keys(task), _scores(task), _positions(task)
    is_own = layout.attention.strategy != UNCUT
    separable = {name for name in keys.axes if name in scores.axes} - positions
    separable |= positions if is_own else set()
    met = (*task.operands, *task.results)
    if any(layout.compute.get(name) for array in met for name in array.axes if name not in separable):
        return False
    sizes = [size for name, size in keys.factors if size > 1 and name not in scores.axes]
    if is_own:
        order = _order(task, layout)
        return all(size in HEAD_SIZES for size in sizes) and order.padded // order.ring % KERNEL_LANES == 0
    lengths = [size for name, size in scores.factors if name in positions]
    return all(size % KERNEL_LANES == 0 for size in (*sizes, *lengths)) and all(
        size % min(KERNEL_BLOCK, size) == 0 for size in lengths
    )


def kernel_of(tasks: Iterable[Task], layout: ShardingAssignment) -> str:
    """What does the attention among some tasks: splash, where it can do all of it."""
    attention = [task for task in tasks if task.kind == "attention"]
    return SPLASH if attention and all(has_kernel(task, layout) for task in attention) else BLOCKWISE


def unmasked(task: Task, layout: ShardingAssignment) -> float:
    """The part of its scores that the mask leaves to the device with most of them, block by block.

    With heads that are nobody's, where they are not as many as the devices that share them.
    """
    return _heads(task, layout).padding * attended(_order(task, layout), layout.pattern, layout.attention.gathers)


def score_bytes(task: Task, layout: ShardingAssignment) -> float:
    """What attention without a kernel reads and writes of scores, per execution."""
    scores = _scores(task)
    return SCORE_PASSES * FLOAT32 * scores.elements / layout.parts(scores, layout.compute)


def merged_bytes(task: Task, layout: ShardingAssignment) -> float:
    """What a device writes and reads, over all executions, to add up the outputs of the hops of a ring."""
    if is_scores(task.results[0]) or layout.attention.gathers:
        return 0.0
    result = task.results[0]
    output = layout.bytes(result, layout.compute) / result.itemsize * FLOAT32
    return task.times * _hops(task, layout) * MERGE_PASSES * output


def extra_attention_bytes(item: LiveBuffer, layout: ShardingAssignment) -> float:
    """What a device has for attention beside queries, its own part of values, and outputs where these are made.

    Gathered keys and values come of copies in another order. A ring has the next ones beside those that it has, the
    outputs of a hop as a kernel gives them, and in float32 these and those of all hops before. Gradients of keys and
    values are made in float32, one after the other where they are gathered, both where they go round.
    """
    *_, position = layout.activation_axes
    own, method, outputs = layout.bytes(item.array, layout.compute), layout.attention, item.tables
    gradient = FLOAT32 / item.array.itemsize if item.role == "keys_gradient" else 0.0
    if method.strategy == UNCUT:
        return 0.0
    queries = sum(layout.bytes(output, layout.compute) for output in outputs)
    if method.strategy == GATHERED:
        whole = layout.bytes(item.array, {**layout.compute, position: ()})
        return (2 + gradient) * whole + (3 * own if outputs else 0.0)
    if method.ring > 1:
        merged = sum(layout.bytes(output, layout.compute) / output.itemsize * FLOAT32 for output in outputs)
        return (3 + 2 * gradient) * own + queries + 2 * merged
    return queries + (1 + gradient) * own


def collectives(task: Task, layout: ShardingAssignment) -> Iterator[Traffic]:
    """Those of keys and values of other positions, of their gradients, and of sums over what is cut besides."""
    positions, is_own = _positions(task), layout.attention.strategy != UNCUT
    along = next((layout.compute[name] for name in positions if name in layout.compute), ())
    partial = layout.mesh_axes(tuple(factor for factor in task.contracted if not (is_own and factor[0] in positions)))
    if partial:
        # of Levanter's own attention the partitioner adds up gradients of all keys
        parts = 1 if is_own or not _is_of_keys(task) else mesh_size(layout.mesh, along)
        size = parts * layout.bytes(task.results[0], layout.compute)
        yield all_reduce(size, layout, partial, task.times, "attention over a cut axis")
    if along and (is_own or not _is_of_keys(task)):
        yield from _sequence_parallel(task, layout, along)


def _sequence_parallel(task: Task, layout: ShardingAssignment, axes: MeshAxes) -> Iterator[Traffic]:
    """What crosses the mesh axes that cut positions.

    The backward pass has keys and values, where they are gathered or exchanged, from the forward pass (or from this
    done again), and sends their gradients; in a ring, both go round. Gradients are added up in float32.
    """
    method, keys, is_gradient = layout.attention, _keys(task), _is_of_keys(task)
    own, heads = layout.bytes(keys, layout.compute), _heads(task, layout)
    wide = FLOAT32 / keys.itemsize if is_gradient else 1.0
    if method.gathers:
        whole = own * mesh_size(layout.mesh, axes)
        if is_gradient:
            yield reduce_scatter(whole * wide, layout, axes, task.times, "gradients of keys and values")
        elif not (task.is_backward and method.strategy == GATHERED):
            yield all_gather(whole, layout, axes, task.times, "keys and values of other positions")
        return
    if method.ulysses > 1:
        by_heads, cause = axes if method.ring == 1 else axes[-1:], "heads exchanged for positions"
        if not is_gradient:
            turned = task.operands[0] if is_scores(task.results[0]) else task.results[0]
            yield all_to_all(layout.bytes(turned, layout.compute) * heads.padding, layout, by_heads, task.times, cause)
        if is_gradient or not task.is_backward:
            copies = heads.received / heads.key_heads * (1.0 if heads.is_even else wide)
            yield all_to_all(own * copies, layout, by_heads, task.times, cause)
    if method.ring > 1:
        around = axes if method.ulysses == 1 else axes[:-1]
        there = own * wide * heads.degree * heads.key_heads_there / heads.key_heads
        yield permute(there, around, task.times * _hops(task, layout), "keys and values going round")


def _heads(task: Task, layout: ShardingAssignment) -> HeadCut:
    """Heads of one device, and how they are exchanged for positions."""
    keys, scores = _keys(task), _scores(task)
    others = _positions(task) | {*layout.activation_axes}
    local = {
        name: size // mesh_size(layout.mesh, layout.compute.get(name, ()))
        for name, size in scores.factors if name and name not in others
    }  # fmt: skip
    in_keys = prod(size for name, size in local.items() if name in keys.axes)
    return HeadCut(layout.attention.ulysses, in_keys, prod(local.values()) // in_keys)


def _order(task: Task, layout: ShardingAssignment) -> SequenceLayout:
    """Which positions each device has."""
    method, positions = layout.attention, _positions(task)
    length = max(size for name, size in _scores(task).factors if name in positions)
    if method.strategy == UNCUT:
        return SequenceLayout(length, max(mesh_size(layout.mesh, layout.compute.get(name, ())) for name in positions))
    return method.order(length)


def _hops(task: Task, layout: ShardingAssignment) -> int:
    """How often keys go on."""
    order = _order(task, layout)
    return len(hops(order, order, layout.pattern)) - 1


def _is_of_keys(task: Task) -> bool:
    """Whether it makes gradients of keys, or of values."""
    return sums_queries(task.contracted, task.results[0])


def _keys(task: Task) -> Array:
    """Keys, or values, or gradients of either."""
    arrays = task.results if _is_of_keys(task) else task.operands
    return [array for array in arrays if not is_scores(array)][-1]


def _scores(task: Task) -> Array:
    return next(filter(is_scores, (*task.operands, *task.results)))


def _positions(task: Task) -> set[str]:
    """The names of positions."""
    axes = _scores(task).axes
    return {name for name in axes if name.endswith(SECOND) or name + SECOND in axes}
