"""Short names of parameters and of operations of the traced program."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from shardplan.plan.details import TimedTask

STACKED = ".stacked."
"""What separates the path of a stack of layers from that within a layer."""
SUFFIX = ".weight"
SUBSCRIPTS = re.compile(r"[\d ,]*->[\d ]*")


def short_label(label: str) -> str:
    """The part of a parameter's path or of the scopes of an operation that tells it from others."""
    if "/" not in label:
        return label.rpartition(STACKED)[2].removesuffix(SUFFIX)
    # the last scope of a contraction without named axes is its subscripts, as `0 1, 2 1 -> 0 2`
    scopes = [scope for scope in label.split("/") if not SUBSCRIPTS.fullmatch(scope)] or [label]
    # of a contraction the axes stand in the scopes, as `contract head_size -> batch, position`
    for before, scope in pairwise(scopes):
        if scope.startswith("contract "):
            return f"{before} ({scope.partition(' -> ')[0]})"
    return scopes[-1]


def short_cause(cause: str) -> str:
    """The cause of a collective, with a short name of the parameter or of the scopes in it."""
    return " ".join(short_label(word) if STACKED in word or "/" in word else word for word in cause.split(" "))


def listed(labels: Iterable[str]) -> str:
    """Labels in one text, each once, with its number if that is larger than 1."""
    return "; ".join(f"{label} ({count})" if count > 1 else label for label, count in Counter(labels).items())


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
