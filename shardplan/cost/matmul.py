"""Matmuls: one device's part, and the FLOPs of its matrix unit, padding included."""

import math
from dataclasses import dataclass

from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import mesh_size
from shardplan.program.tasks import Task

SUBLANES, LANES = 8, 128
"""Size of a vector register, in two dimensions: matmuls are padded to multiples of it."""


@dataclass(frozen=True)
class Matmul:
    """The matmuls [rows, inner] x [inner, columns] of one device, over all executions of a task."""

    count: float
    """Number of independent matmuls."""
    rows: float
    inner: float
    columns: float

    @property
    def flops(self) -> float:
        """FLOPs, padding excluded."""
        return 2 * self.count * self.rows * self.inner * self.columns

    @property
    def padded_flops(self) -> float:
        """FLOPs of the matrix unit, which pads one matrix to full tiles and streams the rows of the other."""
        rows, inner, columns = map(math.ceil, (self.rows, self.inner, self.columns))
        streamed = min(_pad(rows, SUBLANES) * _pad(columns, LANES), _pad(columns, SUBLANES) * _pad(rows, LANES))
        return 2 * self.count * _pad(inner, LANES) * streamed

    @property
    def kernel_flops(self) -> float:
        """FLOPs in an attention kernel, which pads head sizes in both matrices."""
        inner, columns = _pad(math.ceil(self.inner), LANES), _pad(math.ceil(self.columns), LANES)
        return 2 * self.count * self.rows * inner * columns


def _pad(size: int, unit: int) -> int:
    return -(-size // unit) * unit


NO_MATMUL = Matmul(0.0, 0.0, 0.0, 0.0)


def local_matmul(task: Task, assignment: ShardingAssignment) -> Matmul:
    """Return one device's part of the matmul that `task` computes."""
    mapping = assignment.params if task.groups > 1 else assignment.compute
    used: set[str] = set()
    local = []
    for size, factors in task.matmul_extents:
        axes = [axis for axis in assignment.mesh_axes(factors, mapping) if axis not in used]
        used.update(axes)
        local.append(size / mesh_size(assignment.mesh, axes))
    return Matmul(task.executions * local[0], rows=local[2], inner=local[1], columns=local[3])
