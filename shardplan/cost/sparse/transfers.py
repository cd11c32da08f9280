"""The transfers of Native Sparse Attention and of `attend_to_blocks`, and the sums of their gradients. Pure.

The bytes of Native Sparse Attention are those of `shardplan.decoder.parts.attention.sparse.sharding.traffic`.
"""

from collections.abc import Iterator

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.collectives import (
    Purpose,
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    reduce_scatter_traffic,
)
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.work import BlockSizes, SparseWork, given_block_work, work_of
from shardplan.decoder.parts.attention.sparse.sharding.parts import ORDERS, PositionParts
from shardplan.decoder.parts.attention.sparse.sharding.traffic import SparseTraffic, backward_traffic, forward_traffic
from shardplan.hardware import CollectiveKind
from shardplan.plan.attention_plan import SparseKernel
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.program.named_arrays import TracedArray
from shardplan.program.tasks import Task


def sparse_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the transfers of a call with sharded positions, or of its backward pass.

    A backward pass sends only gradients, because the forward pass (or its recomputation) has gathered keys and values.
    """
    work = work_of(task, assignment)
    if work.parts.devices == 1:
        return
    axes, count = work.position_axes, task.executions
    received = _received(work, task.is_sparse_gradient)
    yield from _permutes(received, axes, count)
    if task.is_sparse_gradient:
        gathered = received.gathered * work.parts.devices / (work.parts.devices - 1)
        yield reduce_scatter_traffic(gathered, assignment, axes, count, Purpose.KEY_AND_VALUE_GRADIENTS)
    else:
        yield _gather(received, assignment, axes, count)


def given_block_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the transfers of a call of `attend_to_blocks`, or of its gradient.

    Devices that share a sequence gather its keys and values, and send their gradients back in float32. On a mesh, JAX
    adds up the gradients of an array along all mesh axes that do not shard it.
    """
    assert task.blocks is not None
    work, count = given_block_work(task.blocks, task.sparse_queries, assignment), task.executions
    axes, rows = work.position_axes, work.heads * work.parts.length * work.channels
    if axes and not task.is_sparse_gradient:
        yield all_gather_traffic(rows * work.itemsize, assignment, axes, count, Purpose.KEYS_AND_VALUES)
    elif axes:
        purpose = Purpose.KEY_AND_VALUE_GRADIENTS
        yield reduce_scatter_traffic(rows * FLOAT32_BYTES, assignment, axes, count, purpose)
    if task.is_sparse_gradient and _runs_on_mesh(task, assignment):
        for gradient in task.results:
            yield from _sums_of_copies(gradient, task, assignment)


def _runs_on_mesh(task: Task, assignment: ShardingAssignment) -> bool:
    """Return whether a call of `attend_to_blocks` is a shard_map: it is sharded, or a kernel computes it."""
    assert task.blocks is not None
    return task.blocks.method is SparseKernel.KERNEL or bool(assignment.mesh_axes(task.sparse_queries.factors))


def _sums_of_copies(gradient: TracedArray, task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the all-reduce of a gradient along the mesh axes that do not shard it."""
    sharding = assignment.mesh_axes(gradient.factors)
    axes = tuple(axis for axis, size in assignment.mesh.items() if size > 1 and axis not in sharding)
    if axes:
        size = assignment.bytes(gradient, assignment.compute)
        yield all_reduce_traffic(size, assignment, axes, task.executions, Purpose.ATTENTION_SUMS)


def _permutes(received: SparseTraffic, axes: MeshAxes, count: int) -> Iterator[Traffic]:
    """Yield the permutations that send the halos of windows and of compressed blocks."""
    if received.permuted:
        size = count * received.permuted
        yield Traffic(CollectiveKind.COLLECTIVE_PERMUTE, axes, size, count, Purpose.HALOS)


def _gather(received: SparseTraffic, assignment: ShardingAssignment, axes: MeshAxes, count: int) -> Traffic:
    """Return the all-gather of keys and values: of all tokens, and of all compressed blocks."""
    devices = mesh_size(assignment.mesh, axes)
    size = received.gathered * devices / (devices - 1)
    return all_gather_traffic(size, assignment, axes, count, Purpose.KEYS_AND_VALUES)


def _received(work: SparseWork, is_backward: bool) -> SparseTraffic:
    """Return the bytes that a device receives in one execution."""
    traffic = (backward_traffic if is_backward else forward_traffic)(
        work.config, work.parts, max(1, round(work.groups)), work.itemsize
    )
    return SparseTraffic(*(work.sequences * each for each in traffic))


def gradient_sum_axes(task: Task, assignment: ShardingAssignment) -> MeshAxes:
    """Return the mesh axes over which gradients of parameters are summed: the axes that shard tokens."""
    work = work_of(task, assignment)
    used = {*work.batch_axes, *work.position_axes}
    return tuple(axis for axis in assignment.mesh if axis in used)


def parameter_gradients(task: Task) -> tuple[TracedArray, ...]:
    """Return the gradients of parameters that a task computes; empty for the forward pass."""
    if not task.is_sparse_gradient:
        return ()
    position = task.sparse_queries.majors[1]
    return tuple(array for array in task.results if position not in array.axes)


def can_shard_positions(config: BlockSizes, length: int, devices: int, order: SequenceOrder) -> bool:
    """Return whether positions can be sharded in this order without dividing a selection block among devices."""
    parts = PositionParts(length, devices, order)
    return order in ORDERS and length % (devices * parts.parts_per_device * config.selection_block) == 0
