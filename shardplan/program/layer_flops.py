"""Finds the compute of a layer that can hide transfers: of expert weights, and of copies to and from the host.

Tasks with equally many executions in the same pass belong to the same kind of layer; where a loop's body has several
such layers, each has its part.

A copy from the host hides behind the whole body of its loop. The compiler starts a copy to the host in the iteration
after that which computes the activation, and ends it before this iteration computes the activation anew, into the same
memory. So it hides behind the matmuls before that one in the program.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from shardplan.program.operations import Operation
from shardplan.program.tasks import Task, TaskKind

MATMULS = (TaskKind.CONTRACTION, TaskKind.ATTENTION)
CARRIED = -1
"""Stands for the last matmul before a copy, if an earlier iteration of the loop has computed the copied value."""


class PlacedTask(NamedTuple):
    """A task, and the loop that it runs in."""

    task: Task
    loop: int | None
    """Identifier of the loop whose body contains the task (index of its first result); None outside of loops."""


class CopyWindow(NamedTuple):
    """The matmuls in a loop behind which copies to or from the host can hide."""

    loop: int
    """Identifier of the loop: the index of its first result."""
    flops: float
    """FLOPs of the matmuls per step, over all devices."""


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


class MatmulsBefore:
    """The matmuls of a loop's body that come before each copy to the host, in the order in which they were traced.

    The order of the walk would not do, because it depends on the checkpointing policy: kept activations come first.
    """

    def __init__(self, loop: int | None) -> None:
        self.loop = loop
        """Identifier of the loop (index of its first result); None outside of loops, where nothing hides copies."""
        self._matmuls: list[tuple[int, int]] = []
        """(result of a matmul, index of its task). Values are numbered in the order in which they were traced."""
        self._last_of_copy: dict[int, int] = {}
        """Index of a copy -> result of the last matmul that its operand is computed from; `CARRIED` without one."""
        self._last_of_value: defaultdict[int, int] = defaultdict(lambda: CARRIED)

    def add(self, first: int, tasks: Sequence[tuple[Operation, Task]], operation: Operation) -> None:
        """Add an operation of the loop's body, in the order of the walk.

        Args:
            first: index of the operation's first task.
            tasks: tasks of the operation and of the operations fused into it; empty if it is fused into others.
        """
        if self.loop is None:
            return
        last = max((self._last_of_value[value] for value in operation.operands), default=CARRIED)
        for i, (done, task) in enumerate(tasks, start=first):
            if task.kind in MATMULS:
                self._matmuls.append((done.results[0], i))
                last = max(last, done.results[0])
            elif task.kind == TaskKind.HOST_COPY:
                self._last_of_copy[i] = last
        for result in operation.results:
            self._last_of_value[result] = last

    def finish(self, tasks: list[PlacedTask], first: int, executions: int) -> None:
        """Set, for each host copy of the body in `tasks`, its loop and the FLOPs behind which it can hide.

        Args:
            first: index of the first task of the body.
            executions: executions of the body per step.
        """

        def flops_of(matmuls: Iterable[Task]) -> float:
            return sum(task.executions * task.flops for task in matmuls) / executions

        total = flops_of(each.task for each in tasks[first:] if each.task.kind in MATMULS)
        for i, last in self._last_of_copy.items():
            flops, copy = total, tasks[i].task
            if copy.executions != executions:
                continue  # done once before the loop
            if copy.is_to_host and last != CARRIED:  # the last matmul computes it anew
                flops = flops_of(tasks[j].task for result, j in self._matmuls if result < last)
            tasks[i] = tasks[i]._replace(task=replace(copy, layer_flops=flops, loop=self.loop))


def copy_window(task: Task) -> CopyWindow | None:
    """Return the matmuls behind which a host copy hides; None for other tasks, and outside of loops."""
    return None if task.loop is None else CopyWindow(task.loop, task.executions * task.layer_flops)


def _layer(task: Task) -> tuple[int, bool]:
    """Return a key that is equal for the tasks of one layer."""
    return task.executions, task.is_backward
