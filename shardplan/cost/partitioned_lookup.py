"""Lookups of rows in a sharded table, as XLA's partitioner splits them into local lookups and collectives. Pure.

The partitioner has three methods. Each divides the devices into groups, and leaves a smaller lookup to every group,
which is split in the same way until the table of a group is not sharded:

- *by tokens*: a group looks up its own tokens. The table is gathered as far as a group would not hold all of it.
- *by columns*: a group looks up the tokens of all groups in its columns; then the columns are gathered, or exchanged
  for tokens.
- *by rows*: a group looks up the tokens of all groups in its rows, and has zeros for others; the results are summed.

It takes the method whose largest array is smallest, and of equal ones the one that moves fewer bytes. To compare them
it assumes that the lookup of a group is not split: the table of the group is gathered, and each of its devices looks up
all of the group's tokens. These are the rules of `spmd/gather_scatter_handler` in XLA (jaxlib 0.11);
`tests/compiler/test_lookup.py` compares what follows from them with compiled lookups. Only numbers of shards matter:
where the devices that share a shard of the table are others than those that share tokens, shards are permuted, which
has no price here.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import combinations
from typing import NamedTuple

from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import CollectiveKind
from shardplan.plan.mapping import MeshAxes, MeshShape, mesh_size
from shardplan.program.named_arrays import TracedArray

INDEX_BYTES = 4
"""Bytes of the index of one token."""


@dataclass(frozen=True)
class LookupStep:
    """A collective of a lookup, with its bytes on one device."""

    kind: CollectiveKind
    axes: MeshAxes
    """Mesh axes whose devices exchange data."""
    devices: int
    """Number of devices that exchange data with each other; fewer than along `axes` if an axis is split."""
    bytes_before: float
    bytes_after: float
    is_of_table: bool = False
    """Whether the step gathers the table before rows are looked up; all other steps communicate the result."""


@dataclass(frozen=True)
class PartitionedLookup:
    """The collectives that the partitioner adds to a lookup, in order."""

    steps: tuple[LookupStep, ...]
    result_bytes: float
    """Bytes of the result in its compute sharding, on one device."""

    @property
    def gathered_table_bytes(self) -> float:
        """Bytes of the table on a device after its gather; 0 without one."""
        return max((step.bytes_after for step in self.steps if step.is_of_table), default=0.0)

    @property
    def transient_bytes(self) -> float:
        """Largest bytes of temporary arrays during any step after the table's gather.

        A step's input and output are in memory together. One of them becomes the result, except if a sum of partial
        results becomes the result by an all-to-all. Transient arrays that are no larger than the result are fused with
        it.
        """
        steps = [step for step in self.steps if not step.is_of_table]
        size = max((step.bytes_before + step.bytes_after for step in steps), default=0.0)
        if {CollectiveKind.ALL_REDUCE, CollectiveKind.ALL_TO_ALL} <= {step.kind for step in steps}:
            return size
        return size - self.result_bytes if size > 2 * self.result_bytes else 0.0


def partition_lookup(table: TracedArray, result: TracedArray, assignment: ShardingAssignment) -> PartitionedLookup:
    """Return the steps that look up `result` (tokens, columns) in `table` (rows, columns) in its stored sharding."""
    own = assignment.bytes(result, assignment.compute)
    if table.weight is None:
        return PartitionedLookup((), own)
    mesh = assignment.mesh
    column_factors = tuple(factor for factor in table.factors if factor[0] in result.axes)
    row_factors = tuple(factor for factor in table.factors if factor[0] not in result.axes)
    token_factors = tuple(factor for factor in result.factors if factor[0] not in table.axes)
    kept = assignment.mesh_axes(column_factors)  # the result's columns stay sharded over these mesh axes
    stored = assignment.mesh_axes(column_factors, assignment.params)
    columns = _of_several(tuple(axis for axis in stored if axis not in kept), mesh)
    rows = _of_several(assignment.mesh_axes(row_factors, assignment.params), mesh)
    dims = (_of_several(assignment.mesh_axes((factor,)), mesh) for factor in token_factors)
    tokens = [axes for axes in dims if axes]
    shards = tuple(mesh_size(mesh, axes) for axes in tokens)
    exchanges = _split(
        _Lookup(
            devices=math.prod(mesh.values()) // mesh_size(mesh, kept),
            rows=mesh_size(mesh, rows),
            columns=mesh_size(mesh, columns),
            tokens=shards,
            result_tokens=shards,
            table_bytes=table.elements * table.itemsize / mesh_size(mesh, kept),
            result_bytes=own * math.prod(shards),
            index_bytes=INDEX_BYTES * math.prod(size for _, size in token_factors),
            resharding=_resharding(columns, tokens, mesh),
        )
    )
    sharding_tokens = set[str]().union(*tokens)
    axes_of_array = {
        _Array.TABLE: (*rows, *columns),
        _Array.SUMS: rows,
        # tokens are divided among devices first along mesh axes that shard nothing, or rows alone
        _Array.TOKENS: sorted(_of_several(tuple(mesh), mesh), key=lambda a: (a in sharding_tokens, a in columns)),
        _Array.COLUMNS: columns,
    }
    steps = []
    for kind, array, devices, size in exchanges:
        before = size / devices if kind == CollectiveKind.ALL_GATHER else size
        axes = _axes_of(devices, axes_of_array[array], mesh)
        steps.append(LookupStep(kind, axes, devices, before, size, is_of_table=array == _Array.TABLE))
    return PartitionedLookup(tuple(steps), own)


class _Array(Enum):
    """An array that devices exchange in a lookup."""

    TABLE = auto()
    SUMS = auto()
    TOKENS = auto()
    COLUMNS = auto()


class _Exchange(NamedTuple):
    """A collective of a lookup, before its mesh axes are chosen."""

    kind: CollectiveKind
    array: _Array
    devices: int
    """Number of devices that exchange data with each other."""
    bytes: float
    """Bytes on a device after the collective."""


class _Resharding(Enum):
    """The ways to reshard a lookup's result from shards of columns to shards of tokens."""

    GATHER = auto()
    """Tokens are sharded already, over other devices than columns; the columns are all-gathered."""
    EXCHANGE = auto()
    """An all-to-all gives a device all columns of its tokens."""
    REPLICATE = auto()
    """The partitioner knows no direct way: the result becomes replicated, and each device keeps its tokens."""


@dataclass(frozen=True)
class _Lookup:
    """A lookup by a group of devices; bytes are the bytes of unsharded arrays."""

    devices: int
    """Number of devices in the group."""
    rows: int
    """Number of shards along the table's rows."""
    columns: int
    """Number of shards along the table's columns; the result's columns are unsharded."""
    tokens: tuple[int, ...]
    """Number of shards of each dimension of the tokens."""
    result_tokens: tuple[int, ...]
    """Number of shards of each dimension of the tokens in the result."""
    table_bytes: float
    result_bytes: float
    index_bytes: float
    resharding: _Resharding

    @property
    def num_tokens(self) -> int:
        """Number of shards of the tokens."""
        return math.prod(self.tokens)

    @property
    def result_shards(self) -> int:
        """Number of shards of the result."""
        return math.prod(self.result_tokens)

    @property
    def resharding_of_group(self) -> _Resharding:
        """How a lookup within a group goes from shards of columns to shards of tokens.

        Numbers of shards decide, and not mesh axes as in `_resharding`: within a group the partitioner may choose which
        devices share a shard.
        """
        if self.columns * self.result_shards <= self.devices:
            return _Resharding.GATHER
        return _Resharding.EXCHANGE if self.columns == self.result_shards else _Resharding.REPLICATE


class _Estimate:
    """The cost of a method for a lookup: bytes of its largest arrays in memory, and bytes that it moves."""

    def __init__(self, table: float, result: float, indices: float) -> None:
        """Start with a lookup of `result` bytes in `table` bytes, with `indices` bytes of indices, on every device."""
        self.largest = table + result + indices
        self.moved = 0.0

    def gather(self, before: float, after: float) -> None:
        """Add an all-gather, if there is one; its operand and result are in memory together."""
        if after > before:
            self.largest = max(self.largest, before + after)
            self.moved += after

    def exchange(self, size: float) -> None:
        """Add an all-to-all; its operand and result are in memory together."""
        self.largest = max(self.largest, 2 * size)
        self.moved += size

    def sum(self, size: float) -> None:
        """Add an all-reduce, which is in place and moves its array twice."""
        self.largest = max(self.largest, size)
        self.moved += 2 * size

    @property
    def rank(self) -> tuple[float, float]:
        """Sort key, smaller for the better method."""
        return self.largest, self.moved


@functools.cache
def _split(lookup: _Lookup) -> tuple[_Exchange, ...]:
    """Return the collectives of a lookup, by the method with the least estimate."""
    methods: list[tuple[_Estimate, Callable[[_Lookup], tuple[_Exchange, ...]]]] = []
    if lookup.columns > 1:
        methods.append((_estimate_by_columns(lookup), _split_by_columns))
    if lookup.rows > 1:
        methods.append((_estimate_by_rows(lookup), _split_by_rows))
    if lookup.num_tokens > 1:
        methods.append((_estimate_by_tokens(lookup), _split_by_tokens))
    if not methods:
        return ()
    _, split = min(methods, key=lambda method: method[0].rank)
    return split(lookup)


def _estimate_by_tokens(lookup: _Lookup) -> _Estimate:
    size = lookup.result_bytes / lookup.num_tokens
    held = lookup.table_bytes / (lookup.rows * lookup.columns)
    kept = lookup.table_bytes / math.prod(_group_table(lookup))
    estimate = _Estimate(lookup.table_bytes, size, lookup.index_bytes / lookup.num_tokens)
    estimate.gather(held, kept)
    estimate.gather(kept, lookup.table_bytes)
    estimate.gather(size, lookup.result_bytes / lookup.result_shards)
    return estimate


def _split_by_tokens(lookup: _Lookup) -> tuple[_Exchange, ...]:
    rows, columns = _group_table(lookup)
    held, kept = lookup.rows * lookup.columns, rows * columns
    group = replace(
        lookup,
        devices=lookup.devices // lookup.num_tokens,
        rows=rows,
        columns=columns,
        tokens=(1,),
        result_tokens=(1,),
        result_bytes=lookup.result_bytes / lookup.num_tokens,
        index_bytes=lookup.index_bytes / lookup.num_tokens,
    )
    table = _gather(_Array.TABLE, held // kept, lookup.table_bytes / kept)
    ratio = lookup.num_tokens // lookup.result_shards
    tokens = _gather(_Array.TOKENS, ratio, lookup.result_bytes / lookup.result_shards)
    return (*table, *_split_group(group), *tokens)


def _group_table(lookup: _Lookup) -> tuple[int, ...]:
    """Return the shards of the table's rows and columns within a group of devices that has the same tokens."""
    return _group((lookup.rows, lookup.columns), lookup.devices, lookup.num_tokens)


def _estimate_by_columns(lookup: _Lookup) -> _Estimate:
    table, result = lookup.table_bytes / lookup.columns, lookup.result_bytes / lookup.columns
    whole = lookup.result_bytes / lookup.result_shards
    estimate = _Estimate(table, result, lookup.index_bytes)
    estimate.gather(table / lookup.rows, table)
    match lookup.resharding:
        case _Resharding.GATHER:
            estimate.gather(whole / lookup.columns, whole)
        case _Resharding.EXCHANGE:
            estimate.exchange(whole)
        case _Resharding.REPLICATE:
            estimate.gather(result, lookup.result_bytes)
    return estimate


def _split_by_columns(lookup: _Lookup) -> tuple[_Exchange, ...]:
    columns, whole = lookup.columns, lookup.result_bytes / lookup.result_shards
    tokens = _group(lookup.tokens, lookup.devices, columns)
    match lookup.resharding:
        case _Resharding.GATHER:
            result_tokens = tuple(map(min, tokens, lookup.result_tokens))
            last = _gather(_Array.COLUMNS, columns, whole)
        case _Resharding.EXCHANGE:
            result_tokens = (lookup.result_shards // columns,)  # each keeps the tokens that it will exchange
            last = (_Exchange(CollectiveKind.ALL_TO_ALL, _Array.COLUMNS, columns, whole),)
        case _Resharding.REPLICATE:
            result_tokens = (1,)
            last = _gather(_Array.COLUMNS, columns, lookup.result_bytes)
    group = replace(
        lookup,
        devices=lookup.devices // columns,
        columns=1,
        tokens=tokens,
        result_tokens=result_tokens,
        table_bytes=lookup.table_bytes / columns,
        result_bytes=lookup.result_bytes / columns,
    )
    return (*_split_group(group), *last)


def _estimate_by_rows(lookup: _Lookup) -> _Estimate:
    table = lookup.table_bytes / lookup.rows
    summed = lookup.result_bytes / math.prod(_group_of_rows(lookup)[1])
    estimate = _Estimate(table, lookup.result_bytes, lookup.index_bytes)
    estimate.gather(table / lookup.columns, table)
    estimate.sum(summed)
    estimate.gather(summed, lookup.result_bytes / lookup.result_shards)
    return estimate


def _split_by_rows(lookup: _Lookup) -> tuple[_Exchange, ...]:
    tokens, result_tokens = _group_of_rows(lookup)
    group = replace(
        lookup,
        devices=lookup.devices // lookup.rows,
        rows=1,
        tokens=tokens,
        result_tokens=result_tokens,
        table_bytes=lookup.table_bytes / lookup.rows,
    )
    summed = math.prod(result_tokens)
    sums = _Exchange(CollectiveKind.ALL_REDUCE, _Array.SUMS, lookup.rows, lookup.result_bytes / summed)
    ratio, size = summed // lookup.result_shards, lookup.result_bytes / lookup.result_shards
    return (*_split_group(group), sums, *_gather(_Array.TOKENS, ratio, size))


def _group_of_rows(lookup: _Lookup) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shards of tokens and of the result's tokens within a group of devices with the same table rows.

    If one of the two would be unsharded within the group, it takes the sharding of the other.
    """
    tokens = _group(lookup.tokens, lookup.devices, lookup.rows)
    result_tokens = _group(lookup.result_tokens, lookup.devices, lookup.rows)
    if math.prod(result_tokens) == 1:
        return tokens, tokens
    return (tokens if math.prod(tokens) > 1 else result_tokens), result_tokens


def _split_group(group: _Lookup) -> tuple[_Exchange, ...]:
    return _split(replace(group, resharding=group.resharding_of_group))


def _gather(array: _Array, devices: int, size: float) -> tuple[_Exchange, ...]:
    """Return an all-gather to `size` bytes; None if the array is not sharded."""
    return (_Exchange(CollectiveKind.ALL_GATHER, array, devices, size),) if devices > 1 else ()


def _group(shards: tuple[int, ...], devices: int, num_groups: int) -> tuple[int, ...]:
    """Return how many shards each dimension has within a group, if each of `num_groups` groups holds the whole array.

    Each group gets a copy that devices have already. If there are fewer copies than groups, dimensions are gathered in
    order until there are enough; if that is impossible, the whole array is gathered.
    """
    copies = devices // math.prod(shards)
    if copies % num_groups == 0:
        return shards
    if num_groups % copies:
        return (1,) * len(shards)
    missing = num_groups // copies
    left = []
    for size in shards:
        if missing % size == 0:
            missing //= size
            left.append(1)
        elif size % missing == 0:
            left.append(size // missing)
            missing = 1
        else:
            left.append(size)
    return tuple(left) if missing == 1 else (1,) * len(shards)


def _resharding(columns: MeshAxes, tokens: Sequence[MeshAxes], mesh: MeshShape) -> _Resharding:
    """Return how a lookup reshards columns, which depends on the order of the mesh axes of columns and tokens."""
    if set[str]().union(*tokens).isdisjoint(columns):
        return _Resharding.GATHER
    if len(tokens) > 1:
        return _Resharding.REPLICATE
    is_minor = tokens[0][-len(columns) :] == columns
    is_equal = mesh_size(mesh, tokens[0]) == mesh_size(mesh, columns)
    return _Resharding.EXCHANGE if is_minor or is_equal else _Resharding.REPLICATE


def _axes_of(devices: int, candidates: Sequence[str], mesh: MeshShape) -> MeshAxes:
    """Return the first combination of `candidates` with `devices` devices; all of them if there is none."""
    for i, last in enumerate(candidates):
        for count in range(i + 1):
            for others in combinations(candidates[:i], count):
                if mesh_size(mesh, (*others, last)) == devices:
                    return (*others, last)
    return tuple(candidates)


def _of_several(axes: MeshAxes, mesh: MeshShape) -> MeshAxes:
    """Return the mesh axes in `axes` that have more than one device."""
    return tuple(axis for axis in axes if mesh[axis] > 1)
