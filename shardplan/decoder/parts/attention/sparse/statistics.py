"""Statistics of the blocks that a layer selects: sums over its rows, and the figures computed from them.

A row is one query position of one head of keys in one sequence. `k`, the keys of a row in the selected branch, depends
on no weight, because a query's own block is forced: `closed_form` gives its figures, which prove causality and the
number of blocks. What training changes is in the gates, and in the free choices: selected blocks that are not forced.

Sums are computed in the step, in int32 and float32, and no gradient flows through them. `reduce_sums` adds those of
several devices; `figures` turns them into numbers on the host, and `traced_figures` in the step.
"""

from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.special import entr

from shardplan.decoder.parts.attention.sparse.branches.selection import UNUSED
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig

BRANCHES = ("cmp", "slc", "win")
"""The branches in the order of their gates: compressed, selected, window."""


class SelectionSums(NamedTuple):
    """Sums over the rows of a layer, from which statistics are computed; scalars unless a shape is given.

    int32 holds the sums of 256 sequences of 65536 tokens, for 4 groups and selection blocks of 64 tokens.
    """

    rows: jax.Array
    """Number of rows, int32."""
    whole_blocks: jax.Array
    """Sum of k // selection_block, int32; separate from `rest` so that the sum of k fits int32 for long sequences."""
    rest: jax.Array
    """Sum of k % selection_block, int32."""
    k_max: jax.Array
    """Largest k, int32."""
    rows_at_max: jax.Array
    """Number of rows whose k is `k_max`, int32."""
    gates: jax.Array
    """Sum of each branch's gates over heads, float32[3]."""
    gate_entropy: jax.Array
    """Sum of the entropy, in nats, of each gate as a probability, float32[3]."""
    importance: jax.Array
    """Importance of all blocks, float32."""
    free_importance: jax.Array
    """Importance of the blocks that are not forced, float32."""
    free_mass: jax.Array
    """Attention weights of the selected branch outside of forced blocks, summed over heads, float32."""
    jaccard: jax.Array
    """Sum over pairs of |A and B| / |A or B|, float32; A and B are the free choices of a query and the next query."""
    pairs: jax.Array
    """Number of pairs of neighbouring rows with a free choice, int32."""
    tile_blocks: jax.Array
    """Sum over tiles of the number of different blocks that a tile's queries select, int32."""
    tiles: jax.Array
    """Number of tiles of neighbouring rows, int32."""
    load: jax.Array
    """Number of rows that select each block, int32[j]."""


class Neighbours(NamedTuple):
    """Rows of queries; adjacent rows are neighbours if their positions are adjacent."""

    positions: jax.Array
    """Position of each row, int[t]; negative if there is no query."""
    blocks: jax.Array
    """Selected blocks, int32[b, t, g, n]."""


def selection_sums(
    config: NativeSparseConfig,
    positions: jax.Array,
    blocks: jax.Array,
    importance: jax.Array,
    free_mass: jax.Array,
    gates: jax.Array,
    query_tile: int,
    neighbours: Neighbours,
) -> SelectionSums:
    """Sum the statistics of selected blocks over the rows of a layer, or over one device's rows.

    Args:
        positions: int[t], of the queries.
        blocks: int32[b, t, g, n], the selected blocks.
        importance: float32[b, t, g, j].
        free_mass: float32[b, t, g], attention weight of the selected branch outside forced blocks.
        gates: float32[b, t, g, r, 3].
        query_tile: number of queries per tile, which a kernel computes together.
        neighbours: the positions and blocks of the queries, each part extended by the first query of the next part.
    """
    importance, free_mass, gates = jax.lax.stop_gradient((importance, free_mass, gates))
    by_row = positions[:, None, None]
    numbers = jnp.arange(importance.shape[-1])
    # of its own block a query has the keys up to itself alone
    keys_of_blocks = jnp.clip(by_row + 1 - blocks * config.selection_block, 0, config.selection_block)
    k = jnp.where(blocks == UNUSED, 0, keys_of_blocks).sum(axis=-1)
    is_free_block = ~config.selection.is_forced(numbers, positions[:, None])
    jaccard, pairs = _jaccard(config, *neighbours)
    tile_blocks, tiles = _tile_unions(blocks, numbers, query_tile)
    return SelectionSums(
        rows=jnp.int32(k.size),
        whole_blocks=(k // config.selection_block).sum(),
        rest=(k % config.selection_block).sum(),
        k_max=k.max(),
        rows_at_max=(k == k.max()).sum(),
        gates=gates.sum(axis=(0, 1, 2, 3)),
        gate_entropy=(entr(gates) + entr(1 - gates)).sum(axis=(0, 1, 2, 3)),
        importance=importance.sum(),
        free_importance=jnp.where(is_free_block[:, None], importance, 0.0).sum(),
        free_mass=free_mass.sum(),
        jaccard=jaccard,
        pairs=pairs,
        tile_blocks=tile_blocks,
        tiles=tiles,
        load=(blocks[..., None] == numbers).sum(axis=(0, 1, 2, 3)),
    )


def _jaccard(config: NativeSparseConfig, positions: jax.Array, blocks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the sum of the Jaccard indices of adjacent queries' unforced blocks, and the number of pairs."""
    is_free = (blocks != UNUSED) & ~config.selection.is_forced(blocks, positions[:, None, None])
    one, other = blocks[:, :-1, :, :, None], blocks[:, 1:, :, None, :]
    is_shared = (one == other) & is_free[:, :-1, :, :, None] & is_free[:, 1:, :, None, :]
    shared, free = is_shared.sum(axis=(-2, -1)), is_free.sum(axis=-1)
    either = free[:, :-1] + free[:, 1:] - shared
    is_next = positions[1:] == positions[:-1] + 1  # False between the parts of a device
    is_pair = (either > 0) & is_next[:, None]
    return jnp.where(is_pair, shared / jnp.maximum(either, 1), 0.0).sum(), is_pair.sum()


def _tile_unions(blocks: jax.Array, numbers: jax.Array, query_tile: int) -> tuple[jax.Array, jax.Array]:
    """Return how many blocks the queries of a tile select together, summed over tiles, and the number of tiles."""
    batch, positions, groups, selected = blocks.shape
    tiles = -(-positions // query_tile)
    missing = tiles * query_tile - positions
    padded = jnp.pad(blocks, [(0, 0), (0, missing), (0, 0), (0, 0)], constant_values=UNUSED)
    by_tile = padded.reshape(batch, tiles, query_tile, groups, selected)
    is_in_tile = (by_tile[..., None] == numbers).any(axis=(2, 4))
    return is_in_tile.sum(), jnp.int32(batch * tiles * groups)


def reduce_sums(sums: SelectionSums, mesh_axes: tuple[str, ...]) -> SelectionSums:
    """Sum over the rows of all devices along mesh axes. Runs inside `jax.shard_map`."""
    k_max = jax.lax.pmax(sums.k_max, mesh_axes)
    at_max = jnp.where(sums.k_max == k_max, sums.rows_at_max, 0)
    reduced: SelectionSums = jax.lax.psum(sums._replace(rows_at_max=at_max), mesh_axes)
    return reduced._replace(k_max=k_max)


def figures(config: NativeSparseConfig, sums: SelectionSums) -> dict[str, Any]:
    """Compute statistics of selected blocks on the host, by name; a fraction or mean of nothing is 0.

    | name | figure |
    |---|---|
    | rows | number of rows |
    | k_mean, k_max | mean and largest number of keys of a row in the selected branch |
    | pct_at_max | fraction of rows that have k_max keys |
    | gate_mean_cmp, _slc, _win | mean of the gates of a branch |
    | gate_entropy_cmp, _slc, _win | mean entropy of the gates of a branch, each taken as a probability, in nats |
    | free_importance | share of the importance outside forced blocks |
    | free_attention | share of the selected branch's attention outside forced blocks |
    | jaccard_next_query | mean Jaccard index of the unforced blocks of two neighbouring queries |
    | tile_union | mean number of different blocks that a tile of queries selects |
    | load | float[j], share of rows that select each block |

    >>> config = NativeSparseConfig(768, 2, 6, 64, 64, block=32, stride=16, selection_block=64, selected=16, window=512)
    >>> ones = SelectionSums(*[np.ones(3)] * 15)
    >>> sums = ones._replace(rows=4, whole_blocks=6, rest=2, k_max=128, rows_at_max=1, load=np.array([4, 2, 1]))
    >>> values = figures(config, sums)
    >>> values["k_mean"], values["pct_at_max"], values["load"].tolist()
    (96.5, 0.25, [1.0, 0.5, 0.25])

    Args:
        sums: as `selection_sums` or `reduce_sums` returns them.
    """
    host = jax.tree.map(lambda each: np.asarray(each, np.float64), sums)
    values = {name: np.asarray(value) for name, value in _figures(config, host, np).items()}
    # float64 has the sum exactly, so that one division gives the closed form to the bit
    values["k_mean"] = (host.whole_blocks * config.selection_block + host.rest) / host.rows
    counts = {name: int(values[name]) for name in ("rows", "k_max")}
    return {name: value.item() if value.ndim == 0 else value for name, value in values.items()} | counts


def traced_figures(config: NativeSparseConfig, sums: SelectionSums) -> dict[str, jax.Array]:
    """Compute the statistics of `figures` within a traced program, in int32 and float32."""
    return _figures(config, sums, jnp)


def _figures(config: NativeSparseConfig, sums: SelectionSums, xp: ModuleType) -> dict[str, Any]:
    """Compute the statistics of `figures` with the array module `xp`, `numpy` or `jax.numpy`."""
    rows, head_rows = sums.rows, sums.rows * config.heads_per_group

    def ratio(part: Any, whole: Any) -> Any:
        return part / xp.maximum(whole, xp.finfo(xp.float32).tiny)

    # whole blocks apart from the rest, so that float32 rounds no more than the fraction of a block
    rest = config.selection_block * 1.0 * (sums.whole_blocks % rows) + sums.rest
    result: dict[str, Any] = {
        "rows": rows,
        "k_mean": config.selection_block * (sums.whole_blocks // rows) + rest / rows,
        "k_max": sums.k_max,
        "pct_at_max": sums.rows_at_max / rows,
        "free_importance": ratio(sums.free_importance, sums.importance),
        "free_attention": sums.free_mass / head_rows,
        "jaccard_next_query": ratio(sums.jaccard, sums.pairs),
        "tile_union": sums.tile_blocks / sums.tiles,
        "load": sums.load / rows,
    }
    for number, branch in enumerate(BRANCHES):
        result[f"gate_mean_{branch}"] = sums.gates[number] / head_rows
        result[f"gate_entropy_{branch}"] = sums.gate_entropy[number] / head_rows
    return result


def closed_form(config: NativeSparseConfig, positions: int) -> dict[str, float]:
    """Compute k_mean, k_max and pct_at_max of `figures` from the length of the sequence, without weights.

    k(t) = min(selected - 1, t // selection_block) * selection_block + t % selection_block + 1

    >>> config = NativeSparseConfig(768, 2, 6, 64, 64, block=32, stride=16, selection_block=64, selected=16, window=512)
    >>> closed_form(config, 2048)
    {'k_mean': 752.5, 'k_max': 1024, 'pct_at_max': 0.00830078125}
    """
    t = np.arange(positions)
    k = np.minimum(config.selected - 1, t // config.selection_block) * config.selection_block
    k += t % config.selection_block + 1
    return {"k_mean": float(k.mean()), "k_max": int(k.max()), "pct_at_max": float((k == k.max()).mean())}
