"""The compute of a layer beside its routed experts, which hides transfers of their weights.

Tasks with equally many executions in the same pass belong to the same kind of layer; where a loop's body has several
such layers, each has its part.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import replace

from shardplan.program.tasks import Task, TaskKind

MATMULS = (TaskKind.CONTRACTION, TaskKind.ATTENTION)


def with_layer_flops(tasks: Iterable[Task]) -> tuple[Task, ...]:
    """Return the tasks of a step, those of routed experts with the FLOPs of the other matmuls of their layers."""
    tasks = tuple(tasks)
    blocks = Counter(_layer(task) for task in tasks if task.kind == TaskKind.EXPERTS)
    flops: defaultdict[tuple[int, bool], float] = defaultdict(float)
    for task in tasks:
        if task.kind in MATMULS and _layer(task) in blocks:
            flops[_layer(task)] += task.flops
    return tuple(
        replace(task, layer_flops=flops[_layer(task)] / blocks[_layer(task)]) if task.kind == TaskKind.EXPERTS else task
        for task in tasks
    )


def _layer(task: Task) -> tuple[int, bool]:
    """What the tasks of a layer have in common."""
    return task.executions, task.is_backward
