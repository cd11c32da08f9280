"""A mesh with both mappings, and what they make of arrays: how each is cut, and what is gathered for use."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, mesh_size
from shardplan.plan.plan import AttentionPlan
from shardplan.positions.pattern import CAUSAL, Pattern
from shardplan.program.named_arrays import Array, Dim

REARRANGED_COPIES = 2
"""Arrays of the gathered size that a gather along several dimensions needs until the result is in order."""


@dataclass(frozen=True)
class CompilerQuirks:
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


class Gather(NamedTuple):
    """How a device gets what it uses of a parameter that rests in more parts."""

    axes: MeshAxes
    """Over which it is gathered."""
    bytes: float
    """What the device then has."""
    copies: int
    """Arrays of that size that it takes."""


@dataclass(frozen=True)
class ShardingAssignment:
    """A mesh with the mappings of logical axes: while computing, and of parameters at rest."""

    mesh: MeshShape
    compute: AxisMapping
    params: AxisMapping
    merged: Mapping[str, Dim]
    activation_axes: tuple[str, ...]
    quirks: CompilerQuirks = CompilerQuirks()
    attention: AttentionPlan = field(default_factory=AttentionPlan)
    pattern: Pattern = CAUSAL
    """Of attention's mask."""
    known: dict[Array, int] = field(default_factory=dict, compare=False, repr=False)
    """Into how many parts arrays are cut while computing, as far as that was asked for; layouts with the same `mesh`
    and `compute` may share it."""

    def is_whole(self, axes: MeshAxes) -> bool:
        """Whether devices along `axes` are all there are."""
        return mesh_size(self.mesh, axes) == math.prod(self.mesh.values())

    def sums_to_gather(self, axes: MeshAxes) -> bool:
        """Whether a gather over `axes` is written as a sum."""
        least = self.quirks.gathers_become_sums_from
        return least is not None and self.is_whole(axes) and mesh_size(self.mesh, axes) >= least

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
        for name in array.majors:
            axes = mapping.get(name, ())
            if not used.isdisjoint(axes):
                axes = tuple(axis for axis in axes if axis not in used)
            used.update(axes)
            cuts.append(axes)
        return cuts

    def parts(self, array: Array, mapping: AxisMapping | None = None) -> int:
        """Into how many parts `array` is cut; by default as it is kept between tasks."""
        if mapping is self.compute or (mapping is None and not self.rests(array)):
            if array not in self.known:
                self.known[array] = self._parts(array, self.compute)
            return self.known[array]
        return self._parts(array, mapping)

    def _parts(self, array: Array, mapping: AxisMapping | None) -> int:
        return math.prod(mesh_size(self.mesh, axes) for axes in self.cut(array, mapping) if axes)

    def bytes(self, array: Array, mapping: AxisMapping | None = None) -> float:
        """Bytes of `array` on one device."""
        return array.elements * array.itemsize / self.parts(array, mapping)

    def mesh_axes(self, names: Dim, mapping: AxisMapping | None = None) -> MeshAxes:
        """The mesh axes that the named axes are mapped to while computing, each once, in the mesh's order."""
        source = self.compute if mapping is None else mapping
        found: set[str] = set()
        for name, _ in names:
            found.update(source.get(name or "", ()))
        return tuple(axis for axis in self.mesh if axis in found) if found else ()

    def gather(self, weight: Array) -> Gather | None:
        """How a parameter is gathered for use; None where it is used as it rests."""
        resting = self.mesh_axes(weight.factors, self.params)
        if not resting:
            return None
        used = {} if self.is_mistaken(weight) else self.compute
        kept = self.mesh_axes(weight.factors, used)
        axes = tuple(axis for axis in resting if axis not in kept)
        if not axes:
            return None
        dimensions = sum(not set(axes).isdisjoint(cut) for cut in self.cut(weight, self.params))
        copies = REARRANGED_COPIES if dimensions > 1 else 2 if self.sums_to_gather(axes) else 1
        return Gather(axes, self.bytes(weight, used), copies)

    def is_mistaken(self, array: Array) -> bool:
        """Whether the partitioner, of XLA in jaxlib 0.10.2, gathers all of a parameter rather than a dimension's part.

        Where a dimension rests on two mesh axes, of which the first still cuts it in use, and the parameter is whole
        along the third, it takes that one for the first if they are of one size.
        """
        if not any(len(self.params.get(name, ())) == 2 for name in array.majors):
            return False
        resting = {axis for axes in self.cut(array, self.params) for axis in axes}
        others = [self.mesh[axis] for axis in self.mesh if axis not in resting]
        return any(
            len(rests) == 2 and used == rests[:1] and self.mesh[rests[0]] > 1 and self.mesh[rests[0]] in others
            for rests, used in zip(self.cut(array, self.params), self.cut(array, self.compute), strict=True)
        )
