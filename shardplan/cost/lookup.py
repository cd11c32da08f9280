"""How the partitioner looks up rows of a table that is cut: what it gathers, adds up, and turns. Pure.

The rules are those of XLA's partitioner in jaxlib 0.10.2, read from what it compiles for a table of 128256 x 8192 with
all cuts of rows, columns, and tokens by three mesh axes.
"""

import math
from dataclasses import dataclass

from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.named_arrays import Array

MUCH_LARGER = 1.2
"""From this ratio of its elements to those of the table on, the result keeps its cut, and the table does not."""


@dataclass(frozen=True)
class Lookup:
    """The steps of a lookup, in order; bytes are those of one device."""

    gathered: MeshAxes
    """Mesh axes over which the table is gathered first."""
    table: float
    """Bytes of the table then, where it is gathered."""
    rows: MeshAxes
    """Mesh axes that still cut its rows: what is found there is added up."""
    found: float
    """Bytes that a device finds in its part: devices with other parts must look up the same rows."""
    shared: MeshAxes
    """Mesh axes whose devices have looked up each a part of the tokens, and bring them together."""
    together: float
    """Bytes then."""
    columns: MeshAxes
    """Mesh axes that cut the columns until now, and no longer."""
    turned: float
    """Bytes once the columns are whole."""
    by_turning: bool
    """Whether columns become whole as the tokens become cut, by an all-to-all; else by a gather."""

    @property
    def largest(self) -> float:
        """Bytes of what was found before and after one of the steps, at most."""
        summed = 2 * self.found if self.rows else 0.0
        return max(summed, self.found + self.together, self.together + self.turned)


def lookup(table: Array, result: Array, layout: ShardingAssignment) -> Lookup:
    """How `result` (tokens and columns) is found in `table` (rows and columns), which rests cut."""
    own = layout.bytes(result, layout.compute)
    if table.weight is None:
        return Lookup((), 0.0, (), own, (), own, (), own, by_turning=False)
    rows, columns = _table_cuts(table, result, layout)
    tokens = _tokens_cut(table, result, layout)
    busy = tuple(axis for axis in layout.mesh if any(axis in axes for axes in tokens))
    gathered: MeshAxes = ()
    by_turning, is_whole = not set(busy).isdisjoint(columns), False
    # columns can be turned into one dimension of the tokens if no other is cut
    if by_turning and (len(tokens) > 1 or set(columns) != set(busy)):
        ratio = result.elements / table.elements
        more_rows = mesh_size(layout.mesh, rows) / mesh_size(layout.mesh, columns)
        by_turning = False
        if ratio > MUCH_LARGER:
            gathered = tuple(axis for axis in busy if axis in (*rows, *columns))
            rows, columns = (), (*rows, *columns)  # what is left of the cut is of columns
        elif more_rows > 1 or (more_rows == 1 and ratio > 1):
            gathered = columns
        else:
            is_whole = True
    size = layout.bytes(table, layout.params) * mesh_size(layout.mesh, gathered) if gathered else 0.0
    columns = tuple(axis for axis in columns if axis not in gathered)
    of_table = (*rows, *columns)
    found = own * _sharing(rows, columns, busy, layout) / mesh_size(layout.mesh, columns)
    shared = tuple(axis for axis in layout.mesh if axis not in of_table) if by_turning or is_whole else ()
    together = found * mesh_size(layout.mesh, tuple(axis for axis in shared if axis in busy))
    turned = layout.bytes(result, {}) if is_whole else together if by_turning else own
    return Lookup(gathered, size, rows, found, shared, together, columns, turned, by_turning)


def _sharing(rows: MeshAxes, columns: MeshAxes, busy: MeshAxes, layout: ShardingAssignment) -> float:
    """How many times its own tokens a device looks up."""
    met = tuple(axis for axis in busy if axis in (*rows, *columns))
    if columns or not met:
        return mesh_size(layout.mesh, met)
    # all devices that have the same rows share the tokens, also along axes that do not cut them
    return mesh_size(layout.mesh, busy) * mesh_size(layout.mesh, rows) / math.prod(layout.mesh.values())


def _tokens_cut(table: Array, result: Array, layout: ShardingAssignment) -> list[MeshAxes]:
    """Mesh axes of every dimension of the tokens that is cut."""
    factors = (factor for factor in result.factors if factor[0] not in table.axes)
    return [axes for factor in factors if (axes := _several(layout.mesh_axes((factor,)), layout))]


def _several(axes: MeshAxes, layout: ShardingAssignment) -> MeshAxes:
    """Those of several devices."""
    return tuple(axis for axis in axes if layout.mesh[axis] > 1)


def _table_cuts(table: Array, result: Array, layout: ShardingAssignment) -> tuple[MeshAxes, MeshAxes]:
    """Mesh axes that cut the rows and the columns of a table at rest."""
    kept = set(result.axes)
    rows = layout.mesh_axes(tuple(f for f in table.factors if f[0] not in kept), layout.params)
    columns = layout.mesh_axes(tuple(f for f in table.factors if f[0] in kept), layout.params)
    return _several(rows, layout), _several(columns, layout)
