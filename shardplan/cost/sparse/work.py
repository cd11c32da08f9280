"""One device's part of a call of Native Sparse Attention or of `attend_to_blocks`: sequences, groups, positions."""

from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil
from typing import Protocol, assert_never

from shardplan.cost.sharding import CompilerQuirks, ShardingAssignment
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import QUERIES_PER_CHUNK
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.plan.attention_plan import SparseKernel
from shardplan.plan.mapping import MeshAxes, mesh_size
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.marked.block_attention_kind import BlockAttentionKind
from shardplan.program.named_arrays import TracedArray, size_of
from shardplan.program.tasks import Task


class BlockSizes(Protocol):
    """The sizes of attention to selected blocks, as `NativeSparseConfig` has them."""

    @property
    def heads_per_group(self) -> int:
        """Number of query heads per key head."""

    @property
    def key_size(self) -> int:
        """Channels of a head of queries and keys."""

    @property
    def value_size(self) -> int:
        """Channels of a head of values."""

    @property
    def selection_block(self) -> int:
        """Tokens of a selection block."""

    @property
    def selected(self) -> int:
        """Number of blocks that each query attends to."""

    def selection_blocks(self, positions: int) -> int:
        """Return the number of selection blocks of a sequence."""


@dataclass(frozen=True)
class SelectedWork:
    """One device's work for attention to selected blocks, in a forward call."""

    config: BlockSizes
    method: SparseKernel
    itemsize: int
    sequences: float
    """Number of sequences of the device."""
    groups: float
    """Number of groups of the device."""
    parts: PositionParts
    batch_axes: MeshAxes
    """Mesh axes that shard the batch."""
    position_axes: MeshAxes
    """Mesh axes that shard positions."""
    core_memory: int = CompilerQuirks().core_memory
    """Bytes of the memory of a core (VMEM), in which kernels keep keys and their gradients."""
    queries_per_chunk: int = QUERIES_PER_CHUNK
    """Number of queries that XLA computes at a time."""

    @cached_property
    def positions(self) -> float:
        """Number of positions of the device."""
        return self.parts.length / self.parts.devices

    @cached_property
    def chunk(self) -> float:
        """Number of queries in a chunk."""
        return min(self.positions, self.queries_per_chunk)

    @cached_property
    def has_chunks(self) -> bool:
        """Whether the device has more than one chunk of queries, so that gradients recompute each chunk."""
        return self.positions > self.queries_per_chunk

    @cached_property
    def heads(self) -> float:
        """Number of pairs of a sequence and a group."""
        return self.sequences * self.groups

    @cached_property
    def rows(self) -> float:
        """Number of pairs of a query and a group."""
        return self.positions * self.heads

    @cached_property
    def channels(self) -> int:
        """Channels of a key and a value together."""
        return self.config.key_size + self.config.value_size

    @cached_property
    def selected_keys(self) -> int:
        """Number of keys per query in the selected branch without kernels, masked ones included."""
        assert self.method is not SparseKernel.KERNEL
        match self.method:
            case SparseKernel.GATHERED_BLOCKS:
                return self.config.selected * self.config.selection_block
            case SparseKernel.DENSE_MASK:
                return self.parts.length
            case _:
                assert_never(self.method)


@dataclass(frozen=True)
class SparseWork(SelectedWork):
    """One device's work for a forward call of Native Sparse Attention."""

    config: NativeSparseConfig

    @cached_property
    def compressed_blocks(self) -> int:
        """Number of compressed blocks of the sequence."""
        return self.config.compressed_blocks(self.parts.length)

    @cached_property
    def window_keys(self) -> float:
        """Number of keys per query in the window branch, masked ones included."""
        return self.chunk + self.config.window - 1


def work_of(task: Task, assignment: ShardingAssignment) -> SparseWork:
    """Return the work of one device for a call; for a gradient, the work of its forward pass."""
    assert task.attention is not None
    return sparse_work(task.attention, task.sparse_queries, assignment)


def sparse_work(kind: AttentionKind, queries: TracedArray, assignment: ShardingAssignment) -> SparseWork:
    """Return one device's work for a call of Native Sparse Attention.

    Args:
        queries: {batch, position, groups, heads of a group, channels}.
    """
    assert kind.sparse is not None
    plan = assignment.attention_of(kind)
    batch_axes, position_axes, group_axes, *_ = _sharding_of(queries, assignment)
    batch, length = size_of(queries.dims[0]), size_of(queries.dims[1])
    return SparseWork(
        config=kind.sparse,
        method=plan.sparse_kernel,
        itemsize=queries.itemsize,
        sequences=batch / mesh_size(assignment.mesh, batch_axes),
        groups=kind.sparse.groups / mesh_size(assignment.mesh, group_axes),
        parts=PositionParts(length, mesh_size(assignment.mesh, position_axes), plan.layout),
        batch_axes=batch_axes,
        position_axes=position_axes,
        core_memory=assignment.quirks.core_memory,
    )


def given_block_work(kind: BlockAttentionKind, queries: TracedArray, assignment: ShardingAssignment) -> SelectedWork:
    """Return one device's work for a call of `attend_to_blocks`; it may have only a part of each group's heads.

    Args:
        queries: as in `sparse_work`.
    """
    batch_axes, position_axes, group_axes, head_axes, _ = _sharding_of(queries, assignment)
    batch, length = size_of(queries.dims[0]), size_of(queries.dims[1])
    heads_per_group = ceil(kind.heads_per_group / mesh_size(assignment.mesh, head_axes))
    return SelectedWork(
        config=replace(kind, heads_per_group=heads_per_group),
        method=kind.method,
        itemsize=queries.itemsize,
        sequences=batch / mesh_size(assignment.mesh, batch_axes),
        groups=kind.groups / mesh_size(assignment.mesh, group_axes),
        parts=PositionParts(length, mesh_size(assignment.mesh, position_axes), kind.layout),
        batch_axes=batch_axes,
        position_axes=position_axes,
        core_memory=assignment.quirks.core_memory,
        queries_per_chunk=kind.queries_per_chunk,
    )


def _sharding_of(queries: TracedArray, assignment: ShardingAssignment) -> list[MeshAxes]:
    """Return the mesh axes of size > 1 that shard each dimension of queries."""
    sharding = assignment.dimension_mesh_axes(queries, assignment.compute)
    return [tuple(axis for axis in axes if assignment.mesh[axis] > 1) for axes in sharding]
