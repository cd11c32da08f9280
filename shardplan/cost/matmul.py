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
    head_size: float | None = None
    """Columns (or rows) of one head, if those of several heads are not together in memory."""

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

    def unit_flops(self, unit: int) -> float:
        """FLOPs of a matrix unit of `unit` x `unit`: a head that is narrower than it fills it in part.

        The compiled programs of docs/benchmarks/published.md take 2 to 3.7 times their FLOPs for heads of 128 and a
        unit of 256, and 1.0 to 1.3 times for other matmuls.

        >>> Matmul(count=1, rows=4096, inner=4096, columns=1024, head_size=128).unit_flops(256) == 2 * 2 * 2**34
        True
        """
        if self.head_size is None:
            return self.padded_flops
        return self.padded_flops * max(1.0, unit / _pad(math.ceil(self.head_size), LANES))

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
    head_size = None
    if task.head_axis is not None:
        head_size = task.head_axis[1] / mesh_size(assignment.mesh, assignment.mesh_axes((task.head_axis,), mapping))
    return Matmul(task.executions * local[0], rows=local[2], inner=local[1], columns=local[3], head_size=head_size)
