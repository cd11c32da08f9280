"""Tiles of queries and blocks of keys for the window branch's kernels, and the pairs of positions that they mask.

Queries and keys of one run of positions are divided into blocks of 128 tokens; a tile of queries is a part of a block.
The queries of a block see the keys of their own block and of the `blocks - 1` blocks before it: `halo` is the number
of tokens of these, a multiple of 128. Tokens are counted from the first query of the run, so that keys of the halo
have negative numbers.

Scores are transposed, [key, row]: the sum and the maximum over keys are then sums of whole registers, and the
log-sum-exp of rows is a row of memory, which needs no transposition.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.launch import (
    LANES,
    MASKED_SCORE,
    SUBLANES,
    divide,
    indices,
    multiply_transposed,
    quotient,
)
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import QueryTiles

BLOCK = LANES
"""Number of tokens per block."""
MAX_ROWS = 512
"""Maximum number of rows per tile, unless 8 queries have more rows."""
MAX_BLOCKS_PER_STEP = 8
"""Maximum number of key blocks per step, over which the loop is unrolled."""
MAX_SCORES = 2**19
"""Maximum number of scores per step, all in VMEM together: 2 MiB in float32."""
MAX_ROWS_PER_STEP = 2048
"""Maximum number of query rows per step of the kernel for gradients of keys and values."""


@dataclass(frozen=True)
class WindowTiles:
    """Static sizes of the kernels of the window branch."""

    config: NativeSparseConfig
    count: int
    """Number of queries in the run."""
    tiles: QueryTiles
    """Tiles of queries, which fill complete blocks."""

    @classmethod
    def of(cls, config: NativeSparseConfig, count: int) -> "WindowTiles":
        """Choose the tiles of a run of `count` queries."""
        heads, queries = config.heads_per_group, SUBLANES
        while 2 * queries <= BLOCK and 2 * queries * heads <= MAX_ROWS:
            queries *= 2
        return cls(config, count, QueryTiles(-(-count // BLOCK) * BLOCK, heads, queries))

    @property
    def halo(self) -> int:
        """Number of tokens before the run, padding included."""
        return -(-(self.config.window - 1) // BLOCK) * BLOCK

    @property
    def blocks(self) -> int:
        """Number of key blocks that one block of queries attends to."""
        return self.halo // BLOCK + 1

    @property
    def steps(self) -> int:
        """Number of steps per tile."""
        return -(-self.blocks // max(1, min(MAX_BLOCKS_PER_STEP, MAX_SCORES // (BLOCK * self.tiles.rows))))

    @property
    def blocks_per_step(self) -> int:
        """Number of key blocks per step."""
        return -(-self.blocks // self.steps)

    @property
    def tiles_per_block(self) -> int:
        """Number of query tiles per block."""
        return BLOCK // self.tiles.queries

    @property
    def tiles_per_step(self) -> int:
        """Number of query tiles per step in the kernel for dk and dv, a divisor of `tiles_per_block`."""
        tiles = self.tiles_per_block
        while tiles > 1 and tiles * self.tiles.rows > MAX_ROWS_PER_STEP:
            tiles //= 2
        return tiles

    @property
    def query_blocks(self) -> int:
        """Number of query blocks of the run, padding included."""
        return self.tiles.per_sequence // self.tiles_per_block

    @property
    def key_blocks(self) -> int:
        """Number of key blocks of the run and its halo, padding included."""
        return self.query_blocks + self.blocks - 1

    def split(self, x: jax.Array) -> jax.Array:
        """Split queries into tiles: [b, t, g, r, d] -> [tile, row, d]."""
        missing = self.tiles.count - self.count
        return self.tiles.split(jnp.pad(x, [(0, 0), (0, missing), (0, 0), (0, 0), (0, 0)]))

    def join(self, x: jax.Array, batch: int) -> jax.Array:
        """Join tiles without padding: [tile, row, d] -> [b, t, g, r, d]."""
        return self.tiles.join(x, batch)[:, : self.count]

    def pad_keys(self, x: jax.Array) -> jax.Array:
        """Pad keys to whole blocks: [b, halo + t, g, d] -> [b * g, key blocks * 128, d]."""
        batch, count, groups, size = x.shape
        before = self._missing_keys(count)
        after = self.key_blocks * BLOCK - before - count
        padded = jnp.pad(x, [(0, 0), (before, after), (0, 0), (0, 0)])
        return padded.swapaxes(1, 2).reshape(batch * groups, -1, size)

    def unpad_keys(self, x: jax.Array, like: jax.Array) -> jax.Array:
        """Undo `pad_keys`, for an array of the shape and dtype of `like`."""
        batch, count, groups, size = like.shape
        before = self._missing_keys(count)
        by_token = x.reshape(batch, groups, -1, size).swapaxes(1, 2)
        return by_token[:, before : before + count].astype(like.dtype)

    def _missing_keys(self, count: int) -> int:
        """Return the number of padding keys before `count` keys of a run and its halo."""
        return self.halo - (count - self.count)

    def masked_scores(
        self, keys: jax.Array, queries: jax.Array, key_block: jax.Array, first_query: jax.Array, first: jax.Array
    ) -> jax.Array:
        """Return the scores float32[key, row] of a key block and a tile; `MASKED_SCORE` outside of windows.

        Args:
            keys: [key, d]; queries: [row, d].
            key_block: number of the block; the halo's first block is 0.
            first_query: number of the first query of the tile.
            first: position of query 0: keys before position 0 are padding.
        """
        rows = queries.shape[0]
        scores = multiply_transposed(keys, queries) * self.config.scale
        query = first_query + divide(indices((1, rows), 1), self.tiles.heads)
        key = key_block * BLOCK - self.halo + indices((BLOCK, 1), 0)
        earliest = jnp.maximum(query - (self.config.window - 1), -first)
        return jnp.where((key >= earliest) & (key <= query), scores, MASKED_SCORE)

    def first_key_block(self, tile: jax.Array) -> jax.Array:
        """Return the index of the first key block that a tile sees."""
        return quotient(tile, self.tiles_per_block)

    def of_tile(self, rows: int, size: int) -> pl.BlockSpec:
        """Return the block spec of an array [tile, rows, size], for a grid of heads, tiles and steps."""
        return pl.BlockSpec((1, rows, size), lambda head, i, step, _: (head * self.tiles.per_sequence + i, 0, 0))

    def of_key_blocks(self, size: int) -> list[pl.BlockSpec]:
        """Return the block specs of a step's key blocks in an array [b * g, key, size], for this grid."""

        def spec(number: int) -> pl.BlockSpec:
            def index(head: jax.Array, i: jax.Array, step: jax.Array, _: jax.Array) -> tuple[jax.Array, jax.Array, int]:
                block = self.first_key_block(i) + step * self.blocks_per_step + number
                return head, jnp.minimum(block, self.key_blocks - 1), 0

            return pl.BlockSpec((1, BLOCK, size), index)

        return [spec(number) for number in range(self.blocks_per_step)]
