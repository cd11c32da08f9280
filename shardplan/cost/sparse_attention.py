"""The cost of Native Sparse Attention on one device, by the method of its selected branch. Pure.

Symbols of a device: B sequences, T positions of S, G groups with R heads of queries each, D channels of a key and a
value, b bytes of an element; C compressed and J selection blocks of the sequence; block l, stride d, selection block
l', n selected blocks, window w, h hidden elements of the compression; q queries of a chunk.

| stage | FLOPs, forward | bytes through HBM |
|---|---|---|
| compression | 2 B G T / d (l D h + h D) | the tokens of all blocks, each in l / d of them, written and read |
| compressed branch | 2 B T G R C D | float32 scores B T G R C, `COMPRESSED_PASSES` times |
| choice of blocks | - | float32 importance B T G J, `CHOICE_PASSES` times |
| selected, dense mask | 2 B T G R S D | float32 scores B T G R S, `SELECTED_PASSES` times |
| selected, gathered | 2 B T G R n l' D | scores as above, with n l' for S; the rows B T G n l' D, in float32 and in b |
| window | 2 B T G R (q + w - 1) D | scores as above, with q + w - 1 for S |

A stage takes the longer of its FLOPs at peak and its bytes at HBM bandwidth. A gradient has two matmuls for each, and
computes the forward pass again where a device has more than one chunk of queries. XLA computes masked scores too. To
add a method, such as a kernel, add a case to `selected_keys`, `_selected_stage` and `gathered_bytes`.

Transfers are those of `shardplan.decoder.parts.attention.sparse.traffic`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, assert_never

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.collectives import Purpose, Traffic, all_gather_traffic, reduce_scatter_traffic
from shardplan.cost.sharding import ShardingAssignment
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import QUERIES_PER_CHUNK
from shardplan.decoder.parts.attention.sparse.config import Compression, NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.parts import ORDERS, PositionParts
from shardplan.decoder.parts.attention.sparse.traffic import SparseTraffic, backward_traffic, forward_traffic
from shardplan.hardware import CollectiveKind
from shardplan.plan.attention_plan import SparseKernel
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.live_buffers import BufferRole, LiveBuffer
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.named_arrays import TracedArray, size_of
from shardplan.program.tasks import Task

COMPRESSED_PASSES, SELECTED_PASSES, CHOICE_PASSES = 12.5, 7.5, 17.0
"""Number of times that float32 scores, or the importance of blocks, go through HBM in a forward pass: as the compiler's
cycles for v5p have it, 8K to 64K tokens, 64 heads, 4 groups (docs/log.md)."""
GATHERED_PASSES = 2
"""Number of times that gathered rows go through HBM in each of float32 and the type of queries: written and read."""
KEPT_OF_GRADIENT = 3
"""Arrays of a gradient for each one that the forward pass keeps until it adds the branches: the same one, computed
again, its gradient, and that of the sum."""
GRADIENT_PASSES = 2.0
"""Passes of a gradient for each of the forward pass."""


class Stage(NamedTuple):
    """A part of the work, whose FLOPs and bytes overlap with each other."""

    flops: float
    bytes: float

    def times(self, factor: float) -> "Stage":
        """Return several of them."""
        return Stage(factor * self.flops, factor * self.bytes)


@dataclass(frozen=True)
class SparseWork:
    """What one device does for a call of Native Sparse Attention, forward."""

    config: NativeSparseConfig
    method: SparseKernel
    itemsize: int
    sequences: float
    """Sequences of the device."""
    groups: float
    """Groups of the device."""
    parts: PositionParts
    batch_axes: MeshAxes
    """Mesh axes that shard the batch."""
    position_axes: MeshAxes
    """Mesh axes that shard positions."""

    @cached_property
    def positions(self) -> float:
        """Positions of the device."""
        return self.parts.length / self.parts.devices

    @cached_property
    def chunk(self) -> float:
        """Queries of a chunk."""
        return min(self.positions, QUERIES_PER_CHUNK)

    @cached_property
    def has_chunks(self) -> bool:
        """Whether the device has more than one chunk of queries, so that gradients compute each again."""
        return self.positions > QUERIES_PER_CHUNK

    @cached_property
    def rows(self) -> float:
        """Pairs of a query and a group."""
        return self.sequences * self.positions * self.groups

    @cached_property
    def channels(self) -> int:
        """Channels of a key and a value."""
        return self.config.key_size + self.config.value_size

    @cached_property
    def compressed_blocks(self) -> int:
        """Compressed blocks of the sequence."""
        return self.config.compressed_blocks(self.parts.length)

    @cached_property
    def window_keys(self) -> float:
        """Keys of a query in the window branch, masked ones among them."""
        return self.chunk + self.config.window - 1

    @cached_property
    def selected_keys(self) -> int:
        """Keys of a query in the selected branch, masked ones among them."""
        match self.method:
            case SparseKernel.GATHERED_BLOCKS:
                return self.config.selected * self.config.selection_block
            case SparseKernel.DENSE_MASK:
                return self.parts.length
            case _:
                assert_never(self.method)

    def stages(self) -> Iterator[Stage]:
        """Yield the stages of the forward pass."""
        config = self.config
        yield self._compression_stage()
        yield self._attention_stage(self.compressed_blocks, COMPRESSED_PASSES)
        yield Stage(0.0, CHOICE_PASSES * FLOAT32_BYTES * self.rows * config.selection_blocks(self.parts.length))
        yield self._selected_stage()
        yield self._attention_stage(self.window_keys, SELECTED_PASSES)

    def _attention_stage(self, keys: float, passes: float) -> Stage:
        """Return attention of every query to a number of keys that are not gathered for each query."""
        scores = self.rows * self.config.heads_per_group * keys
        return Stage(2 * scores * self.channels, passes * FLOAT32_BYTES * scores)

    def _selected_stage(self) -> Stage:
        stage = self._attention_stage(self.selected_keys, SELECTED_PASSES)
        match self.method:
            case SparseKernel.GATHERED_BLOCKS:
                gathered = self.rows * self.selected_keys * self.channels
                return stage._replace(bytes=stage.bytes + GATHERED_PASSES * gathered * (FLOAT32_BYTES + self.itemsize))
            case SparseKernel.DENSE_MASK:
                return stage
            case _:
                assert_never(self.method)

    def _compression_stage(self) -> Stage:
        config, tokens = self.config, self.rows
        blocks, elements = tokens / config.stride, tokens * config.strides_per_block * self.channels
        flops = 0.0
        for size in (config.key_size, config.value_size):
            if config.compression is Compression.LINEAR:
                flops += 2 * blocks * config.block * size * size
            elif config.compression is Compression.MLP:
                hidden = config.hidden_size(size)
                flops += 2 * blocks * (config.block * size * hidden + hidden * size)
        return Stage(flops, 2 * self.itemsize * elements)

    def gathered_bytes(self) -> float:
        """Bytes of the rows that are gathered for a chunk of queries, in float32 and in a narrower type of queries."""
        match self.method:
            case SparseKernel.GATHERED_BLOCKS:
                narrow = self.itemsize if self.itemsize < FLOAT32_BYTES else 0
                rows = self.sequences * self.chunk * self.groups * self.selected_keys
                return rows * self.channels * (FLOAT32_BYTES + narrow)
            case SparseKernel.DENSE_MASK:
                return 0.0
            case _:
                assert_never(self.method)

    def score_bytes(self) -> float:
        """Bytes of the float32 scores and weights of a chunk, in the branch with most of them."""
        heads = self.sequences * self.chunk * self.groups * self.config.heads_per_group
        return 2 * FLOAT32_BYTES * heads * max(self.selected_keys, self.compressed_blocks, self.window_keys)

    def keys_bytes(self) -> float:
        """Bytes of the float32 keys and values of the whole sequence: of all tokens, and of compressed blocks."""
        rows = self.sequences * self.groups * (self.parts.length + self.compressed_blocks)
        return FLOAT32_BYTES * rows * self.channels

    def kept_bytes(self) -> float:
        """Bytes of what exists until the branches are added: rotated queries, outputs, importance, and the sum."""
        config = self.config
        heads = self.rows * config.heads_per_group
        queries, outputs = heads * config.key_size * self.itemsize, 3 * heads * config.value_size * self.itemsize
        importance = self.rows * config.selection_blocks(self.parts.length) * FLOAT32_BYTES
        return queries + outputs + importance + heads * config.value_size * FLOAT32_BYTES

    def received(self, is_backward: bool) -> SparseTraffic:
        """Return the bytes of transfers of one execution."""
        traffic = (backward_traffic if is_backward else forward_traffic)(
            self.config, self.parts, max(1, round(self.groups)), self.itemsize
        )
        return SparseTraffic(*(self.sequences * each for each in traffic))


def work_of(task: Task, assignment: ShardingAssignment) -> SparseWork:
    """Return what one device does for a call, or for the call that a task computes the gradient of."""
    assert task.attention is not None
    return sparse_work(task.attention, task.sparse_queries, assignment)


def sparse_work(kind: AttentionKind, queries: TracedArray, assignment: ShardingAssignment) -> SparseWork:
    """Return what one device does for a call.

    Args:
        queries: {batch, position, groups, heads of a group, channels}.
    """
    assert kind.sparse is not None
    plan = assignment.attention_of(kind)
    batch_axes, position_axes, group_axes, *_ = (
        tuple(axis for axis in axes if assignment.mesh[axis] > 1)
        for axes in assignment.dimension_mesh_axes(queries, assignment.compute)
    )
    batch, length = size_of(queries.dims[0]), size_of(queries.dims[1])
    return SparseWork(
        config=kind.sparse,
        method=plan.sparse_kernel,
        itemsize=queries.itemsize,
        sequences=batch / mesh_size(assignment.mesh, batch_axes),
        groups=kind.sparse.groups / mesh_size(assignment.mesh, group_axes),
        parts=PositionParts(length, mesh_size(assignment.mesh, position_axes), plan.layout),
        batch_axes=batch_axes,
        position_axes=position_axes,
    )


def stages(task: Task, work: SparseWork) -> tuple[Stage, ...]:
    """Return the stages of all executions of a task."""
    factor = 1.0
    if task.is_sparse_gradient:
        factor = GRADIENT_PASSES + (1.0 if work.has_chunks else 0.0)
    return tuple(stage.times(factor * task.executions) for stage in work.stages())


def model_flops(task: Task) -> float:
    """Return the FLOPs of a call over all devices, without scores that masks remove.

    A query at t attends to the compressed blocks and the tokens before it; `selected` blocks, and a window.
    """
    assert task.attention is not None
    config = task.attention.sparse
    assert config is not None
    batch, length = (size_of(dim) for dim in task.sparse_queries.dims[:2])
    alone = SparseWork(config, SparseKernel.DENSE_MASK, 2, batch, config.groups, PositionParts(length), (), ())
    compression, *_ = alone.stages()
    selected, window = min(length, config.selected * config.selection_block), min(length, config.window)
    # the mean over t of min(t + 1, limit) keys
    means = [limit - limit * (limit - 1) / (2 * length) for limit in (selected, window)]
    keys = sum(means) + alone.compressed_blocks / 2
    attention = 2 * alone.rows * config.heads_per_group * keys * alone.channels
    return task.executions * (compression.flops + attention)


def sparse_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the transfers of a call whose positions are sharded, or of its gradient."""
    work = work_of(task, assignment)
    if work.parts.devices == 1:
        return
    axes, count = work.position_axes, task.executions
    received = work.received(task.is_sparse_gradient)
    if task.is_sparse_gradient:
        # what the forward pass gathers is needed again
        again = work.received(is_backward=False)
        yield from _permutes(again, axes, count)
        yield _gather(again, assignment, axes, count)
    yield from _permutes(received, axes, count)
    if task.is_sparse_gradient:
        gathered = received.gathered * work.parts.devices / (work.parts.devices - 1)
        yield reduce_scatter_traffic(gathered, assignment, axes, count, Purpose.KEY_AND_VALUE_GRADIENTS)
    else:
        yield _gather(received, assignment, axes, count)


def _permutes(received: SparseTraffic, axes: MeshAxes, count: int) -> Iterator[Traffic]:
    """Yield the halos of windows and of compressed blocks."""
    if received.permuted:
        size = count * received.permuted
        yield Traffic(CollectiveKind.COLLECTIVE_PERMUTE, axes, size, count, Purpose.HALOS)


def _gather(received: SparseTraffic, assignment: ShardingAssignment, axes: MeshAxes, count: int) -> Traffic:
    """Return the gather of keys and values: those of all tokens, and of all compressed blocks."""
    devices = mesh_size(assignment.mesh, axes)
    size = received.gathered * devices / (devices - 1)
    return all_gather_traffic(size, assignment, axes, count, Purpose.KEYS_AND_VALUES)


def gradient_sum_axes(task: Task, assignment: ShardingAssignment) -> MeshAxes:
    """Return the mesh axes along which devices have parts of the gradients of parameters: those of other tokens."""
    work = work_of(task, assignment)
    used = {*work.batch_axes, *work.position_axes}
    return tuple(axis for axis in assignment.mesh if axis in used)


def parameter_gradients(task: Task) -> tuple[TracedArray, ...]:
    """Return the gradients of parameters that a task computes; none in the forward pass."""
    if not task.is_sparse_gradient:
        return ()
    position = task.sparse_queries.majors[1]
    return tuple(array for array in task.results if position not in array.axes)


def sparse_buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Bytes of the buffers of a call while it runs, beyond its operands and results.

    These are the float32 keys and values of the sequence, rotated queries, the outputs of branches, the importance of
    blocks, and the scores and gathered rows of one chunk of queries. A gradient has gradients of them, too; those of
    gathered rows are added up at once. docs/log.md compares it with XLA's temporaries.
    """
    assert buffer.attention is not None
    work = sparse_work(buffer.attention, buffer.array, assignment)
    if buffer.role is BufferRole.SPARSE_GRADIENT:
        kept = KEPT_OF_GRADIENT * work.kept_bytes()
        return 2 * work.keys_bytes() + kept + 2 * work.score_bytes() + work.gathered_bytes()
    return work.keys_bytes() + work.kept_bytes() + work.score_bytes() + work.gathered_bytes()


def can_shard_positions(config: NativeSparseConfig, length: int, devices: int, order: SequenceOrder) -> bool:
    """Return whether devices can share the positions of a sequence, with no selection block on two of them."""
    parts = PositionParts(length, devices, order)
    return order in ORDERS and length % (devices * parts.parts_per_device * config.selection_block) == 0
