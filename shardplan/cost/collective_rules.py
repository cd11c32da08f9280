"""The collectives that the GSPMD partitioner adds to each kind of task.

The rules are those of GSPMD (https://arxiv.org/abs/2105.04663): an array is sharded by the mesh axes that its logical
axes are mapped to; contracting a sharded axis leaves partial sums, to be added up; a parameter whose stored sharding
has more shards than its compute sharding is gathered, and its gradient is scattered back.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from shardplan.cost import attention, experts
from shardplan.cost.collectives import (
    Overlap,
    Purpose,
    Traffic,
    all_gather_traffic,
    all_reduce_traffic,
    all_to_all_traffic,
    reduce_scatter_traffic,
)
from shardplan.cost.partitioned_lookup import partition_lookup
from shardplan.cost.sharding import ShardingAssignment, WeightGather
from shardplan.cost.sparse import transfers as sparse_transfers
from shardplan.hardware import CollectiveKind
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.named_arrays import Dim, TracedArray, mapped
from shardplan.program.tasks import Task, TaskKind

SELECTION_EXCHANGES = 4
"""Number of all-to-alls, each of the result's size, in a selection: values and their indices go to the device that
selects for a row, and back (tests/compiler/test_selection.py)."""


def gather_of(array: TracedArray, task: Task, assignment: ShardingAssignment) -> WeightGather | None:
    """Return the gather of an operand for `task`; None unless it is a parameter whose first user is `task`."""
    is_new = array.weight is not None and array.weight in task.first_used_weights and task.groups == 1
    return assignment.weight_gather(array) if is_new else None


def _grouped_matmul_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the traffic of a grouped matmul (experts) with unsharded rows and parameters in their stored sharding."""
    if all(array.weight is None for array in task.operands) or not task.reduces_partial_sums:
        return  # a gradient of the parameters, of which each device computes its shard, or a part of a sum
    result = task.results[0]
    partial = assignment.mesh_axes(task.contracted, assignment.params)
    if partial:
        size = assignment.bytes(result, assignment.params)
        yield all_reduce_traffic(size, assignment, partial, task.executions, Purpose.PARTIAL_SUMS, task.label)
    used = assignment.mesh_axes(result.factors)
    gathered = tuple(axis for axis in assignment.mesh_axes(result.factors, assignment.params) if axis not in used)
    if gathered and result not in task.routed:
        size = assignment.bytes(result, assignment.compute)
        yield all_gather_traffic(size, assignment, gathered, task.executions, Purpose.GROUPED_RESULTS, task.label)


def _collective_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the collective that a shard_map calls, over its mesh axes: the sum of a gradient, or an exchange."""
    axes = _collective_axes(task, assignment)
    if not axes or _sums_gradient(task, assignment):
        return
    # where the step is traced, mesh axes have size 1: results have the shapes of operands, and the better names
    size, count = sum(assignment.bytes(array, assignment.compute) for array in task.results), task.executions
    kind = task.collective
    match kind:
        case CollectiveKind.ALL_REDUCE:
            yield all_reduce_traffic(size, assignment, axes, count, Purpose.SUMS_OVER_DEVICES, task.label)
        case CollectiveKind.REDUCE_SCATTER:
            yield reduce_scatter_traffic(size, assignment, axes, count, Purpose.SUMS_OVER_DEVICES, task.label)
        case CollectiveKind.ALL_GATHER:
            gathered = size * mesh_size(assignment.mesh, axes)
            yield all_gather_traffic(gathered, assignment, axes, count, Purpose.EXCHANGES, task.label)
        case CollectiveKind.ALL_TO_ALL:
            yield all_to_all_traffic(size, assignment, axes, count, Purpose.EXCHANGES, task.label)
        case CollectiveKind.COLLECTIVE_PERMUTE:
            yield Traffic(kind, axes, count * size, count, Purpose.EXCHANGES, task.label)
        case _:
            raise ValueError(f"no rule for the collective {kind}")


def _collective_axes(task: Task, assignment: ShardingAssignment) -> MeshAxes:
    """Return the mesh axes of size > 1 that a collective spans.

    In the traced program, logical axes stand for mesh axes, so that a collective names all of them. Results that each
    device computes by itself are summed only along the mesh axes that do not shard the result.
    """
    sharding = assignment.mesh_axes(task.results[0].factors) if task.is_local else ()
    named = [axis for axis in task.mesh_axes if axis not in sharding]
    return tuple(axis for axis, size in assignment.mesh.items() if size > 1 and axis in named)


def _sums_gradient(task: Task, assignment: ShardingAssignment) -> bool:
    """Return whether a collective sums the gradients of a parameter that the devices computed separately."""
    is_sum = task.is_local and task.collective == CollectiveKind.ALL_REDUCE
    return is_sum and assignment.is_stored_like_a_parameter(task.results[0])


def _parameter_collective_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the all-reduce of a parameter's gradient, to which each device contributes a part."""
    if _sums_gradient(task, assignment):
        yield from _gradient_sum_traffic(task, _collective_axes(task, assignment), assignment)


def _matmul_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the traffic of a matmul's activations, resharded operands and partial sums; nothing for grouped matmuls."""
    if task.groups > 1:
        return
    for operand in task.operands:
        if operand.weight is None and _contracts_flattened(task, assignment):
            yield from _flattened_operand_traffic(task, operand, assignment)
    partial, result = _partial_sum_axes(task, assignment), task.results[0]
    if partial and not assignment.is_stored_like_a_parameter(result):
        size = assignment.bytes(result, assignment.compute)
        yield all_reduce_traffic(size, assignment, partial, task.executions, Purpose.PARTIAL_SUMS, task.label)


def _parameter_matmul_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the traffic of a matmul's parameters: gathers, and partial sums of a parameter's gradient."""
    if task.groups > 1:
        yield from _grouped_matmul_traffic(task, assignment)
        return
    yield from _weight_gather_traffic(task, assignment)
    partial = _partial_sum_axes(task, assignment)
    if partial and assignment.is_stored_like_a_parameter(task.results[0]):
        yield from _gradient_sum_traffic(task, partial, assignment)


def _weight_gather_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the gather of each parameter whose first user is this task."""
    for operand in task.operands:
        gather = gather_of(operand, task, assignment)
        if gather:
            subject = str(operand.weight)
            overlap = Overlap.INDEPENDENT
            if task.has_first_weight and assignment.quirks.gathers_late:
                overlap = Overlap.NONE
            elif task.kind == TaskKind.EXPERTS:
                overlap = Overlap.KERNELS
            elif gather.num_dimensions > 1:
                overlap = Overlap.REORDERED
            yield all_gather_traffic(
                gather.bytes, assignment, gather.axes, task.executions, Purpose.WEIGHTS, subject, overlap
            )


def _parameter_expert_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the all-gathers of experts' stored weights, and the sums of their gradients over tokens."""
    yield from _weight_gather_traffic(task, assignment)
    for gradient in experts.ExpertOperands.of(task).weight_gradients:
        yield from _gradient_sum_traffic(task, experts.gradient_sum_axes(task, assignment), assignment, gradient)


def _parameter_sparse_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the gathers of the parameters of Native Sparse Attention, and the sums of their gradients over tokens."""
    yield from _weight_gather_traffic(task, assignment)
    for gradient in sparse_transfers.parameter_gradients(task):
        axes = sparse_transfers.gradient_sum_axes(task, assignment)
        if axes:
            yield from _gradient_sum_traffic(task, axes, assignment, gradient)


def _gradient_sum_traffic(
    task: Task, partial: MeshAxes, assignment: ShardingAssignment, gradient: TracedArray | None = None
) -> Iterator[Traffic]:
    """Yield the sum of a parameter's gradient along the mesh axes `partial`; each device keeps a shard of it.

    Args:
        gradient: default: the result of the task.
    """
    result, count = gradient or task.results[0], task.executions
    # each device needs its shard of a gradient along the mesh axes that shard it, and the sum along all others
    size = assignment.bytes(result, assignment.compute)
    stored = assignment.mesh_axes(result.factors, assignment.params)
    scattered = tuple(axis for axis in partial if axis in stored)
    summed = tuple(axis for axis in partial if axis not in stored)
    if assignment.num_dimensions(result, scattered) > 1:  # no reduce-scatter shards two dimensions
        yield all_reduce_traffic(size, assignment, partial, count, Purpose.WEIGHT_GRADIENTS, task.label)
        return
    if scattered:
        yield reduce_scatter_traffic(size, assignment, scattered, count, Purpose.WEIGHT_GRADIENTS, task.label)
    if summed:
        part = size / mesh_size(assignment.mesh, scattered)
        yield all_reduce_traffic(part, assignment, summed, count, Purpose.WEIGHT_GRADIENTS, task.label)


def _partial_sum_axes(task: Task, assignment: ShardingAssignment) -> MeshAxes:
    """Return the mesh axes along which this task adds up the devices' partial sums of its result."""
    if not task.reduces_partial_sums:
        return ()
    kept = {
        axis
        for operand in (task.operands if _contracts_flattened(task, assignment) else ())
        for dim in operand.dims
        if (flat := _flattened_axis(dim, task, assignment)) is not None and _keeps_sharding(dim, flat, assignment)
        for axis in assignment.mesh_axes(dim)
    }
    summed = kept | {*assignment.mesh_axes(task.contracted)}
    return tuple(axis for axis in assignment.mesh if axis in summed)


def _flattened_operand_traffic(task: Task, operand: TracedArray, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """For an operand, yield the gather of each flattened dimension that does not keep its sharding."""
    for dim in operand.dims:
        flat = _flattened_axis(dim, task, assignment)
        axes = assignment.mesh_axes(dim)
        if flat is not None and axes and not _keeps_sharding(dim, flat, assignment):
            unsharded = {name: axes for name, axes in assignment.compute.items() if name not in dict(dim)}
            size, subject = assignment.bytes(operand, unsharded), f"{flat} of {task.label}"
            yield all_gather_traffic(size, assignment, axes, task.executions, Purpose.FLATTENED_AXES, subject)


def _contracts_flattened(task: Task, assignment: ShardingAssignment) -> bool:
    """Return whether `task` contracts an axis that other tasks split into several; see `_flattened_axis`."""
    return any(name in assignment.merged_axes for name, _ in task.contracted)


def _flattened_axis(dim: Dim, task: Task, assignment: ShardingAssignment) -> str | None:
    """Return the logical axis into which a dimension of an operand is flattened, if `task` contracts it."""
    flat = next((name for name, parts in assignment.merged_axes.items() if parts == dim), None)
    is_contracted = flat is not None and (flat, math.prod(size for _, size in dim)) in task.contracted
    return flat if is_contracted else None


def _keeps_sharding(dim: Dim, flat: str, assignment: ShardingAssignment) -> bool:
    """Return whether the mapping of a flattened axis keeps the sharding that the dimension's major axis has.

    It does if no minor axis is sharded, and the flattened axis is mapped to the first of the same mesh axes, or none.
    """
    major, own = mapped(dim[0][0], assignment.compute), mapped(flat, assignment.compute)
    return len(major) == len(assignment.mesh_axes(dim)) and own == major[: len(own)]


def _lookup_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the traffic of a lookup in a sharded parameter; nothing for tables that are not parameters."""
    table, result = task.operands[0], task.results[0]
    if table.weight is None:
        return
    count, purpose, subject = task.executions, Purpose.LOOKUPS, table.weight
    for step in partition_lookup(table, result, assignment).steps:
        size, axes = step.bytes_after, step.axes
        match step.kind:
            case CollectiveKind.ALL_GATHER:
                traffic = all_gather_traffic(size, assignment, axes, count, purpose, subject)
            case CollectiveKind.ALL_REDUCE:
                traffic = all_reduce_traffic(size, assignment, axes, count, purpose, subject)
            case CollectiveKind.ALL_TO_ALL:
                traffic = all_to_all_traffic(size, assignment, axes, count, purpose, subject)
            case _:
                raise ValueError(f"no rule for the collective {step.kind}")
        # where mesh axes are split, fewer devices exchange data than lie along them
        others, others_along_axes = 1 - 1 / step.devices, 1 - 1 / mesh_size(assignment.mesh, axes)
        yield replace(traffic, bytes=traffic.bytes * others / others_along_axes)


def _scatter_add_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the traffic of the gradient of a lookup in a parameter; nothing for other tables."""
    result, rows = task.results[0], task.operands[-1]
    if not assignment.is_stored_like_a_parameter(result):
        return
    token_axes = assignment.mesh_axes(tuple(f for f in rows.factors if f[0] not in result.axes))
    columns = assignment.mesh_axes(tuple(f for f in result.factors if f[0] in rows.axes), assignment.params)
    table_rows = assignment.mesh_axes(tuple(f for f in result.factors if f[0] not in rows.axes), assignment.params)
    size, count, purpose = assignment.bytes(rows, assignment.compute), task.executions, Purpose.LOOKUP_GRADIENTS
    resharded = tuple(axis for axis in token_axes if axis in columns)
    gathered = tuple(axis for axis in token_axes if axis in table_rows)
    summed = tuple(axis for axis in token_axes if axis not in (*resharded, *gathered))
    if resharded:
        yield all_to_all_traffic(size, assignment, resharded, count, purpose)
    if gathered:
        yield all_gather_traffic(size * mesh_size(assignment.mesh, gathered), assignment, gathered, count, purpose)
    if summed:
        yield all_reduce_traffic(assignment.bytes(result), assignment, summed, count, purpose)


def _reshard_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the all-gather of an array that becomes replicated at the start or the end of a shard_map."""
    for before, after in zip(task.operands, task.results, strict=True):
        kept = {axis for axes in assignment.dimension_mesh_axes(after, assignment.compute) for axis in axes}
        # of a flattened dimension, the sharding of its minor axis does not even reach the flattened one
        gathered = tuple(axis for axis in assignment.mesh_axes(before.factors) if axis not in kept)
        if gathered:
            size = assignment.bytes(after, assignment.compute)
            yield all_gather_traffic(size, assignment, gathered, task.executions, Purpose.REPLICATION, task.label)


def _selection_traffic(task: Task, assignment: ShardingAssignment) -> Iterator[Traffic]:
    """Yield the traffic of a top-k along a sharded dimension, where each device selects candidates from its shard.

    The compiler exchanges the candidates so that each device selects the result of some rows, and then gathers all
    rows.
    """
    axes = assignment.mesh_axes(task.contracted)
    if axes:
        size, count = assignment.bytes(task.results[0], assignment.compute), task.executions
        exchanged = SELECTION_EXCHANGES * size
        yield all_to_all_traffic(exchanged, assignment, axes, count, Purpose.SELECTIONS, task.label)
        yield all_gather_traffic(size, assignment, axes, count, Purpose.SELECTIONS, task.label)


CollectiveRule = Callable[[Task, ShardingAssignment], Iterator[Traffic]]
COMPUTE_COLLECTIVES: dict[TaskKind, CollectiveRule | None] = {
    TaskKind.CONTRACTION: _matmul_traffic,
    TaskKind.ATTENTION: attention.attention_traffic,
    TaskKind.LOOKUP: None,
    TaskKind.SCATTER_ADD: None,
    TaskKind.SELECTION: _selection_traffic,
    TaskKind.RESHARD: _reshard_traffic,
    TaskKind.COLLECTIVE: _collective_traffic,
    TaskKind.EXPERTS: experts.expert_traffic,
    TaskKind.SPARSE_ATTENTION: sparse_transfers.sparse_traffic,
    TaskKind.BLOCK_ATTENTION: sparse_transfers.given_block_traffic,
    TaskKind.CONVERSION: None,
    TaskKind.HOST_COPY: None,
    TaskKind.ELEMENTWISE: None,
}
"""Kind of task -> rule for its collectives that depend on the compute mapping alone; None without any."""
PARAM_COLLECTIVES: dict[TaskKind, CollectiveRule | None] = {
    TaskKind.CONTRACTION: _parameter_matmul_traffic,
    TaskKind.ATTENTION: None,
    TaskKind.LOOKUP: _lookup_traffic,
    TaskKind.SCATTER_ADD: _scatter_add_traffic,
    TaskKind.SELECTION: None,
    TaskKind.RESHARD: _weight_gather_traffic,
    TaskKind.COLLECTIVE: _parameter_collective_traffic,
    TaskKind.EXPERTS: _parameter_expert_traffic,
    TaskKind.SPARSE_ATTENTION: _parameter_sparse_traffic,
    TaskKind.BLOCK_ATTENTION: None,
    TaskKind.CONVERSION: _weight_gather_traffic,
    TaskKind.HOST_COPY: None,
    TaskKind.ELEMENTWISE: None,
}
"""Kind of task -> rule for its collectives that depend on the parameter mapping too; None without any."""
