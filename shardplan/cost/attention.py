"""The cost of attention's matmuls under a mapping and an `AttentionPlan`: kernels, collectives, masking, ring merges.

Matmul by matmul: queries and keys belong to the one that makes scores, outputs and values to the one that sums over
them. Bytes that a device receives in a forward pass, for P = U x R devices along the positions, S tokens, Hq query and
Hkv key heads, in units of batch x head size (https://arxiv.org/abs/2309.14509, https://arxiv.org/abs/2310.01889):

| strategy | received |
|---|---|
| all_gather | 2 Hkv (S/P) (P-1) |
| ring | 2 Hkv (S/P) for every hop that the mask needs, at most P-1 |
| ulysses | (2 Hq + 2 Hkv) (S/P) (U-1)/U, where Hkv counts copies of key heads |
| hybrid | that of ulysses, and 2 Hkv (S/P) for every hop, at most R-1 |

A ring computes while it receives. Every hop takes as long as its slowest device; then the device adds the hop's output,
in float32, to that of the hops before. The other strategies wait until everything is received.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from math import ceil, prod

from shardplan.cost.collectives import (
    Purpose,
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
    permute_traffic,
    reduce_scatter_traffic,
)
from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.attention_plan import AttentionPlan, KernelName, Strategy
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.positions.heads import HeadSharding
from shardplan.positions.sequence_layout import KERNEL_BLOCK, SequenceLayout, attended_fraction, ring_distances
from shardplan.program.live_buffers import LiveBuffer
from shardplan.program.marked.attention_kind import UNMARKED, AttentionKind
from shardplan.program.named_arrays import TracedArray, is_scores, mapped, score_length, score_positions
from shardplan.program.tasks import Step, Task, TaskKind

KERNEL_LANES = 128
"""Attention kernels require numbers of positions that are multiples of this."""
HEAD_SIZES = range(64, 257)
"""Head sizes that attention kernels support."""
FLOAT32_BYTES = 4
SCORE_PASSES = 3
"""Number of times that attention without a kernel writes or reads its scores, in float32, per matmul."""
MERGE_PASSES = 2
"""Passes over a hop's float32 output, at HBM bandwidth, to add it to the outputs of earlier hops.

Together with `MEASURED_HOP_SECONDS` fitted to measured steps (`tests/unit/test_strategy_cost.py`). The TPU compiler's
cycles for long sequences amount to 14 to 20 passes; measured rings are not as slow (docs/log.md)."""
MEASURED_HOP_SECONDS = {"v5p": 5e-5}
"""Generation -> measured seconds of a ring hop that do not depend on its size: kernel start and look-up of blocks."""
COMPILED_HOP_SECONDS = 1.5e-4
"""Seconds of a hop that do not depend on its size, on other generations: 0.1 to 0.2 ms by the TPU compiler's cycles
(docs/log.md)."""
EXCHANGE_SLOWDOWN = 5.0
"""Seconds of the all-to-alls between heads and positions / seconds by the bandwidth of the torus links.

Fitted to the same steps: Ulysses takes as long there as gathering eight times as many bytes. A verdict on a compiled
program times an all-to-all by the links alone."""


def kind_of(task: Task) -> AttentionKind:
    """Return the kind of attention that a matmul of attention belongs to."""
    return task.attention or UNMARKED


def has_kernel(task: Task, assignment: ShardingAssignment) -> bool:
    """Return whether a kernel can run on each device: it has all keys, and the key heads of its query heads.

    Axes that queries and keys share may be sharded; shardplan's attention also shards positions. Query heads of a group
    must not be sharded without their key head. Value heads of another size than key heads need shardplan's kernel.
    """
    if assignment.quirks.plain_attention:
        return False
    keys, scores = task.keys, task.scores
    positions = score_positions(scores)
    is_sequence_parallel = _method(task, assignment).strategy != Strategy.NONE
    shardable = positions if is_sequence_parallel else ()
    if any(assignment.compute.get(name) for name in task.axes_of_one_operand if name not in shardable):
        return False
    sizes = [size for name, size in keys.factors if size > 1 and name not in scores.axes]
    kind = kind_of(task)
    if is_sequence_parallel or kind.uses_own_kernel:
        layout = _sequence_layout(task, assignment)
        is_aligned = layout.padded_length // layout.ring % KERNEL_LANES == 0
        return all(size in HEAD_SIZES for size in sizes) and is_aligned
    has_equal_sizes = kind.head_size == kind.value_head_size
    lengths = [size for name, size in scores.factors if name in positions]
    is_aligned = all(size % KERNEL_LANES == 0 and size % min(KERNEL_BLOCK, size) == 0 for size in lengths)
    return has_equal_sizes and is_aligned and all(size in HEAD_SIZES for size in sizes)


def with_kernels(step: Step, assignment: ShardingAssignment) -> AttentionPlan:
    """Return the method and kernel of each kind of attention; splash is the kernel if it can compute all of the kind.

    Levanter's own attention has one setting for the whole model, so that all kinds that it computes have one kernel.
    """
    attention = [task for task in step.tasks if task.kind == TaskKind.ATTENTION]
    without_kernel = {kind_of(task).name for task in attention if not has_kernel(task, assignment)}
    by_levanter = set()
    for kind in step.attention_kinds:
        if assignment.attention.of(kind.name).strategy == Strategy.NONE and not kind.uses_own_kernel:
            by_levanter.add(kind.name)
    if by_levanter & without_kernel:
        without_kernel |= by_levanter
    methods = {}
    for kind in step.attention_kinds:
        method = assignment.attention.of(kind.name)
        if kind.sparse is not None:
            methods[kind.name] = replace(method, kernel=method.sparse_kernel, kinds={})
            continue
        kernel = KernelName.BLOCKWISE if kind.name in without_kernel else KernelName.SPLASH
        methods[kind.name] = replace(method, kernel=kernel, kinds={})
    return AttentionPlan.of_kinds(methods)


def unmasked_fraction(task: Task, assignment: ShardingAssignment) -> float:
    """Return the unmasked fraction of scores, counted in blocks, on the device with the most unmasked scores.

    Heads are padded to a multiple of the devices that share them; scores of padding heads count too.
    """
    layout, gathers_keys = _sequence_layout(task, assignment), _method(task, assignment).gathers_keys
    attended = attended_fraction(layout, kind_of(task).pattern, gathers_keys)
    return _head_sharding(task, assignment).padding_ratio * attended


def score_bytes(task: Task, assignment: ShardingAssignment) -> float:
    """Return the bytes of scores that attention without a kernel reads and writes, per execution."""
    scores = task.scores
    return SCORE_PASSES * FLOAT32_BYTES * scores.elements / assignment.num_shards(scores, assignment.compute)


def ring_hops(task: Task, assignment: ShardingAssignment) -> int:
    """Return how often per step a device merges the output of a ring hop into the outputs of earlier hops."""
    if is_scores(task.results[0]) or _method(task, assignment).gathers_keys:
        return 0
    return task.executions * len(_hop_distances(task, assignment))


def hop_output_bytes(task: Task, assignment: ShardingAssignment) -> float:
    """Return the bytes of the output of a ring hop, in float32."""
    return _float32_bytes(task.results[0], assignment)


def extra_attention_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Return the extra live bytes per device for keys or values, beyond queries, local values and local outputs.

    An all-gather needs its result twice: as gathered, and in another order. A ring needs the keys of this hop and of
    the next, the hop's output, and float32 copies of the hop's output and of the merged output.
    """
    array, outputs = buffer.array, buffer.related_arrays
    method = assignment.attention_of(buffer.attention or UNMARKED)
    own = assignment.bytes(array, assignment.compute)
    if method.strategy == Strategy.NONE:
        return 0.0
    queries = sum(assignment.bytes(output, assignment.compute) for output in outputs)
    if method.strategy == Strategy.ALL_GATHER:
        gathered = own * method.ring * method.ulysses
        return 2 * gathered + (3 * own if outputs else 0.0)
    if method.ring > 1:
        merged = sum(_float32_bytes(output, assignment) for output in outputs)
        return 3 * own + queries + 2 * merged
    return queries + own


def attention_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the transfers of one attention task: keys, values, their gradients, and sums over sharded axes."""
    positions = score_positions(task.scores)
    is_sequence_parallel = _method(task, assignment).strategy != Strategy.NONE
    axes = next(filter(None, (mapped(name, assignment.compute) for name in positions)), ())
    partial = assignment.mesh_axes(
        tuple(factor for factor in task.contracted if not (is_sequence_parallel and factor[0] in positions))
    )
    if partial:
        # with Levanter's own attention, the partitioner sums gradients of all keys
        is_local = is_sequence_parallel or not task.computes_kv_gradients
        parts = 1 if is_local else mesh_size(assignment.mesh, axes)
        size = parts * assignment.bytes(task.results[0], assignment.compute)
        yield all_reduce_traffic(size, assignment, partial, task.executions, Purpose.ATTENTION_SUMS)
    if axes and (is_sequence_parallel or not task.computes_kv_gradients):
        yield from _sequence_parallel_traffic(task, assignment, axes)


def _sequence_parallel_traffic(task: Task, assignment: ShardingAssignment, axes: MeshAxes) -> Iterator[Traffic]:
    """Yield the traffic of sequence-parallel attention over the mesh axes `axes` that shard positions.

    The backward pass reuses the keys and values that the forward pass (or its rematerialization) gathered or resharded,
    and sends gradients only. In a ring, it sends keys and values around again, with their gradients. Gradients are
    summed in float32.
    """
    method, keys = _method(task, assignment), task.keys
    is_gradient, count = task.computes_kv_gradients, task.executions
    own, heads = assignment.bytes(keys, assignment.compute), _head_sharding(task, assignment)
    widening = FLOAT32_BYTES / keys.itemsize if is_gradient else 1.0
    if method.gathers_keys:
        gathered = own * mesh_size(assignment.mesh, axes)
        if is_gradient:
            yield reduce_scatter_traffic(gathered * widening, assignment, axes, count, Purpose.KEY_AND_VALUE_GRADIENTS)
        elif not (task.is_backward and method.strategy == Strategy.ALL_GATHER):
            yield all_gather_traffic(gathered, assignment, axes, count, Purpose.KEYS_AND_VALUES)
        return
    ring_axes, by_heads = _split_axes(axes, method.ulysses, assignment)
    if method.ulysses > 1:
        purpose = Purpose.HEADS_TO_POSITIONS
        if not is_gradient:
            queries_or_outputs = task.operands[0] if is_scores(task.results[0]) else task.results[0]
            size = assignment.bytes(queries_or_outputs, assignment.compute) * heads.padding_ratio
            yield all_to_all_traffic(size, assignment, by_heads, count, purpose)
        if is_gradient or not task.is_backward:
            copies = heads.total_key_heads_received / heads.key_heads * (1.0 if heads.is_even else widening)
            yield all_to_all_traffic(own * copies, assignment, by_heads, count, purpose)
    if method.ring > 1:
        passed = own * widening * heads.degree * heads.key_heads_after_duplication / heads.key_heads
        for distance, hops in Counter(_hop_distances(task, assignment)).items():
            yield permute_traffic(passed, ring_axes, count * hops, distance)


def _split_axes(axes: MeshAxes, ulysses: int, assignment: ShardingAssignment) -> tuple[MeshAxes, MeshAxes]:
    """Split the mesh axes that shard positions into the axes of the ring and the minor axes of Ulysses."""
    sizes = {mesh_size(assignment.mesh, axes[first:]): first for first in range(len(axes), -1, -1)}
    first = sizes[ulysses]
    return axes[:first], axes[first:]


def _float32_bytes(array: TracedArray, assignment: ShardingAssignment) -> float:
    """Return the bytes per device of an activation, in float32."""
    return assignment.bytes(array, assignment.compute) / array.itemsize * FLOAT32_BYTES


def _head_sharding(task: Task, assignment: ShardingAssignment) -> HeadSharding:
    """Return how Ulysses shards heads within a group of devices, given the heads of a device before the all-to-all."""
    keys, scores = task.keys, task.scores
    others = {*score_positions(scores), *assignment.activation_axes}
    local = {
        # at least one head: layouts that JAX refuses have estimates, too
        name: ceil(size / mesh_size(assignment.mesh, mapped(name, assignment.compute)))
        for name, size in scores.factors if name is not None and name not in others
    }  # fmt: skip
    key_heads = prod(size for name, size in local.items() if name in keys.axes)
    return HeadSharding(_method(task, assignment).ulysses, key_heads, prod(local.values()) // key_heads)


def _sequence_layout(task: Task, assignment: ShardingAssignment) -> SequenceLayout:
    """Return the sequence layout: which positions each device has."""
    method, scores = _method(task, assignment), task.scores
    positions = score_positions(scores)
    length = score_length(scores)
    if method.strategy == Strategy.NONE:
        return SequenceLayout(
            length, max(mesh_size(assignment.mesh, mapped(name, assignment.compute)) for name in positions)
        )
    layout = method.sequence_layout(length)
    return layout if assignment.documents is None else replace(layout, documents=assignment.documents)


def _hop_distances(task: Task, assignment: ShardingAssignment) -> list[int]:
    """Return the ring distance of each hop, without hops that the mask leaves empty."""
    layout = _sequence_layout(task, assignment)
    return [later - earlier for earlier, later in pairwise(ring_distances(layout, layout, kind_of(task).pattern))]


def _method(task: Task, assignment: ShardingAssignment) -> AttentionPlan:
    """Return the method that computes a matmul of attention."""
    return assignment.attention_of(kind_of(task))
