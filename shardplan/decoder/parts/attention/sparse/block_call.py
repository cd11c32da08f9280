"""A call of attention to given blocks, in a form that a trace can replace.

`shardplan.attention.attend_to_blocks` makes a `BlockCall`. A trace replaces what computes it by one marked operation
(`shardplan.program.marked.marked_blocks`), which costs what the selected branch of Native Sparse Attention costs.
"""

from dataclasses import dataclass

import jax

from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod, attend_to_selected
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks
from shardplan.decoder.parts.attention.sparse.sharding.mesh_sharding import MeshSharding, run_on_mesh
from shardplan.decoder.parts.attention.sparse.sharding.parts import PositionParts
from shardplan.decoder.parts.attention.sparse.sharding.position_shards import PositionShards
from shardplan.model.replaceable import Replaceable


@dataclass(frozen=True)
class BlockCall:
    """One call of attention to given blocks: its inputs and its method."""

    block_size: int
    """Number of tokens per block."""
    parts: PositionParts
    sharding: MeshSharding
    method: SelectedMethod
    queries_per_chunk: int
    """Number of a device's queries that are computed at a time."""
    queries: jax.Array
    """Queries, [b, t, g, r, d]."""
    blocks: jax.Array
    """Indices of the blocks that each query attends to, int32[b, t, g, n]."""
    keys: jax.Array
    """Keys, [b, t, g, d]."""
    values: jax.Array
    """Values, [b, t, g, d]."""

    def run(self) -> jax.Array:
        """Compute the output [b, t, g, r, d] on the devices of the mesh."""
        shards, selection = PositionShards(self.parts, self.sharding.position), SelectionBlocks(self.block_size)

        def attend(queries: jax.Array, blocks: jax.Array, keys: jax.Array, values: jax.Array) -> jax.Array:
            """Compute the output of the queries of one device."""
            of_sequence = shards.gather(keys), shards.gather(values)
            return attend_to_selected(
                selection, self.method, self.queries_per_chunk, shards.positions(), queries, blocks, *of_sequence
            ).output

        return run_on_mesh(
            attend,
            self.method,
            self.sharding,
            (self.sharding.of_queries, *[self.sharding.of_tokens] * 3),
            self.sharding.of_queries,
            self.queries,
            self.blocks,
            self.keys,
            self.values,
        )


compute_block_call: Replaceable[[BlockCall], jax.Array] = Replaceable(BlockCall.run)
"""Returns the output of a call, [b, t, g, r, d]."""
