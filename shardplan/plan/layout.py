"""A mesh with both mappings, and what they make of arrays: how each is cut, and what is gathered for use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.model.named import Array, Dim
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, mesh_size

REARRANGED_COPIES = 3
"""Arrays of the gathered size that a gather along several dimensions needs until the result is in order."""


@dataclass(frozen=True)
class Habits:
    """What the compiler of a generation does beyond the partitioner's rules."""

    gathers_become_sums_from: int | None = None
    """An all-gather over at least this many devices is written as an all-reduce of zeros with a part filled in."""
    copies_stacks: bool = False
    """Stacked parameters are copied into another layout before the loop over them."""
    gathers_early: bool = False
    """Parameters are gathered before the loop that comes before their use, and those of a loop's body all at once."""
    wide_rows: bool = False
    """The kernel of products by groups writes rows in float32; they are converted afterwards."""
    frees_rows: bool = False
    """Rows that experts are chosen for are freed after their last use, not with the last of the gradients."""
    plain_attention: bool = False
    """Attention has no kernel: a block of scores is in memory."""
    gathers_keys: bool = False
    """Where positions are cut, attention has all keys brought together, as shardplan's does and Levanter's does not."""


@dataclass(frozen=True)
class Layout:
    """A mesh with the mappings of logical axes: while computing, and of parameters at rest."""

    mesh: MeshShape
    compute: AxisMapping
    params: AxisMapping
    merged: Mapping[str, Dim]
    activation_axes: tuple[str, ...]
    habits: Habits = Habits()

    def is_whole(self, axes: MeshAxes) -> bool:
        """Whether devices along `axes` are all there are."""
        return mesh_size(self.mesh, axes) == math.prod(self.mesh.values())

    def sums_to_gather(self, axes: MeshAxes) -> bool:
        """Whether a gather over `axes` is written as a sum."""
        least = self.habits.gathers_become_sums_from
        return least is not None and self.is_whole(axes) and mesh_size(self.mesh, axes) >= least

    def gathered_dimensions(self, array: Array) -> int:
        """Along how many dimensions of a parameter it is gathered for use."""
        gathered = set(self.gathered(array))
        return sum(bool(gathered & set(axes)) for axes in self.cut(array, self.params))

    def gather_copies(self, array: Array) -> int:
        """Arrays of the gathered size that a gather of a parameter needs."""
        if self.gathered_dimensions(array) > 1:
            return REARRANGED_COPIES
        return 2 if self.sums_to_gather(self.gathered(array)) else 1

    def rests(self, array: Array) -> bool:
        """Whether `array` is a parameter, a copy of one, or a gradient: these are cut as parameters at rest."""
        if array.weight is not None:
            return True
        return all(name is not None and name not in self.activation_axes for name, n in array.factors if n > 1)

    def cut(self, array: Array, mapping: AxisMapping | None = None) -> list[MeshAxes]:
        """Mesh axes that cut each dimension; by default as `array` is kept between tasks."""
        mapping = mapping if mapping is not None else self.params if self.rests(array) else self.compute
        used: set[str] = set()
        cuts = []
        for dim in array.dims:
            # of merged axes only the major one stays cut in place
            axes = tuple(axis for axis in mapping.get(dim[0][0] or "", ()) if axis not in used) if dim else ()
            used |= set(axes)
            cuts.append(axes)
        return cuts

    def parts(self, array: Array, mapping: AxisMapping | None = None) -> int:
        """Into how many parts `array` is cut."""
        return math.prod(mesh_size(self.mesh, axes) for axes in self.cut(array, mapping))

    def bytes(self, array: Array, mapping: AxisMapping | None = None) -> float:
        """Bytes of `array` on one device."""
        return array.elements * array.itemsize / self.parts(array, mapping)

    def mesh_axes(self, names: Dim, mapping: AxisMapping | None = None) -> MeshAxes:
        """The mesh axes that the named axes are mapped to while computing, each once, in the mesh's order."""
        source = self.compute if mapping is None else mapping
        found = {axis for name, _ in names for axis in source.get(name or "", ())}
        return tuple(axis for axis in self.mesh if axis in found)

    def gathered(self, array: Array) -> MeshAxes:
        """Mesh axes over which a parameter is gathered for use."""
        used = set() if self.is_mistaken(array) else set(self.mesh_axes(array.factors))
        return tuple(axis for axis in self.mesh_axes(array.factors, self.params) if axis not in used)

    def gathered_bytes(self, array: Array) -> float:
        """Bytes of a parameter on one device, once it is gathered for use."""
        return self.bytes(array, {} if self.is_mistaken(array) else self.compute)

    def is_mistaken(self, array: Array) -> bool:
        """Whether the partitioner, of XLA in jaxlib 0.10.2, gathers all of a parameter rather than a dimension's part.

        Where a dimension rests on two mesh axes, of which the first still cuts it in use, and the parameter is whole
        along the third, it takes that one for the first if they are of one size.
        """
        if not any(dim and len(self.params.get(dim[0][0] or "", ())) == 2 for dim in array.dims):
            return False
        resting = {axis for axes in self.cut(array, self.params) for axis in axes}
        others = [self.mesh[axis] for axis in self.mesh if axis not in resting]
        return any(
            len(rests) == 2 and used == rests[:1] and self.mesh[rests[0]] > 1 and self.mesh[rests[0]] in others
            for rests, used in zip(self.cut(array, self.params), self.cut(array, self.compute), strict=True)
        )
