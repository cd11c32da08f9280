"""The mesh axes of a plan, one row each, from which the search, the placement and Levanter's section are derived.

| mesh axis | batch and positions | other logical axes, compute sharding | stored parameters | crosses slices |
|---|---|---|---|---|
| replica | yes | behind `model` | if batch or positions use it | yes |
| data | yes | no | if batch or positions use it | yes |
| model | no | yes | as in computations | no |

Parameters that are sharded over a mesh axis which batch and positions leave unused are not gathered: the compiler
slices activations instead, and devices repeat work. Such plans are left out. So are plans in which a mesh axis of
several devices shards no computation, unless nothing else fits.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import combinations, permutations


class TensorUse(Enum):
    """How a mesh axis may shard logical axes other than batch and position in computations."""

    NONE = "none"
    OWN = "own"
    """The mesh axis may shard a logical axis alone, or together with other mesh axes."""
    BEHIND = "behind"
    """The mesh axis may shard a logical axis only as the minor axis, after a mesh axis of kind `OWN`."""


@dataclass(frozen=True)
class MeshAxis:
    """A mesh axis of plans, and which logical axes it may shard."""

    name: str
    shards_tokens: bool
    """Whether the axis can shard the batch and positions, and with them stored parameters."""
    tensors: TensorUse
    crosses_slices: bool
    """Whether a part of the axis may lie across slices."""
    priority: int
    """Place in the order in which axes are put on the torus; the first one gets the fastest links."""
    dcn_name: str | None
    """Name of the axis's part across slices in Levanter's section `mesh`; None if it has none."""
    meaning: str
    """Help text of the key `mesh.NAME`."""


ROWS = (
    MeshAxis("replica", True, TensorUse.BEHIND, True, 2, "replica_dcn", "Number of devices along replica."),
    MeshAxis("data", True, TensorUse.NONE, True, 1, "data_dcn", "Number of devices along data."),
    MeshAxis("model", False, TensorUse.OWN, False, 0, None, "Number of devices along model."),
)
"""The axes of a plan's mesh, major to minor."""


def _subsets(axes: Sequence[str], sizes: range) -> Iterator[tuple[str, ...]]:
    """Yield the subsets of `axes` of each size, subsets of minor axes first."""
    for size in sizes:
        yield from reversed(list(combinations(axes, size)))


def _orders(axes: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield every subset of `axes` in every order, small ones first."""
    for size in range(len(axes) + 1):
        yield from permutations(axes, size)


def _tensor_choices(own: Sequence[str], behind: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """Yield the empty choice, and every subset of `own` followed by every subset of `behind`, also the empty one."""
    yield ()
    for size in range(1, len(own) + 1):
        for axes in combinations(own, size):
            for more in range(len(behind) + 1):
                for others in combinations(behind, more):
                    yield (*axes, *others)


MESH_AXES = tuple(row.name for row in ROWS)
"""Names of the axes, major to minor."""
TOKEN_AXES: tuple[str, ...] = tuple(row.name for row in ROWS if row.shards_tokens)
"""Mesh axes that shard tokens, major to minor; Levanter's trainer shards the batch over them by default."""
TENSOR_AXES: tuple[str, ...] = tuple(row.name for row in ROWS if row.tensors is TensorUse.OWN)
"""Mesh axes that shard other logical axes in computations, alone or together."""
BATCH_CHOICES: tuple[tuple[str, ...], ...] = tuple(_subsets(TOKEN_AXES, range(len(TOKEN_AXES), -1, -1)))
"""Combinations of mesh axes that can shard the batch."""
POSITION_CHOICES: tuple[tuple[str, ...], ...] = tuple(_orders(TOKEN_AXES))
"""Combinations of mesh axes that can shard positions."""
TENSOR_CHOICES: tuple[tuple[str, ...], ...] = tuple(
    _tensor_choices(TENSOR_AXES, [row.name for row in ROWS if row.tensors is TensorUse.BEHIND])
)
"""Combinations of mesh axes that can shard every other logical axis in computations."""
EXPERT_CHOICES: tuple[tuple[str, ...], ...] = tuple(_subsets(MESH_AXES, range(len(MESH_AXES) + 1)))
"""Combinations of mesh axes that can shard routed experts, and their hidden states, in computations."""
STORAGE_CHOICES: tuple[tuple[str, ...], ...] = tuple(_subsets(TOKEN_AXES, range(len(TOKEN_AXES) + 1)))
"""Combinations of mesh axes that can shard stored parameters beyond their compute sharding, if the batch or positions
are sharded over these axes."""
SLICE_AXES: tuple[str, ...] = tuple(row.name for row in ROWS if row.crosses_slices)
"""Mesh axes that may cross slices, in the order in which they are split over slices."""
AXIS_PRIORITY: tuple[str, ...] = tuple(row.name for row in sorted(ROWS, key=lambda row: row.priority))
"""Mesh axes in the order in which they are placed on the torus."""
DCN_AXES = {row.name: row.dcn_name for row in ROWS if row.dcn_name is not None}
"""Mesh axis -> axis of Levanter's section that is its major part, across slices; Levanter's own `replica_dcn` takes the
slices that others leave."""
