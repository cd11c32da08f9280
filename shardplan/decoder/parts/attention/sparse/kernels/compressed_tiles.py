"""Tiles of queries and chunks of compressed blocks for the compressed branch's kernels, and which chunks a tile sees.

Tiles of queries and chunks of keys are dense: a tile walks all chunks up to its last query, and skips the later ones. A
chunk has the compressed blocks that start in 128 selection blocks, so that the importance of a chunk fills the lanes of
a register. Heads of a group are padded to a multiple of 8, so that the sum over them adds whole registers.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LANES,
    SUBLANES,
    divide,
    indices,
    quotient,
)
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles

MAX_ROWS = 512
"""Maximum number of rows per tile."""
MAX_SCORES = 2**18
"""Maximum number of scores per tile and chunk, 1 MiB in float32; VMEM holds a few arrays of this size."""


@dataclass(frozen=True)
class CompressedTiles:
    """Static sizes of the kernels of the compressed branch."""

    config: NativeSparseConfig
    tiles: QueryTiles
    """Tiles of queries, with padded heads."""
    chunks: int
    """Number of chunks of the sequence's compressed blocks, padding included."""

    @classmethod
    def of(cls, config: NativeSparseConfig, count: int, selection_blocks: int) -> "CompressedTiles":
        """Choose the tiles of `count` queries for a given number of selection blocks."""
        heads = -(-config.heads_per_group // SUBLANES) * SUBLANES
        rows = min(MAX_ROWS, MAX_SCORES // _chunk(config))
        # tiles divide selection blocks, and runs of positions consist of complete blocks
        queries = SUBLANES
        while config.selection_block % (2 * queries) == 0 and 2 * queries * heads <= rows:
            queries *= 2
        return cls(config, QueryTiles(count, heads, queries), -(-selection_blocks // LANES))

    @property
    def chunk(self) -> int:
        """Number of compressed blocks per chunk."""
        return _chunk(self.config)

    @property
    def padding(self) -> int:
        """Number of padded heads per group."""
        return self.tiles.heads - self.config.heads_per_group

    def importance_weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Return matrices that sum the weights of a chunk's compressed blocks to the importance of selection blocks.

        Elements are small integers: the number of tokens that both blocks share, divided by the stride. The first
        matrix, bfloat16[chunk, 128], is for the selection blocks of the chunk. The second, bfloat16[128, 128], adds the
        last 128 compressed blocks to the selection block after the chunk; only its first column is not zero.
        """
        config = self.config
        starts = np.arange(self.chunk)[:, None] * config.stride
        firsts = np.arange(2 * LANES) * config.selection_block
        ends = np.minimum(starts + config.block, firsts + config.selection_block)
        shared = (np.maximum(ends - np.maximum(starts, firsts), 0) // config.stride).astype(jnp.bfloat16)
        return shared[:, :LANES], shared[-LANES:, LANES:]

    def visible_chunks(self, first_position: jax.Array) -> jax.Array:
        """Return the number of chunks that contain a block visible to the last query of a tile."""
        tokens = self.chunk * self.config.stride
        # 1 + (position of the last query - last token of the first block) // tokens, of which no part is negative
        return quotient(first_position + (self.tiles.queries - self.config.block + tokens), tokens)

    def visible_rows(self, first_position: jax.Array, first_block: jax.Array, count: int) -> jax.Array:
        """Return bool[key, row]: whether each of `count` compressed blocks ends at or before the row's query."""
        positions = first_position + divide(indices((1, self.tiles.rows), 1), self.tiles.heads)
        return indices((count, 1), 0) * self.config.stride <= positions - self._last_token(first_block)

    def visible_blocks(self, first_position: jax.Array, first_block: jax.Array, count: int) -> jax.Array:
        """Return bool[query, key]: whether each of `count` compressed blocks ends at or before the query."""
        positions = first_position + indices((self.tiles.queries, 1), 0)
        return indices((1, count), 1) * self.config.stride <= positions - self._last_token(first_block)

    def _last_token(self, block: jax.Array) -> jax.Array:
        """Return the position of a compressed block's last token."""
        return block * self.config.stride + (self.config.block - 1)

    def of_tile(self, rows: int, size: int) -> pl.BlockSpec:
        """Return the block spec of an array [tile, rows, size], for a grid of heads, tiles and chunks."""
        return pl.BlockSpec((1, rows, size), lambda head, i, c, _: (head * self.tiles.per_sequence + i, 0, 0))

    def of_chunk(self, size: int) -> pl.BlockSpec:
        """Return the block spec of keys [b * g, c, size] for this grid; chunks that are not visible are not copied."""

        def index(head: jax.Array, i: jax.Array, c: jax.Array, first: jax.Array) -> tuple[jax.Array, jax.Array, int]:
            last = jnp.maximum(self.visible_chunks(first[i]) - 1, 0)
            return head, jnp.minimum(c, last), 0

        return pl.BlockSpec((1, self.chunk, size), index)


def _chunk(config: NativeSparseConfig) -> int:
    return LANES * (config.selection_block // config.stride)
