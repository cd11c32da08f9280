"""The cost of one task on one device: matmuls, memory traffic, and the collectives that the partitioner adds.

The part that follows from the compute mapping alone is a lower bound for every mapping of stored parameters
(`device_cost_lower_bound`), which the search computes once and prunes by. `shardplan.cost.collective_rules` has the
collectives of each kind of task.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from shardplan.cost import attention, experts
from shardplan.cost.collective_rules import COMPUTE_COLLECTIVES, PARAM_COLLECTIVES, gather_of
from shardplan.cost.collectives import Traffic
from shardplan.cost.matmul import NO_MATMUL, Matmul, local_matmul
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.stage import Stage, StageName
from shardplan.cost.sparse.stages import given_block_stages, sparse_stages
from shardplan.cost.sparse.work import work_of as sparse_work_of
from shardplan.program.named_arrays import TracedArray
from shardplan.program.tasks import Task, TaskKind


@dataclass(frozen=True)
class DeviceCost:
    """The work of one device for a task, over all its executions."""

    matmul: Matmul
    memory_bytes: float
    """Bytes read from and written to HBM."""
    traffic: tuple[Traffic, ...]
    weight_bytes: float = 0.0
    """For a matmul: bytes of its weight after gathers, or of the gradient of a weight before sums."""
    reordered_weight_bytes: float = 0.0
    """Bytes of parameters that a gather must reorder, because it has several dimensions or becomes an all-reduce."""
    local_weight_bytes: float = 0.0
    """Bytes of the device's own shards of gathered parameters, which it copies into the gathered arrays."""
    ring_hops: int = 0
    """For attention: number of ring hops after the first one, over all executions."""
    hop_output_bytes: float = 0.0
    """For attention: bytes of a hop's output, in float32."""
    has_kernel: bool = False
    """For attention: whether a kernel computes it on each device alone, without writing scores to memory."""
    kernels: tuple[experts.KernelCalls, ...] = ()
    """For a block of experts: the calls of its kernels."""
    stages: tuple[Stage, ...] = ()
    """For Native Sparse Attention and attention to given blocks: the stages, one after the other."""
    sliced_weight_bytes: float = 0.0
    """For a block of experts and for a conversion: bytes of weights copied out of the stack of all layers, because
    kernels and conversions take separate arrays."""
    elementwise_bytes: float = 0.0
    """For a block of experts: bytes that elementwise work besides activation functions reads and writes."""
    unmasked_fraction: float = 1.0
    """For attention: unmasked fraction of the scores, on the device with the most unmasked scores."""


def device_cost(task: Task, assignment: ShardingAssignment, lower_bound: DeviceCost | None = None) -> DeviceCost:
    """Return the cost of `task` on one device.

    Args:
        lower_bound: the `device_cost_lower_bound` of an assignment that differs in `params` only, if already known.
    """
    lower_bound = lower_bound or device_cost_lower_bound(task, assignment)
    if not depends_on_params(task):
        return lower_bound
    memory_bytes = lower_bound.memory_bytes
    if task.stored_arrays:
        memory_bytes = task.executions * _moved_bytes(
            task, assignment, lambda array: assignment.bytes(array, assignment.params)
        )
    rule = PARAM_COLLECTIVES[task.kind]
    if rule is None:
        return replace(lower_bound, memory_bytes=memory_bytes)
    gathers = [(array, gather) for array in task.operands if (gather := gather_of(array, task, assignment))]
    # each copy is written and read again
    reordered = task.executions * sum(gather.bytes for _, gather in gathers if gather.copies > 1)
    local = task.executions * sum(assignment.bytes(array, assignment.params) for array, _ in gathers)
    traffic = (*lower_bound.traffic, *_nonempty(rule(task, assignment)))
    matmul = local_matmul(task, assignment) if task.groups > 1 else lower_bound.matmul
    return replace(
        lower_bound,
        matmul=matmul,
        memory_bytes=memory_bytes,
        reordered_weight_bytes=reordered,
        local_weight_bytes=local,
        sliced_weight_bytes=_sliced_weight_bytes(task, assignment),
        traffic=traffic,
    )


def device_cost_lower_bound(task: Task, assignment: ShardingAssignment) -> DeviceCost:
    """Return the least cost of `task` on one device for the compute mapping, over all parameter mappings."""
    # where the stored sharding decides, it divides arrays by all devices at best
    devices = math.prod(assignment.mesh.values())
    rule = COMPUTE_COLLECTIVES[task.kind]
    traffic = _nonempty(rule(task, assignment)) if rule else ()
    if task.kind == TaskKind.EXPERTS:
        return _expert_cost(task, assignment, traffic)
    if task.kind == TaskKind.SPARSE_ATTENTION:
        return _staged_cost(task, sparse_stages(task, sparse_work_of(task, assignment)), assignment, traffic)
    if task.kind == TaskKind.BLOCK_ATTENTION:
        return _staged_cost(task, given_block_stages(task, assignment), assignment, traffic)
    moved = _moved_bytes(task, assignment, lambda array: array.elements * array.itemsize / devices)
    if task.kind not in (TaskKind.CONTRACTION, TaskKind.ATTENTION):
        return DeviceCost(NO_MATMUL, task.executions * moved, traffic)
    if task.groups > 1:  # its matrices are in their stored sharding, which divides them by all devices at best
        everything = local_matmul(task, replace(assignment, params={}))
        matmul = replace(everything, count=everything.count / devices)
    else:
        matmul = local_matmul(task, assignment)
    if task.kind == TaskKind.CONTRACTION:
        return DeviceCost(matmul, task.executions * moved, traffic, weight_bytes=_weight_bytes(task, assignment))
    has_kernel = attention.has_kernel(task, assignment)
    return DeviceCost(
        matmul,
        task.executions * (moved if has_kernel else moved + attention.score_bytes(task, assignment)),
        traffic,
        ring_hops=attention.ring_hops(task, assignment),
        hop_output_bytes=attention.hop_output_bytes(task, assignment),
        has_kernel=has_kernel,
        unmasked_fraction=attention.unmasked_fraction(task, assignment),
    )


def _weight_bytes(task: Task, assignment: ShardingAssignment) -> float:
    """Return the bytes of a matmul's weight and of the gradient of a weight, in the compute sharding."""
    if task.groups > 1:
        return 0.0
    size = 0.0
    for array in (*task.operands, *task.results):
        if assignment.is_stored_like_a_parameter(array):
            size += assignment.bytes(array, assignment.compute)
    return task.executions * size


def _sliced_weight_bytes(task: Task, assignment: ShardingAssignment) -> float:
    """Return the bytes of stored weights that are copied out of the stack of all layers, over all executions."""
    match task.kind:
        case TaskKind.EXPERTS:
            return experts.sliced_weight_bytes(task, assignment)
        case TaskKind.CONVERSION:
            return task.executions * assignment.bytes(task.operands[0], assignment.params)
        case _:
            return 0.0


def _expert_cost(task: Task, assignment: ShardingAssignment, traffic: tuple[Traffic, ...]) -> DeviceCost:
    """Return the cost of a block of experts, or of its gradient, without the gathers of parameters."""
    work, count, is_wide = experts.work_of(task, assignment), task.executions, assignment.quirks.wide_rows
    return DeviceCost(
        Matmul(count * experts.products(task), rows=work.rows, inner=work.kind.embed, columns=work.mlp),
        count * experts.moved_bytes(task, work, is_wide),
        traffic,
        kernels=experts.kernel_calls(task, work),
        elementwise_bytes=count * experts.elementwise_bytes(task, work, is_wide),
    )


def _staged_cost(
    task: Task, stages: tuple[Stage, ...], assignment: ShardingAssignment, traffic: tuple[Traffic, ...]
) -> DeviceCost:
    """Return the cost of stages, and of the operands and results of their task, without the gathers of parameters."""
    moved = task.executions * _moved_bytes(task, assignment, lambda array: assignment.bytes(array, assignment.params))
    flops = sum(stage.flops for stage in stages)
    return DeviceCost(
        Matmul(flops / 2, rows=1, inner=1, columns=1),
        moved + sum(stage.bytes for stage in stages),
        traffic,
        stages=(*stages, Stage(StageName.MOVED, 0.0, moved)),
    )


def _moved_bytes(task: Task, assignment: ShardingAssignment, bytes_of_stored: Callable[[TracedArray], float]) -> float:
    """Return the bytes of the operands and results of a task on one device."""
    total = 0.0
    for array in task.moved_arrays:
        is_stored = array in task.stored_arrays
        total += bytes_of_stored(array) if is_stored else assignment.bytes(array, assignment.compute)
    return total


def _nonempty(traffic: Iterator[Traffic]) -> tuple[Traffic, ...]:
    return tuple(each for each in traffic if each.bytes > 0)


def weight_bytes(task: Task, assignment: ShardingAssignment) -> float:
    """Return executions x bytes per device (compute sharding) of the parameters that this matmul is first to use."""
    if task.kind != TaskKind.CONTRACTION or task.groups > 1:
        return 0.0
    return task.executions * sum(
        assignment.bytes(array, assignment.compute)
        for array in task.operands
        if array.weight in task.first_used_weights
    )


def depends_on_params(task: Task) -> bool:
    """Return whether the cost of `task` depends on the stored sharding of parameters."""
    return PARAM_COLLECTIVES[task.kind] is not None or bool(task.stored_arrays)
