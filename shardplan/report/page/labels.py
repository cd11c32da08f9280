"""Short names of parameters and of operations of the traced program."""

from shardplan.plan.details import LivePoint, TimedTask

STACKED = ".stacked."
"""What separates the path of a stack of layers from that within a layer."""
SUFFIX = ".weight"


def short_label(label: str) -> str:
    """The part of a parameter's path or of the scopes of an operation that tells it from others."""
    if "/" not in label:
        return label.rpartition(STACKED)[2].removesuffix(SUFFIX)
    scopes = label.split("/")
    # of a contraction the axes stand in the scopes, as `contract head_size -> batch, position`
    for before, scope in zip(scopes, scopes[1:], strict=False):
        if scope.startswith("contract "):
            return f"{before}, {scope.partition(' -> ')[0]}"
    return scopes[-1]


def short_cause(cause: str) -> str:
    """The cause of a collective, with the parameter in it named by its path within a layer."""
    return " ".join(short_label(word) if STACKED in word else word for word in cause.split(" "))


def task_label(task: TimedTask) -> str:
    """What a task computes, as `contraction: mlp.gate_proj`."""
    return f"{task.kind}: {short_label(task.label)}"


def repeated_runs(items: "list[LivePoint] | list[TimedTask]") -> list[tuple[int, int, int]]:
    """Return (first, last, executions) of each run of items that are executed equally often."""
    runs: list[tuple[int, int, int]] = []
    for i, item in enumerate(items):
        if runs and runs[-1][2] == item.executions:
            runs[-1] = (runs[-1][0], i, item.executions)
        else:
            runs.append((i, i, item.executions))
    return runs
