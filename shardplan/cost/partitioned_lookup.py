"""Lookups of rows in a sharded table, as the partitioner splits them into local lookups and collectives. Pure.

The rules are those of XLA's partitioner in jaxlib 0.10.2, read from what it compiles for a table of 128256 x 8192 with
all shardings of rows, columns, and tokens by three mesh axes.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardplan.cost.sharding import ShardingAssignment
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.named_arrays import TracedArray

MIN_RATIO_TO_UNSHARD_TABLE = 1.2
"""Smallest ratio of the result's elements to the table's from which the result keeps its sharding, not the table, where
two dimensions of the tokens are sharded."""


@dataclass(frozen=True)
class PartitionedLookup:
    """The steps of a lookup, in order; bytes are those of one device."""

    table_gather_axes: MeshAxes
    """Mesh axes over which the table is gathered first."""
    gathered_table_bytes: float
    """Bytes of the table after that gather; 0 without one."""
    row_axes: MeshAxes
    """Mesh axes that still shard the table's rows: partial results are summed over them."""
    local_result_bytes: float
    """Bytes that a device looks up in its shard; devices with other rows must look up the same tokens."""
    token_gather_axes: MeshAxes
    """Mesh axes along which devices have looked up different tokens, to be gathered."""
    token_gather_bytes: float
    """Bytes after that gather."""
    column_axes: MeshAxes
    """Mesh axes that shard the columns until now, and no longer."""
    all_columns_bytes: float
    """Bytes once the columns are unsharded."""
    uses_all_to_all: bool
    """Whether an all-to-all unshards the columns and shards the tokens; else an all-gather unshards the columns."""
    result_bytes: float
    """Bytes of the result in its compute sharding."""

    @property
    def transient_bytes(self) -> float:
        """Largest bytes in memory besides the result while a step runs, over the steps after the table's gather.

        A step's input and output are in memory together. The result takes the place of one of them, except where a sum
        of partial results becomes the result by an all-to-all. Transient arrays that are no larger than the result are
        fused with it.
        """
        summed = 2 * self.local_result_bytes if self.row_axes else 0.0
        gathered = self.local_result_bytes + self.token_gather_bytes
        size = max(summed, gathered, self.token_gather_bytes + self.all_columns_bytes)
        if self.row_axes and self.uses_all_to_all:
            return size
        return size - self.result_bytes if size > 2 * self.result_bytes else 0.0


def partition_lookup(table: TracedArray, result: TracedArray, assignment: ShardingAssignment) -> PartitionedLookup:
    """The steps that look up `result` (tokens and columns) in `table` (rows and columns) in its stored sharding."""
    own = assignment.bytes(result, assignment.compute)
    if table.weight is None:
        return PartitionedLookup((), 0.0, (), own, (), own, (), own, uses_all_to_all=False, result_bytes=own)
    rows, columns = _table_axes(table, result, assignment)
    token_dims = _token_axes(table, result, assignment)
    tokens = tuple(axis for axis in assignment.mesh if any(axis in axes for axes in token_dims))
    gathered: MeshAxes = ()
    num_devices = math.prod(assignment.mesh.values())
    uses_all_to_all, is_replicated = not set(tokens).isdisjoint(columns), False
    # an all-to-all moves the sharding of columns to one dimension of the tokens, if no other dimension is sharded, and
    # if this is their sharding, or they use all devices
    is_part = not rows and set(columns) <= set(tokens) and mesh_size(assignment.mesh, tokens) == num_devices
    if uses_all_to_all and (len(token_dims) > 1 or not (set(columns) == set(tokens) or is_part)):
        ratio = result.elements / table.elements
        row_to_column_shards = mesh_size(assignment.mesh, rows) / mesh_size(assignment.mesh, columns)
        uses_all_to_all = False
        if ratio > _min_ratio_to_unshard_table(token_dims, columns, assignment):
            gathered = tuple(axis for axis in tokens if axis in (*rows, *columns))
            rows, columns = (), (*rows, *columns)  # what is left of the table's sharding is one of columns
        elif row_to_column_shards > 1 or (row_to_column_shards == 1 and ratio > 1):
            gathered = columns
        else:
            is_replicated = True
    elif not columns and not set(rows).isdisjoint(tokens):
        # either each device looks all tokens up in its rows, or its own in all rows: whose table and result are smaller
        all_tokens = assignment.bytes(table, assignment.params) + assignment.bytes(result, {})
        if assignment.bytes(table, {}) + own <= all_tokens:
            gathered = tuple(axis for axis in tokens if axis in rows)
            columns = tuple(axis for axis in rows if axis not in gathered)
            rows = ()
    table_bytes = assignment.bytes(table, assignment.params) * mesh_size(assignment.mesh, gathered) if gathered else 0.0
    columns = tuple(axis for axis in columns if axis not in gathered)
    sharding = (*rows, *columns)
    copies = _lookups_per_token(rows, columns, tokens, assignment)
    local_bytes = own * copies / mesh_size(assignment.mesh, columns)
    gathers_tokens = uses_all_to_all or is_replicated
    kept = (*sharding, *tokens) if uses_all_to_all else sharding
    token_gather_axes = tuple(axis for axis in assignment.mesh if axis not in kept) if gathers_tokens else ()
    parts = mesh_size(assignment.mesh, tuple(axis for axis in token_gather_axes if axis in tokens))
    gathered_bytes = local_bytes * parts
    all_columns = assignment.bytes(result, {}) if is_replicated else gathered_bytes if uses_all_to_all else own
    return PartitionedLookup(
        gathered, table_bytes, rows, local_bytes, token_gather_axes, gathered_bytes, columns, all_columns,
        uses_all_to_all, own,
    )  # fmt: skip


def _min_ratio_to_unshard_table(
    token_dims: Sequence[MeshAxes], columns: MeshAxes, assignment: ShardingAssignment
) -> float:
    """Return the ratio of the result's elements to the table's above which the partitioner gathers the table.

    The partitioner compares the largest step of the two forms. Where one dimension of the tokens is sharded, the result
    keeps the part of this sharding that the columns do not have, while its columns are gathered.
    """
    if len(token_dims) > 1:
        return MIN_RATIO_TO_UNSHARD_TABLE
    others = tuple(axis for axis in token_dims[0] if axis not in columns)
    return mesh_size(assignment.mesh, others) / (1 + 1 / mesh_size(assignment.mesh, columns))


def _lookups_per_token(rows: MeshAxes, columns: MeshAxes, tokens: MeshAxes, assignment: ShardingAssignment) -> float:
    """Number of tokens that a device looks up, divided by the number of its own tokens."""
    shared = tuple(axis for axis in tokens if axis in (*rows, *columns))
    if columns or not shared:
        return mesh_size(assignment.mesh, shared)
    # all devices with the same rows divide the tokens, also along mesh axes that do not shard them
    mesh = assignment.mesh
    return mesh_size(mesh, tokens) * mesh_size(mesh, rows) / math.prod(mesh.values())


def _token_axes(table: TracedArray, result: TracedArray, assignment: ShardingAssignment) -> list[MeshAxes]:
    """Mesh axes of every sharded dimension of the tokens."""
    factors = (factor for factor in result.factors if factor[0] not in table.axes)
    return [axes for factor in factors if (axes := _of_several(assignment.mesh_axes((factor,)), assignment))]


def _of_several(axes: MeshAxes, assignment: ShardingAssignment) -> MeshAxes:
    """The mesh axes among `axes` with more than one device."""
    return tuple(axis for axis in axes if assignment.mesh[axis] > 1)


def _table_axes(table: TracedArray, result: TracedArray, assignment: ShardingAssignment) -> tuple[MeshAxes, MeshAxes]:
    """Mesh axes that shard the rows and the columns of a stored table."""
    kept = set(result.axes)
    rows = assignment.mesh_axes(tuple(f for f in table.factors if f[0] not in kept), assignment.params)
    columns = assignment.mesh_axes(tuple(f for f in table.factors if f[0] in kept), assignment.params)
    return _of_several(rows, assignment), _of_several(columns, assignment)
