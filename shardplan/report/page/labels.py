"""Texts of the panels: short names of parameters and operations, and placeholders of empty panels."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise

from shardplan.cost.collectives import Purpose
from shardplan.plan.file.details import TimedTask

NO_DETAILS = "This Plan has no details (an older version wrote it, or it was made for a launcher). Plan again."
"""Message in place of a panel that draws a Plan's details."""
STACKED = ".stacked."
"""Separator between the path of a stack of layers and the path within a layer."""
WITHIN_BLOCK = re.compile(r"^\w+\[[\d,-]+\]\.")
"""Pattern for the beginning of a path within a stack of blocks, which gives the layer of the block."""
SUFFIX = ".weight"
SUBSCRIPTS = re.compile(r"[\d ,]*->[\d ]*")
DIFFERENTIATED = re.compile(r"(?:transpose\()?jvp\((.+?)\)+")
"""Pattern for a scope of the backward pass."""
GENERIC = "Linear"
"""Name of Haliax's module for all projections, which distinguishes nothing."""


def short_label(label: str) -> str:
    """Return the distinguishing part of a parameter's path or an operation's scopes."""
    if "/" not in label:
        _, is_stacked, path = label.rpartition(STACKED)
        return (WITHIN_BLOCK.sub("", path) if is_stacked else path).removesuffix(SUFFIX)
    # the last scope of a contraction without named axes is its subscripts, as `0 1, 2 1 -> 0 2`
    named = [scope for scope in label.split("/") if not SUBSCRIPTS.fullmatch(scope) and scope != GENERIC] or [label]
    scopes = [DIFFERENTIATED.sub(r"\1", scope) for scope in named]
    # of a contraction the axes stand in the scopes, as `contract head_size -> batch, position`
    for before, scope in pairwise(scopes):
        if scope.startswith("contract "):
            return f"{before} ({scope.partition(' -> ')[0]})"
    return scopes[-1]


def kind_text(kind: str) -> str:
    """Return the kind of a task or of a collective in words."""
    return {"contraction": "matmul", "elementwise": "elementwise work"}.get(kind, kind)


def distinct_labels(labels: Sequence[str]) -> list[str]:
    """Return the short labels; if two short labels are equal, both are replaced by full paths."""
    count = Counter(map(short_label, labels))
    return [short_label(label) if count[short_label(label)] == 1 else label for label in labels]


def short_cause(cause: str) -> str:
    """Return the cause of a collective, with a short name of its parameter or scopes."""
    for purpose in Purpose:
        before, has_subject, after = purpose.value.partition("{}")
        if has_subject and cause.startswith(before) and cause.endswith(after):
            return f"{before}{short_label(cause[len(before) : len(cause) - len(after)])}{after}"
    return cause


def join_with_counts(labels: Iterable[str]) -> str:
    """Join labels, each distinct one once, with its count if that is larger than 1."""
    return "; ".join(f"{label} ({count})" if count > 1 else label for label, count in Counter(labels).items())


def task_label(task: TimedTask) -> str:
    """Return the label of a task, such as `matmul: mlp.gate_proj`."""
    return f"{kind_text(task.kind)}: {short_label(task.label)}"


def repeated_runs(executions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return (first, last, executions) of each run of operations with the same number of executions, if above 1."""
    runs, first = [], 0
    for times, group in groupby(executions):
        last = first + len(list(group)) - 1
        if times > 1:
            runs.append((first, last, times))
        first = last + 1
    return runs
