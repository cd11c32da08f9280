"""Time of a step under a mapping, task by task. Pure.

A product takes its FLOPs at peak, or its bytes from HBM where that is longer, times what the compiler's own cycles say
that products take beyond that; elementwise work takes its bytes, likewise. Gathers of parameters depend on nothing, and
hide in products as far as the compiler's options let them; all other collectives wait for what they move, and are
waited for. The factors are fitted to the compiler (`shardplan.cost.calibration`); the rooflines are those of
https://jax-ml.github.io/scaling-book.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.cost.calibration import Calibration
from shardplan.cost.collectives import Traffic
from shardplan.cost.gspmd import GATHER, DeviceCost, device_cost
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import Slice, place_mesh
from shardplan.model import Model
from shardplan.plan.mapping import MeshShape
from shardplan.plan.workload import Workload
from shardplan.program.step_trace import plan_step
from shardplan.program.tasks import Step, Task


@dataclass(frozen=True)
class Seconds:
    """Time of a task on every device."""

    compute: float
    exposed: float
    """Waiting for collectives."""

    @property
    def total(self) -> float:
        """Compute and waiting."""
        return self.compute + self.exposed


def transfer_seconds(traffic: Traffic, hardware: Slice, mesh: MeshShape) -> float:
    """On the links where the mesh axes lie (shardplan.hardware.mesh_placement)."""
    return place_mesh(hardware, mesh).seconds(traffic.kind, traffic.mesh_axes, traffic.bytes, traffic.count)


def compute_seconds(task: Task, mine: DeviceCost, hardware: Slice, calibration: Calibration) -> float:
    """What the device works on its share."""
    generation = hardware.generation
    moving = mine.memory_bytes / generation.hbm_bandwidth
    if task.kind == "contraction":
        if task.batched and min(mine.product.rows, mine.product.columns) == 1:
            return calibration.vectors * moving  # no work for the matrix unit
        products = calibration.products * max(mine.product.filled_flops / generation.flops, moving)
        copied = calibration.rearranging * mine.rearranged_bytes + calibration.gathering * mine.own_bytes
        return products + copied / generation.hbm_bandwidth
    if task.kind == "attention":
        products = calibration.attention * mine.unmasked * mine.product.flops / generation.flops
        merging = calibration.elementwise * mine.merged_bytes / generation.hbm_bandwidth
        return merging + (products if mine.has_kernel else max(products, mine.unmasked * moving))
    return calibration.elementwise * moving


def task_seconds(task: Task, mine: DeviceCost, hardware: Slice, mesh: MeshShape, calibration: Calibration) -> Seconds:
    """One task."""
    compute = compute_seconds(task, mine, hardware, calibration)
    waiting = 0.0
    hidden: defaultdict[float, float] = defaultdict(float)  # by the part of the compute that they can hide behind
    for traffic in mine.traffic:
        seconds = transfer_seconds(traffic, hardware, mesh)
        if traffic.cause.startswith(GATHER) and traffic.kind == "all-gather":
            hidden[calibration.overlap] += seconds
        elif traffic.kind == "collective-permute":
            hops = traffic.count / task.times
            hidden[hops / (hops + 1)] += seconds  # there is none while the keys of the last hop are attended to
        else:
            waiting += seconds
    return Seconds(compute, waiting + sum(max(0.0, each - part * compute) for part, each in hidden.items()))


def step_tasks(
    step: Step, layout: ShardingAssignment, hardware: Slice, calibration: Calibration
) -> Iterator[tuple[Task, DeviceCost, Seconds]]:
    """Every task with one device's share and its time; these add up."""
    for task in step.tasks:
        mine = device_cost(task, layout)
        yield task, mine, task_seconds(task, mine, hardware, layout.mesh, calibration)


def model_flops(model: Model, workload: Workload) -> float:
    """Products that the model needs for one step, over all devices: what model FLOP/s utilisation counts.

    Nothing is counted that is done again, nor what the mask takes from attention.
    """
    forward = replace(workload, kind="eval", microbatches=1) if workload.is_training else workload
    step = plan_step(model, forward)
    nowhere = ShardingAssignment({}, {}, {}, step.merged, step.activation_axes)
    needed = step.pattern.density(workload.position)
    flops = sum(
        device_cost(task, nowhere).product.flops * (needed if task.kind == "attention" else 1.0) for task in step.tasks
    )
    return 3 * flops if workload.is_training else flops
