"""What devices receive in collectives of one cause. Pure arithmetic."""

from dataclasses import dataclass

from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import MeshAxes, mesh_size


@dataclass(frozen=True)
class Traffic:
    """Collectives of one cause in one step."""

    kind: str
    mesh_axes: MeshAxes
    bytes: float
    """Received per device, over all executions."""
    count: int
    cause: str


def all_gather(result_bytes: float, layout: ShardingAssignment, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device gets the parts of the others; `result_bytes` is what it then has, per execution."""
    if layout.sums_to_gather(axes):
        return all_reduce(result_bytes, layout, axes, count, cause)
    return _of_others("all-gather", result_bytes, layout, axes, count, cause)


def all_reduce(array_bytes: float, layout: ShardingAssignment, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """A reduce-scatter and an all-gather of `array_bytes`, per execution."""
    return _of_others("all-reduce", 2 * array_bytes, layout, axes, count, cause)


def reduce_scatter(array_bytes: float, layout: ShardingAssignment, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device gets the sum of its part of `array_bytes`, per execution; over the whole mesh, the sum of all."""
    if layout.is_whole(axes):
        return all_reduce(array_bytes, layout, axes, count, cause)
    return _of_others("reduce-scatter", array_bytes, layout, axes, count, cause)


def all_to_all(array_bytes: float, layout: ShardingAssignment, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device sends a part of its `array_bytes` to every other, per execution."""
    return _of_others("all-to-all", array_bytes, layout, axes, count, cause)


def permute(array_bytes: float, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """Every device gets `array_bytes` of another, per execution."""
    return Traffic("collective-permute", axes, count * array_bytes, count, cause)


def _of_others(kind: str, size: float, layout: ShardingAssignment, axes: MeshAxes, count: int, cause: str) -> Traffic:
    """All of `size` but a device's own part is received."""
    n = mesh_size(layout.mesh, axes)
    return Traffic(kind, axes, count * size * (n - 1) / n, count, cause)
