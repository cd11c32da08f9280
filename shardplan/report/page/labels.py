"""Short names of parameters and of operations of the traced program."""

from collections.abc import Sequence
from itertools import groupby, pairwise

from shardplan.plan.details import TimedTask

STACKED = ".stacked."
"""What separates the path of a stack of layers from that within a layer."""
SUFFIX = ".weight"


def short_label(label: str) -> str:
    """The part of a parameter's path or of the scopes of an operation that tells it from others."""
    if "/" not in label:
        return label.rpartition(STACKED)[2].removesuffix(SUFFIX)
    scopes = label.split("/")
    # of a contraction the axes stand in the scopes, as `contract head_size -> batch, position`
    for before, scope in pairwise(scopes):
        if scope.startswith("contract "):
            return f"{before} ({scope.partition(' -> ')[0]})"
    return scopes[-1]


def short_cause(cause: str) -> str:
    """The cause of a collective, with the parameter in it named by its path within a layer."""
    return " ".join(short_label(word) if STACKED in word else word for word in cause.split(" "))


def task_label(task: TimedTask) -> str:
    """What a task computes, as `contraction: mlp.gate_proj`."""
    return f"{task.kind}: {short_label(task.label)}"


def repeated_runs(executions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first, last, executions) of each run of operations that are executed equally often, and repeatedly."""
    runs, first = [], 0
    for times, group in groupby(executions):
        last = first + len(list(group)) - 1
        if times > 1:
            runs.append((first, last, times))
        first = last + 1
    return runs
