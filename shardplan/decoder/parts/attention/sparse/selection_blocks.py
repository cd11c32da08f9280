"""Selection blocks: their length, their number per sequence, and the blocks that every query must select."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class SelectionBlocks:
    """The division of a sequence into adjacent blocks of tokens, and which of them every query must select."""

    size: int
    """Number of tokens per block."""
    initial: int = 0
    """Number of forced blocks at the start of the sequence."""
    local: int = 0
    """Number of forced blocks up to and including the query's own."""

    def count(self, positions: int) -> int:
        """Return the number of blocks in a sequence; the last one may be shorter."""
        return -(-positions // self.size)

    def is_forced(self, blocks: jax.Array, positions: jax.Array) -> jax.Array:
        """Return whether queries always select the given blocks; False for blocks after a query's own.

        Args:
            blocks: int[...], numbers of blocks, or negative where there is none.
            positions: int[...], of the queries; it broadcasts to blocks.
        """
        own = positions // self.size
        return (blocks >= 0) & (blocks <= own) & ((blocks < self.initial) | (blocks > own - self.local))
