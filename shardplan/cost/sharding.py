"""Sharding of arrays by a mesh and two axis mappings: shards per dimension, bytes per device, weight gathers. Pure."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.experts.method import ExpertMethod
from shardplan.plan.attention_plan import AttentionPlan
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, mesh_size
from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.named_arrays import Dim, MajorAxes, TracedArray, is_parameter_like, mapped, shape_of

TILE_BYTES = 32
"""Bytes in one lane of a tile: a tile has 8 rows of float32, or 16 of bfloat16."""
REORDERING_COPIES = 2
"""Number of buffers of the gathered size that an all-gather along several dimensions needs, for its result and to
reorder it."""


@dataclass(frozen=True)
class CompilerQuirks:
    """Behaviour of the compiler for one TPU generation, beyond the rules of the partitioner."""

    gathers_become_sums_from: int | None = None
    """Smallest number of devices for which an all-gather is compiled to an all-reduce of zero-padded shards."""
    overlaps_sums: bool = False
    """Whether an all-gather that is compiled to an all-reduce overlaps with matmuls as the all-gather would."""
    scatters_over_slice: bool = False
    """Whether a reduce-scatter over all devices of a slice stays one; otherwise it becomes an all-reduce."""
    copies_stacks: bool = False
    """Whether stacked parameters are copied into another memory layout before the loop over them."""
    gathers_late: bool = False
    """Whether gathers of the first parameters of a loop's layers run before their matmuls, with nothing to hide
    behind, in steps with gradients."""
    gathers_early: bool = False
    """Whether the parameters of a loop's body are gathered all at once."""
    wide_rows: bool = False
    """Whether the kernel of grouped matmuls writes rows in float32, which are converted afterwards."""
    frees_rows: bool = False
    """Whether rows routed to experts are freed after their last use, rather than after the last gradient."""
    devices_per_slice: int | None = None
    """Number of devices of one slice; None if the mesh has only one slice."""
    plain_attention: bool = False
    """Whether attention runs without a kernel, so that it writes scores to memory."""
    core_memory: int = 16 * 2**20
    """Bytes of the memory of a core (VMEM); by default the smallest of all generations."""


class WeightGather(NamedTuple):
    """The all-gather of a parameter whose stored sharding has more shards than its compute sharding."""

    axes: MeshAxes
    """Mesh axes over which the parameter is gathered."""
    bytes: float
    """Bytes on a device after the gather."""
    copies: int
    """Number of buffers of the gathered size that the gather needs."""
    num_dimensions: int
    """Number of the parameter's dimensions along which it is gathered."""


@dataclass(frozen=True)
class ShardingAssignment:
    """A mesh with the mappings of logical axes to mesh axes: `compute` for computation, `params` for storage."""

    mesh: MeshShape
    compute: AxisMapping
    params: AxisMapping
    merged_axes: Mapping[str, Dim]
    """Logical axis -> the axes into which other parts of the program split it."""
    activation_axes: tuple[str, ...]
    """The logical axes of tokens: batch and position."""
    quirks: CompilerQuirks = CompilerQuirks()
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    """Kind of attention -> how it is computed; see `attention_of`."""
    experts: ExpertMethod = field(default_factory=ExpertMethod)
    """How routed experts are computed."""
    documents: tuple[int, ...] | None = None
    """Lengths of the documents of every sequence, if they are known; tokens attend only to their own document."""
    shard_counts: dict[MajorAxes, int] = field(default_factory=dict, compare=False, repr=False)
    """Cache of `num_shards` under `compute`; assignments with equal `mesh` and `compute` may share it."""
    stored_counts: dict[MajorAxes, int] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of `num_shards` under `params`."""
    gathers: dict[TracedArray, WeightGather | None] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Cache of `weight_gather`."""

    @property
    def sliced_mesh_axes(self) -> MeshAxes:
        """Mesh axes that shard stored parameters beyond the compute mapping, but neither batch nor positions.

        Devices along them repeat the same work. The compiler does not gather these parameters: it slices activations
        and adds partial sums, which no cost here describes.
        """
        sliced = set[str]()
        for axis, mesh_axes in self.params.items():
            sliced.update(set(mesh_axes).difference(self.compute.get(axis, ())))
        for axis in self.activation_axes:
            sliced.difference_update(self.compute.get(axis, ()))
        return tuple(axis for axis, size in self.mesh.items() if size > 1 and axis in sliced)

    def attention_of(self, kind: AttentionKind) -> AttentionPlan:
        """Return how a kind of attention is computed."""
        return self.attention.of(kind.name) if self.attention.kinds else self.attention

    @property
    def idle_mesh_axes(self) -> MeshAxes:
        """Mesh axes of size > 1 that shard no computation, so that devices along them repeat the same work."""
        used = {mesh_axis for mesh_axes in self.compute.values() for mesh_axis in mesh_axes}
        return tuple(axis for axis, size in self.mesh.items() if size > 1 and axis not in used)

    def spans_slice(self, axes: MeshAxes) -> bool:
        """Return whether a group of devices along `axes` has as many devices as a slice."""
        return mesh_size(self.mesh, axes) == (self.quirks.devices_per_slice or math.prod(self.mesh.values()))

    def compiles_all_gather_to_all_reduce(self, axes: MeshAxes) -> bool:
        """Return whether an all-gather over `axes` is compiled to an all-reduce."""
        min_devices = self.quirks.gathers_become_sums_from
        return min_devices is not None and self.spans_slice(axes) and mesh_size(self.mesh, axes) >= min_devices

    def compiles_reduce_scatter_to_all_reduce(self, axes: MeshAxes) -> bool:
        """Return whether a reduce-scatter over `axes` is compiled to an all-reduce."""
        return self.spans_slice(axes) and not self.quirks.scatters_over_slice

    def is_stored_like_a_parameter(self, array: TracedArray) -> bool:
        """Return whether `array` is in the stored sharding between tasks, as parameters, copies and gradients are."""
        return is_parameter_like(array, self.activation_axes)

    def dimension_mesh_axes(self, array: TracedArray, mapping: AxisMapping | None = None) -> list[MeshAxes]:
        """Return the mesh axes that shard each dimension of `array` under `mapping`; default: as between tasks."""
        if mapping is None:
            mapping = self.params if self.is_stored_like_a_parameter(array) else self.compute
        used: set[str] = set()
        result = []
        for name in array.majors:
            axes = mapping.get(name, ()) if isinstance(name, str) else ()  # `mapped`, inlined: this runs most often
            if axes:
                if not used.isdisjoint(axes):
                    axes = tuple(axis for axis in axes if axis not in used)
                used.update(axes)
            result.append(axes)
        return result

    def num_shards(self, array: TracedArray, mapping: AxisMapping | None = None) -> int:
        """Return the number of shards of `array` under `mapping`; default: as it is between tasks."""
        if mapping is None:
            mapping = self.params if self.is_stored_like_a_parameter(array) else self.compute
        if mapping is self.compute:
            counts = self.shard_counts
        elif mapping is self.params:
            counts = self.stored_counts
        else:
            return self._num_shards(array, mapping)
        number = counts.get(array.majors)
        if number is None:
            number = counts[array.majors] = self._num_shards(array, mapping)
        return number

    def _num_shards(self, array: TracedArray, mapping: AxisMapping) -> int:
        return math.prod(mesh_size(self.mesh, axes) for axes in self.dimension_mesh_axes(array, mapping) if axes)

    def bytes(self, array: TracedArray, mapping: AxisMapping | None = None) -> float:
        """Return the bytes of one shard of `array` under `mapping`; default: as it is between tasks."""
        return array.elements * array.itemsize / self.num_shards(array, mapping)

    def mesh_axes(self, factors: Dim, mapping: AxisMapping | None = None) -> MeshAxes:
        """Return the mesh axes that shard any of some logical axes under `mapping` (default: `compute`), in order."""
        source = self.compute if mapping is None else mapping
        used: set[str] = set()
        for name, _ in factors:
            if isinstance(name, str) and name in source:  # `mapped`, inlined
                used.update(source[name])
        return tuple(axis for axis in self.mesh if axis in used) if used else ()

    def weight_gather(self, weight: TracedArray) -> WeightGather | None:
        """Return the all-gather of a parameter before its use; None if its compute and stored shardings are equal."""
        if weight not in self.gathers:
            self.gathers[weight] = self._weight_gather(weight)
        return self.gathers[weight]

    def _weight_gather(self, weight: TracedArray) -> WeightGather | None:
        stored = self.mesh_axes(weight.factors, self.params)
        if not stored:
            return None
        used = {} if self.is_gathered_whole_by_mistake(weight) else self.compute
        kept = self.mesh_axes(weight.factors, used)
        axes = tuple(axis for axis in stored if axis not in kept)
        if not axes:
            return None
        dimensions = self.num_dimensions(weight, axes)
        is_reordered = dimensions > 1 or not self._fills_tiles(weight, axes)
        copies = REORDERING_COPIES if is_reordered else 2 if self.compiles_all_gather_to_all_reduce(axes) else 1
        return WeightGather(axes, self.bytes(weight, used), copies, dimensions)

    def _fills_tiles(self, matrix: TracedArray, axes: MeshAxes) -> bool:
        """Return whether shards of a stored matrix along `axes` are complete tiles, so that a gather reorders nothing.

        An array with more dimensions has a memory layout in which the gathered dimension is not one of the tile's.
        """
        if len(matrix.dims) != 2:
            return True
        return all(
            size % (mesh_size(self.mesh, stored) * TILE_BYTES // matrix.itemsize) == 0
            for size, stored in zip(shape_of(matrix), self.dimension_mesh_axes(matrix, self.params), strict=True)
            if not set(axes).isdisjoint(stored)
        )

    def num_dimensions(self, array: TracedArray, axes: MeshAxes) -> int:
        """Return the number of dimensions of a stored array that any of the mesh axes `axes` shards."""
        return sum(not set(axes).isdisjoint(each) for each in self.dimension_mesh_axes(array, self.params))

    def is_gathered_whole_by_mistake(self, array: TracedArray) -> bool:
        """Return whether XLA's partitioner gathers a parameter over more mesh axes than computation needs.

        This happens in jaxlib 0.10 and 0.11, if a dimension is stored on two mesh axes, the compute sharding keeps only
        the first, and the parameter is replicated along a third. The partitioner confuses the third axis with the first
        if both have the same size.
        """
        if not any(len(mapped(name, self.params)) == 2 for name in array.majors):
            return False
        stored_axes = self.dimension_mesh_axes(array, self.params)
        sharding = {axis for axes in stored_axes for axis in axes}
        others = [self.mesh[axis] for axis in self.mesh if axis not in sharding]
        return any(
            len(stored) == 2 and used == stored[:1] and self.mesh[stored[0]] > 1 and self.mesh[stored[0]] in others
            for stored, used in zip(stored_axes, self.dimension_mesh_axes(array, self.compute), strict=True)
        )
