"""Attention scores that are recomputed only for gradients.

The gradients of attention need the weights of keys, and plain operations compute these again from queries and keys. A
kernel of gradients does so by itself, given the log-sum-exp of the scores, which is kept with the context of attention.
Where the context is not kept, the kernel of the forward pass runs again, and computes scores and context.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.named_arrays import is_scores
from shardplan.program.operations import REMATERIALIZED_SCOPE
from shardplan.program.tasks import Task, TaskKind


def mark_gradient_kernels(tasks: Iterable[Task]) -> list[Task]:
    """Mark recomputed scores whose context (attention output) is not recomputed; return all tasks."""
    tasks = [*tasks]
    contexts = Counter(_call(task) for task in tasks if _is_computed_again(task) and not is_scores(task.results[0]))
    marked = []
    for task in tasks:
        if _is_computed_again(task) and is_scores(task.results[0]):
            if contexts[_call(task)]:
                contexts[_call(task)] -= 1
            else:
                task = replace(task, is_in_gradient_kernels=True)
        marked.append(task)
    return marked


def _is_computed_again(task: Task) -> bool:
    return task.kind == TaskKind.ATTENTION and REMATERIALIZED_SCOPE in task.label


def _call(task: Task) -> tuple[AttentionKind | None, int]:
    """Return a key that is equal for the matmuls of one attention call."""
    return task.attention, task.executions
