"""Products of matrices: the part of one device, and what a matrix unit has to do for it."""

import math
from dataclasses import dataclass

from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import mesh_size
from shardplan.program.tasks import Task

SUBLANES, LANES = 8, 128
"""Numbers that registers hold of two dimensions: products of less take as long."""


@dataclass(frozen=True)
class Product:
    """What one device has of a product of matrices, [rows, inner] x [inner, columns], over all executions."""

    count: float
    """Products, each done by itself."""
    rows: float
    inner: float
    columns: float

    @property
    def flops(self) -> float:
        """What the product needs."""
        return 2 * self.count * self.rows * self.inner * self.columns

    @property
    def filled_flops(self) -> float:
        """What the matrix unit does: it holds tiles of one matrix, whole, and the rows of the other stream through."""
        rows, inner, columns = map(math.ceil, (self.rows, self.inner, self.columns))
        streamed = min(
            _filled(rows, SUBLANES) * _filled(columns, LANES), _filled(columns, SUBLANES) * _filled(rows, LANES)
        )
        return 2 * self.count * _filled(inner, LANES) * streamed


def _filled(size: int, unit: int) -> int:
    return -(-size // unit) * unit


NO_PRODUCT = Product(0.0, 0.0, 0.0, 0.0)


def product(task: Task, layout: ShardingAssignment) -> Product:
    """One device's part of the product that `task` is."""
    mapping = layout.params if task.groups > 1 else layout.compute
    used: set[str] = set()
    local = []
    for size, factors in task.extents:
        axes = [axis for axis in layout.mesh_axes(factors, mapping) if axis not in used]
        used.update(axes)
        local.append(size / mesh_size(layout.mesh, axes))
    return Product(task.times * local[0], rows=local[2], inner=local[1], columns=local[3])
