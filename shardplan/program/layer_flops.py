"""The compute of a layer that can hide its transfers: weights of routed experts, and copies to and from the host.

Tasks with equally many executions in the same pass belong to the same kind of layer; where a loop's body has several
such layers, each has its part. Copies to and from the host have the body of their loop, all of them together.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace

from shardplan.program.tasks import Task, TaskKind

MATMULS = (TaskKind.CONTRACTION, TaskKind.ATTENTION)


def with_layer_flops(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Add to each task of routed experts the FLOPs of the other matmuls in its layer."""
    tasks = tuple(tasks)
    # several blocks in a loop's body divide its other matmuls among them
    blocks = Counter(_layer(task) for task in tasks if task.kind == TaskKind.EXPERTS)
    flops: defaultdict[tuple[int, bool], float] = defaultdict(float)
    for task in tasks:
        if task.kind in MATMULS and _layer(task) in blocks:
            flops[_layer(task)] += task.flops
    return tuple(
        replace(task, layer_flops=flops[_layer(task)] / blocks[_layer(task)]) if task.kind == TaskKind.EXPERTS else task
        for task in tasks
    )


def with_loop_flops(tasks: Sequence[Task], executions: int, loop: int) -> list[Task]:
    """Return the tasks of the body of a loop, its copies to and from the host with the FLOPs of its matmuls.

    Args:
        executions: of the body, in a step.
        loop: the first result of the loop.
    """
    flops = sum(task.executions * task.flops for task in tasks if task.kind in MATMULS) / executions
    finished = []
    for task in tasks:
        if task.kind == TaskKind.HOST_COPY and task.executions == executions:
            task = replace(task, layer_flops=flops, loop=loop)
        finished.append(task)
    return finished


def _layer(task: Task) -> tuple[int, bool]:
    """Return a key that the tasks of one layer share."""
    return task.executions, task.is_backward
