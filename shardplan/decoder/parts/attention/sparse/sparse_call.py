"""A call of Native Sparse Attention between its projections, in a form that a trace can replace.

The layer makes a `SparseCall` and passes it to `attend_sparsely`. A trace replaces what computes it by one marked
operation (`shardplan.program.marked.marked_sparse`), because its work depends on the method that a plan chooses.
"""

from dataclasses import dataclass

import jax
from haliax import Axis
from jax.sharding import PartitionSpec

from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.device_branches import (
    DeviceBranches,
    GroupInputs,
    TokenInputs,
    TokenResults,
)
from shardplan.decoder.parts.attention.sparse.kernels.refusal import check_kernel
from shardplan.decoder.parts.attention.sparse.sharding.mesh_sharding import MeshSharding, device_count, run_on_mesh
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.decoder.parts.attention.sparse.sharding.position_shards import PositionShards
from shardplan.decoder.parts.attention.sparse.statistics import SelectionSums
from shardplan.model.replaceable import Replaceable
from shardplan.positions.sequence_order import SequenceOrder

SUBJECT = "native sparse attention"
"""Beginning of messages."""


@dataclass(frozen=True)
class SparseCall:
    """One call of a layer's branches: their inputs, and how they are computed."""

    config: NativeSparseConfig
    Pos: Axis
    sharding: MeshSharding
    inputs: TokenInputs
    parameters: GroupInputs
    method: SelectedMethod
    layout: SequenceOrder
    """The order of positions."""
    queries_per_chunk: int
    """Number of a device's queries that are computed at a time."""

    def run(self, query_tile: int | None = None) -> tuple[TokenResults, SelectionSums | None]:
        """Compute the branches on the devices of the mesh.

        Args:
            query_tile: queries whose union of blocks the statistics count; None for no statistics.

        Raises:
            ConfigError: the mesh axes do not divide the positions, a tile of queries is on two devices, or there is no
                kernel for the sizes.
        """
        parts = PositionParts(self.Pos.size, device_count(self.sharding.position), self.layout)
        parts.check(SUBJECT, self.config.selection_block, query_tile or 1)
        if self.method is SelectedMethod.KERNEL:
            check_kernel(SUBJECT, "selection_block", self.config.selection_block)
        branches = DeviceBranches(
            self.config,
            PositionShards(parts, self.sharding.position),
            self.sharding.mesh_axes,
            self.method,
            self.queries_per_chunk,
            query_tile,
        )
        of_tokens, of_groups = self.sharding.of_tokens, PartitionSpec(self.sharding.groups or None)
        return run_on_mesh(
            branches.run,
            self.method,
            self.sharding,
            (of_tokens, of_groups),
            (of_tokens, PartitionSpec()),
            self.inputs,
            self.parameters,
        )


@Replaceable
def attend_sparsely(call: SparseCall) -> jax.Array:
    """Return the sum of the branches of a call, float32[b, t, g, r, d]."""
    results, _ = call.run()
    return results.mixed
