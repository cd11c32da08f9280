"""Estimates the time of a step under a mapping, task by task. Pure.

A matmul takes its FLOPs at peak, or its bytes from HBM where that is longer, and elementwise work takes its bytes; both
times a factor for what the compiler's own cycles add to that. Work that only moves elements takes its bytes alone, and
kernels, lookups and scatters take their rooflines, since the compiler has no cycles for them. Gathers of parameters
depend on no other task, and overlap with matmuls as far as the compiler's options allow; tasks wait for all other
collectives. The factors are fitted to the compiler (`shardplan.cost.calibration`); the rooflines are those of
https://jax-ml.github.io/scaling-book.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, assert_never

from shardplan.cost.attention import (
    COMPILED_HOP_SECONDS,
    EXCHANGE_SLOWDOWN,
    FLOAT32_BYTES,
    MEASURED_HOP_SECONDS,
    MERGE_PASSES,
    kind_of,
)
from shardplan.cost.calibration import Calibration
from shardplan.cost.collectives import Overlap, Purpose, Traffic
from shardplan.cost.gspmd import DeviceCost, device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.cost.sparse.stages import given_block_flops
from shardplan.cost.sparse.stages import model_flops as sparse_model_flops
from shardplan.hardware import CollectiveKind, MeshPlacement, Slice, place_mesh
from shardplan.model.registry import Model
from shardplan.plan.workload.workload import Workload
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.step_trace import forward_workload, plan_step
from shardplan.program.tasks import Step, Task, TaskKind

WAITED_PART = 0.2
"""Fraction of the gathers of parameters along two dimensions that overlap with nothing: the best fit to the steps of
one program per generation (docs/log.md, factors for libtpu 0.0.48)."""
KERNEL_PRODUCTS_OF_GRADIENTS = 7 / 4
"""Matmuls that attention's backward kernels run / the four matmuls that its gradients need: the kernel for dq runs
three, the kernel for dk and dv four, because each recomputes the scores."""


@dataclass(frozen=True)
class TaskSeconds:
    """Time of a task, over all its executions; equal on every device."""

    compute: float
    exposed: float
    """Seconds of collectives that do not overlap with compute."""

    @property
    def total(self) -> float:
        """Seconds of compute and of exposed collectives."""
        return self.compute + self.exposed


def transfer_seconds(traffic: Traffic, placement: MeshPlacement) -> float:
    """Return the seconds of a collective over the links between its devices (`shardplan.hardware.mesh_placement`)."""
    if traffic.kind == CollectiveKind.COLLECTIVE_PERMUTE:
        return placement.shift_cost(traffic.mesh_axes, traffic.distance).seconds(traffic.bytes, traffic.count)
    seconds = placement.seconds(traffic.kind, traffic.mesh_axes, traffic.bytes, traffic.count)
    return EXCHANGE_SLOWDOWN * seconds if traffic.purpose is Purpose.HEADS_TO_POSITIONS else seconds


def compute_seconds(task: Task, cost: DeviceCost, hardware: Slice, calibration: Calibration) -> float:
    """Return the seconds of a task's compute and HBM traffic on one device, whose work for the task is `cost`."""
    flops_rate, bandwidth = hardware.generation.flops, hardware.generation.hbm_bandwidth
    memory_seconds = cost.memory_bytes / bandwidth
    match task.kind:
        case TaskKind.CONTRACTION:
            if task.batched and min(cost.matmul.rows, cost.matmul.columns) == 1:
                return calibration.vectors * memory_seconds  # matrix-vector products do not use the matrix unit
            matmul_seconds = max(cost.matmul.unit_flops(hardware.generation.matrix_unit) / flops_rate, memory_seconds)
            if task.groups > 1:  # a kernel
                return matmul_seconds + calibration.elementwise * _conversion_bytes(task, cost, calibration) / bandwidth
            copied = calibration.copying * (cost.reordered_weight_bytes + cost.local_weight_bytes)
            passed = calibration.elementwise * calibration.weight_passes * cost.weight_bytes
            return calibration.products * matmul_seconds + (copied + passed) / bandwidth
        case TaskKind.ATTENTION:
            if task.is_in_gradient_kernels and cost.has_kernel:
                return 0.0
            flops = cost.matmul.kernel_flops if cost.has_kernel else cost.matmul.flops
            products = KERNEL_PRODUCTS_OF_GRADIENTS if task.is_backward and cost.has_kernel else 1.0
            attention_seconds = products * cost.unmasked_fraction * flops / flops_rate
            hop_seconds = MEASURED_HOP_SECONDS.get(hardware.generation.name, COMPILED_HOP_SECONDS)
            merge_seconds = cost.ring_hops * (hop_seconds + MERGE_PASSES * cost.hop_output_bytes / bandwidth)
            if not cost.has_kernel:
                attention_seconds = max(attention_seconds, cost.unmasked_fraction * memory_seconds)
            return merge_seconds + attention_seconds
        case TaskKind.EXPERTS:
            kernel_seconds = sum(calls.seconds(hardware.generation) for calls in cost.kernels)
            copied = calibration.copying * (cost.reordered_weight_bytes + cost.local_weight_bytes)
            copied += calibration.slicing * cost.sliced_weight_bytes
            elementwise = calibration.elementwise * cost.elementwise_bytes
            return kernel_seconds + memory_seconds + (elementwise + copied) / bandwidth
        case TaskKind.SPARSE_ATTENTION | TaskKind.BLOCK_ATTENTION:
            copied = calibration.copying * (cost.reordered_weight_bytes + cost.local_weight_bytes) / bandwidth
            return copied + sum(stage.seconds(hardware.generation) for stage in cost.stages)
        case TaskKind.LOOKUP | TaskKind.SCATTER_ADD | TaskKind.RESHARD | TaskKind.COLLECTIVE:
            return memory_seconds
        case TaskKind.CONVERSION:
            return calibration.elementwise * memory_seconds + calibration.slicing * cost.sliced_weight_bytes / bandwidth
        case TaskKind.HOST_COPY:
            return 0.0  # beside the core
        case TaskKind.SELECTION | TaskKind.ELEMENTWISE:
            return memory_seconds if task.is_move else calibration.elementwise * memory_seconds
        case _:
            assert_never(task.kind)


def _conversion_bytes(task: Task, cost: DeviceCost, calibration: Calibration) -> float:
    """Return the bytes read and written to convert rows that a kernel of grouped matmuls wrote in float32."""
    rows = task.results[0]
    if not calibration.quirks.wide_rows or task.operands[1].weight is None or rows.itemsize >= FLOAT32_BYTES:
        return 0.0
    matmul = cost.matmul
    return matmul.count * matmul.rows * matmul.columns * (FLOAT32_BYTES + rows.itemsize)


def task_seconds(task: Task, cost: DeviceCost, placement: MeshPlacement, calibration: Calibration) -> TaskSeconds:
    """Return the compute and exposed seconds of a task with the work `cost`; host copies count as exposed."""
    compute = compute_seconds(task, cost, placement.hardware, calibration)
    if not cost.traffic and task.kind != TaskKind.HOST_COPY:
        return TaskSeconds(compute, 0.0)  # as below, but faster: most tasks transfer nothing
    times = _collective_times(task, cost, placement, calibration, compute)
    exposed = host_copy_seconds(task, cost, placement.hardware)
    for each in times:
        exposed += each.waited * each.seconds
    return TaskSeconds(compute, exposed + sum(_not_hidden(_seconds_behind(times)).values()))


def host_copy_seconds(task: Task, cost: DeviceCost, hardware: Slice) -> float:
    """Return the seconds of a copy between device and host memory; 0 for other tasks."""
    if task.kind != TaskKind.HOST_COPY:
        return 0.0
    return cost.memory_bytes / 2 / hardware.generation.host_bandwidth  # read in one memory, and written in the other


def seconds_beside(flops: float, hardware: Slice, calibration: Calibration) -> float:
    """Return the seconds of matmuls with `flops` FLOPs over all devices; transfers can hide behind them."""
    return calibration.products * flops / hardware.devices / hardware.generation.flops


def exposed_host_copies(
    copies: Iterable[tuple[Task, float]], hardware: Slice, calibration: Calibration
) -> Iterator[float]:
    """Yield the exposed seconds of each copy between device and host, which no computation hides.

    The copies of a loop run one after the other, the most urgent first, and each hides behind the matmuls before it is
    due. The largest delay is divided among the copies in proportion to their seconds.

    Args:
        copies: each copy task with its seconds.
    """
    copies = [*copies]
    of_loop: defaultdict[int | None, list[tuple[float, float]]] = defaultdict(list)
    for task, seconds in copies:
        flops = 0.0 if task.loop is None else task.executions * task.layer_flops
        of_loop[task.loop].append((seconds_beside(flops, hardware, calibration), seconds))
    exposed_part = {}
    for loop, members in of_loop.items():
        total = late = 0.0
        for due, seconds in sorted(members):
            total += seconds
            late = max(late, total - due)
        exposed_part[loop] = late / total if total else 0.0
    for task, seconds in copies:
        yield seconds * exposed_part[task.loop]


def exposed_parts(
    task: Task, cost: DeviceCost, placement: MeshPlacement, calibration: Calibration, compute: float
) -> list[tuple[float, float]]:
    """Return the total seconds of each collective of a task, and the seconds that `compute` seconds cannot hide.

    Collectives that can run behind the same part of compute share it in proportion to their seconds.
    """
    times = _collective_times(task, cost, placement, calibration, compute)
    behind = _seconds_behind(times)
    not_hidden = _not_hidden(behind)
    parts = []
    for each in times:
        total = behind[each.hiding]
        exposed_part = not_hidden[each.hiding] / total if total else 0.0
        exposed = each.waited * each.seconds + exposed_part * (1 - each.waited) * each.seconds
        parts.append((each.seconds, exposed))
    return parts


class _CollectiveTime(NamedTuple):
    """The time of a collective, and how much of it can overlap with compute."""

    seconds: float
    waited: float
    """Fraction of the seconds that the task waits for in any case."""
    hiding: float
    """Seconds of compute behind which the rest of the collective can run."""


def _collective_times(
    task: Task, cost: DeviceCost, placement: MeshPlacement, calibration: Calibration, compute: float
) -> list[_CollectiveTime]:
    """Return the time of every collective of a task whose compute takes `compute` seconds."""
    hops = _hops(task, cost)
    of_layer = compute + seconds_beside(task.executions * task.layer_flops, placement.hardware, calibration)
    times = []
    for traffic in cost.traffic:
        waited, fraction = _overlap(traffic, hops, calibration)
        hiding = fraction * (of_layer if traffic.overlap is Overlap.LAYER else compute)
        times.append(_CollectiveTime(transfer_seconds(traffic, placement), waited, hiding))
    return times


def _seconds_behind(times: Iterable[_CollectiveTime]) -> dict[float, float]:
    """Return a mapping from seconds of compute to the total seconds of the collectives that can overlap with it."""
    behind: defaultdict[float, float] = defaultdict(float)
    for each in times:
        behind[each.hiding] += (1 - each.waited) * each.seconds
    return behind


def _not_hidden(behind: Mapping[float, float]) -> dict[float, float]:
    """Return a mapping from seconds of compute to the seconds of its collectives that remain exposed."""
    return {hiding: max(0.0, seconds - hiding) for hiding, seconds in behind.items()}


def _hops(task: Task, cost: DeviceCost) -> float:
    """Return the number of ring permutations in one execution of the task."""
    return sum(traffic.count for traffic in cost.traffic if traffic.overlap is Overlap.RING_HOPS) / task.executions


def _overlap(traffic: Traffic, hops: float, calibration: Calibration) -> tuple[float, float]:
    """Return the fraction of a collective that its task waits for, and the fraction of compute that hides the rest."""
    match traffic.overlap:
        case Overlap.NONE:
            return 1.0, 0.0
        case Overlap.INDEPENDENT | Overlap.LAYER:
            return 0.0, calibration.overlap
        case Overlap.REORDERED:
            return WAITED_PART, calibration.overlap
        case Overlap.KERNELS:
            return calibration.kernel_wait, calibration.overlap
        case Overlap.RING_HOPS:
            return 0.0, hops / (hops + 1)
        case _:
            assert_never(traffic.overlap)


def step_tasks(
    step: Step, assignment: ShardingAssignment, hardware: Slice, calibration: Calibration
) -> Iterator[tuple[Task, DeviceCost, TaskSeconds]]:
    """Yield every task with its cost on one device and its seconds, which sum to the step's seconds."""
    placement = place_mesh(hardware, assignment.mesh)
    costs = [device_cost(task, assignment) for task in step.tasks]
    copies = [
        (task, host_copy_seconds(task, cost, hardware)) for task, cost in zip(step.tasks, costs, strict=True)
        if task.kind == TaskKind.HOST_COPY
    ]  # fmt: skip
    exposed = exposed_host_copies(copies, hardware, calibration)
    for task, cost in zip(step.tasks, costs, strict=True):
        if task.kind == TaskKind.HOST_COPY:
            yield task, cost, TaskSeconds(0.0, next(exposed))
        else:
            yield task, cost, task_seconds(task, cost, placement, calibration)


def model_flops(model: Model, workload: Workload) -> float:
    """Return the FLOPs of the model's matmuls in one step over all devices, as MFU (model FLOP/s utilisation) counts.

    Rematerialization does not count, nor the scores that the attention mask removes.
    """
    return sum(model_flops_by_kind(model, workload).values())


def model_flops_by_kind(model: Model, workload: Workload) -> dict[AttentionKind | None, float]:
    """Return `model_flops` by kind of attention; the key None has all other matmuls."""
    passes = 3 * workload.batch if workload.is_training else 1  # forward, and twice that backward
    forward = _forward_flops(model, forward_workload(workload))
    return {kind: passes * flops for kind, flops in forward.items()}


@lru_cache(maxsize=128)
def _forward_flops(model: Model, workload: Workload) -> Mapping[AttentionKind | None, float]:
    """Return the FLOPs of a forward pass, divided as in `model_flops_by_kind`."""
    step = plan_step(model, workload)
    unsharded = ShardingAssignment({}, {}, {}, step.merged_axes, step.activation_axes)
    flops: defaultdict[AttentionKind | None, float] = defaultdict(float)
    for task in step.tasks:
        if task.kind == TaskKind.SPARSE_ATTENTION:
            flops[kind_of(task)] += sparse_model_flops(task)
            continue
        if task.kind == TaskKind.BLOCK_ATTENTION:
            flops[None] += given_block_flops(task)
            continue
        kind = kind_of(task) if task.kind == TaskKind.ATTENTION else None
        density = 1.0 if kind is None else kind.pattern.density(workload.position)
        flops[kind] += density * device_cost(task, unsharded).matmul.flops
    return flops
