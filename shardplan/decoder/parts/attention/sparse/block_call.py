"""A call of attention to given blocks, in a form that a trace can replace.

`shardplan.attention.attend_to_blocks` makes a `BlockCall`. A trace replaces what computes it by one marked operation
(`shardplan.program.marked.marked_blocks`), because its price is that of the selected branch of Native Sparse Attention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import jax

from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod, attend_to_selected
from shardplan.decoder.parts.attention.sparse.mesh_sharding import MeshSharding, run_on_mesh
from shardplan.decoder.parts.attention.sparse.parts import PositionParts
from shardplan.decoder.parts.attention.sparse.position_shards import PositionShards
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks


@dataclass(frozen=True)
class BlockCall:
    """The inputs of attention to given blocks, and how it is computed."""

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
    """Numbers of the blocks that each query attends to, int32[b, t, g, n]."""
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


_replacement: ContextVar[Callable[[BlockCall], jax.Array]] = ContextVar("block_call", default=BlockCall.run)


def compute_block_call(call: BlockCall) -> jax.Array:
    """Return the output of a call, [b, t, g, r, d], by `BlockCall.run` or its active replacement."""
    return _replacement.get()(call)


@contextmanager
def replace_block_calls(compute: Callable[[BlockCall], jax.Array]) -> Iterator[None]:
    """Replace a call's computation within the context by `compute`, which returns the output [b, t, g, r, d].

    >>> with replace_block_calls(lambda call: f"the price of {call}"):
    ...     compute_block_call("a call")
    'the price of a call'
    """
    token = _replacement.set(compute)
    try:
        yield
    finally:
        _replacement.reset(token)
