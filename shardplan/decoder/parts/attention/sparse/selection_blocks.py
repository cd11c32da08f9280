"""Selection blocks: their length, their number per sequence, and the blocks that every query must select."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class SelectionBlocks:
    """Blocks of tokens, side by side from the start of the sequence."""

    size: int
    """Tokens of a block."""
    initial: int = 0
    """Blocks at the start of the sequence that are forced."""
    local: int = 0
    """Blocks up to the query's own that are forced."""

    def count(self, positions: int) -> int:
        """Return the number of blocks of a sequence; the last one may be shorter."""
        return -(-positions // self.size)

    def is_forced(self, blocks: jax.Array, positions: jax.Array) -> jax.Array:
        """Return whether queries always select these blocks; False for blocks after a query's own.

        Args:
            blocks: int[...], numbers of blocks, or negative where there is none.
            positions: int[...], of the queries; it broadcasts to blocks.
        """
        own = positions // self.size
        return (blocks >= 0) & (blocks <= own) & ((blocks < self.initial) | (blocks > own - self.local))
