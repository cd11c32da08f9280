"""Tiles of neighbouring queries that kernels compute together: their number of queries, and the layout of their arrays.

All heads of a group select the same blocks, so that a tile of T queries is a matrix of T x R rows. T is chosen to fill
the matrix unit's 128 rows. It divides the selection block, so that the queries of a tile have the same own block.

Arrays of tiles have the axis `tile` for all tiles of all groups and sequences, [b, g, tiles of a sequence] flattened,
and the axis `row` for [query of the tile, r]. The number of tiles is even: the two cores of a chip take one half each.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.kernels.launch import SUBLANES

ROWS = 128
"""Number of rows that fill the matrix unit."""
MAX_QUERIES = 32
"""Maximum number of queries per tile: each has one bit of an int32."""


@dataclass(frozen=True)
class QueryTiles:
    """The tiles of the queries of a device."""

    count: int
    """Number of queries per sequence, t."""
    heads: int
    """Number of heads per group, R."""
    queries: int
    """Number of queries per tile, T."""

    @classmethod
    def of(cls, block: int, count: int, heads: int) -> "QueryTiles":
        """Choose the fewest queries that fill the matrix unit.

        >>> QueryTiles.of(64, 8192, 16).queries
        8

        Args:
            block: tokens of a selection block.
            count: queries of a sequence.
            heads: heads of a group.
        """
        queries = 1
        while block % (2 * queries) == 0 and 2 * queries <= MAX_QUERIES:
            if queries * heads >= ROWS and queries * heads % SUBLANES == 0:
                break
            queries *= 2
        return cls(count, heads, queries)

    @property
    def rows(self) -> int:
        """Number of rows per tile."""
        return self.queries * self.heads

    @property
    def per_sequence(self) -> int:
        """Number of tiles per sequence; the last ones may have padding."""
        return 2 * -(-self.count // (2 * self.queries))

    @property
    def padding(self) -> int:
        """Number of padding queries at the end of a sequence."""
        return self.per_sequence * self.queries - self.count

    def first_positions(self, positions: jax.Array) -> jax.Array:
        """Return the position of each tile's first query, int32[tiles of a sequence], from the positions int[t]."""
        return jnp.pad(positions.astype(jnp.int32), (0, self.padding))[:: self.queries]

    def split(self, x: jax.Array) -> jax.Array:
        """Split queries into tiles: [b, t, g, r, d] -> [tile, row, d]."""
        b, _, g, _, size = x.shape
        padded = jnp.pad(x, [(0, 0), (0, self.padding), (0, 0), (0, 0), (0, 0)])
        by_tile = padded.reshape(b, self.per_sequence, self.queries, g, self.heads, size)
        return by_tile.transpose(0, 3, 1, 2, 4, 5).reshape(b * g * self.per_sequence, self.rows, size)

    def join(self, x: jax.Array, batch: int) -> jax.Array:
        """Join tiles without padding: [tile, row, d] -> [b, t, g, r, d]."""
        size = x.shape[-1]
        by_tile = x.reshape(batch, -1, self.per_sequence, self.queries, self.heads, size)
        by_query = by_tile.transpose(0, 2, 3, 1, 4, 5)
        return by_query.reshape(batch, -1, *by_query.shape[3:])[:, : self.count]

    def split_heads(self, x: jax.Array) -> jax.Array:
        """Split an array with one number per head into tiles: [b, t, g, r] -> [tile, 1, row]."""
        return self.split(x[..., None])[..., 0][:, None]

    def join_heads(self, x: jax.Array, batch: int) -> jax.Array:
        """Join tiles with one number per head, without padding: [tile, 1, row] -> [b, t, g, r]."""
        return self.join(x[:, 0, :, None], batch)[..., 0]
