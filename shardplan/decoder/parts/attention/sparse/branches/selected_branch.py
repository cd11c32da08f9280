"""Attention to the tokens of the selected blocks, up to the query's own. Paper: section 3.3.2, equations 11 and 12.

Entries that are `UNUSED` stand for no token, so that neither the output nor any gradient has a part of them.
"""

from enum import StrEnum
from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardplan.decoder.parts.attention.sparse.branches.masked_softmax import masked_softmax
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import map_query_chunks
from shardplan.decoder.parts.attention.sparse.kernels.selected_kernel import attend_by_kernel
from shardplan.decoder.parts.attention.sparse.selection_blocks import SelectionBlocks


class SelectedMethod(StrEnum):
    """How attention to the selected blocks is computed."""

    DENSE_MASK = "dense_mask"
    """Computes scores of all tokens and masks most of them: the fastest for short sequences."""
    GATHERED_BLOCKS = "gathered_blocks"
    """Computes scores of tokens that are gathered for each query: its work does not grow with the sequence."""
    KERNEL = "kernel"
    """Runs a Pallas kernel in which tiles of queries walk the union of their blocks: the fastest for long sequences.
    The other two branches then have kernels too."""


class SelectedAttention(NamedTuple):
    """The results of attention to the selected blocks."""

    output: jax.Array
    """The attention output, [b, t, g, r, d]."""
    free_mass: jax.Array | None
    """Attention weights of tokens outside forced blocks, summed over r, float32[b, t, g]; None if not requested."""


def attend_to_selected(
    selection: SelectionBlocks,
    method: SelectedMethod,
    queries_per_chunk: int,
    positions: jax.Array,
    queries: jax.Array,
    blocks: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    with_free_mass: bool = False,
) -> SelectedAttention:
    """Attend causally to the tokens of each query's selected blocks; d ** -0.5 scales the scores.

    Args:
        queries_per_chunk: queries whose scores or gathered keys are in memory at a time; kernels need no such bound.
        positions: int[t], of the queries; for a kernel, as `PositionShards.positions` returns them.
        queries: [b, t, g, r, d].
        blocks: int32[b, t, g, n], negative where unused, in any order; no query has one twice.
        keys: [b, s, g, d], of the whole sequence, in order.
        values: [b, s, g, d].
        with_free_mass: whether the result has `free_mass`, for statistics.
    """
    if method is SelectedMethod.KERNEL:
        return SelectedAttention(*attend_by_kernel(selection, with_free_mass, positions, blocks, queries, keys, values))
    attend = _attend_with_dense_mask if method is SelectedMethod.DENSE_MASK else _attend_to_gathered_blocks

    def attend_chunk(positions: jax.Array, queries: jax.Array, blocks: jax.Array) -> SelectedAttention:
        return attend(selection, positions, queries, blocks, keys, values, with_free_mass)

    return map_query_chunks(attend_chunk, queries_per_chunk, positions, queries, blocks)


def _attend_with_dense_mask(
    selection: SelectionBlocks,
    positions: jax.Array,
    queries: jax.Array,
    blocks: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    with_free_mass: bool,
) -> SelectedAttention:
    count = keys.shape[1]
    tokens = jnp.arange(count)
    is_selected = (blocks[..., None] == jnp.arange(selection.count(count))).any(axis=-2)
    of_tokens = jnp.repeat(is_selected, selection.size, axis=-1)[..., :count]
    is_visible = of_tokens & (tokens <= positions[:, None])[:, None]
    keys, values = keys.astype(queries.dtype), values.astype(queries.dtype)
    scores = jnp.einsum("btgrd,bsgd->btgrs", queries, keys, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores * queries.shape[-1] ** -0.5, is_visible[:, :, :, None])
    output = jnp.einsum("btgrs,bsgd->btgrd", weights.astype(values.dtype), values)
    if not with_free_mass:
        return SelectedAttention(output, None)
    is_free = ~selection.is_forced(tokens // selection.size, positions[:, None])
    return SelectedAttention(output, jnp.where(is_free[:, None, None], weights, 0.0).sum(axis=(-2, -1)))


def _attend_to_gathered_blocks(
    selection: SelectionBlocks,
    positions: jax.Array,
    queries: jax.Array,
    blocks: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    with_free_mass: bool,
) -> SelectedAttention:
    tokens = blocks[..., None] * selection.size + jnp.arange(selection.size)
    is_visible = (blocks >= 0)[..., None] & (tokens <= positions[:, None, None, None])
    is_visible = is_visible.reshape(*blocks.shape[:3], -1)  # [b, t, g, tokens of the selected blocks]
    # converted after they are gathered, so that gradients of all queries that select a block are added in its dtype
    gathered_keys = _gather_blocks(selection, keys, blocks).astype(queries.dtype)
    gathered_values = _gather_blocks(selection, values, blocks).astype(queries.dtype)
    scores = jnp.einsum("btgrd,btgsd->btgrs", queries, gathered_keys, preferred_element_type=jnp.float32)
    weights = masked_softmax(scores * queries.shape[-1] ** -0.5, is_visible[:, :, :, None])
    output = jnp.einsum("btgrs,btgsd->btgrd", weights.astype(queries.dtype), gathered_values)
    if not with_free_mass:
        return SelectedAttention(output, None)
    is_free = jnp.repeat(~selection.is_forced(blocks, positions[:, None, None]), selection.size, axis=-1)
    return SelectedAttention(output, jnp.where(is_free[:, :, :, None], weights, 0.0).sum(axis=(-2, -1)))


def _gather_blocks(selection: SelectionBlocks, x: jax.Array, blocks: jax.Array) -> jax.Array:
    """Return the tokens of selected blocks: [b, s, g, d], int32[b, t, g, n] -> [b, t, g, n * size, d].

    Block 0 is read in place of `UNUSED`, and callers mask it.
    """
    batch, positions, groups, size = x.shape
    count = selection.count(positions)
    padded = jnp.pad(x, [(0, 0), (0, count * selection.size - positions), (0, 0), (0, 0)])
    by_block = padded.reshape(batch, count, selection.size, groups, size)
    # over batch and groups by vmap, so that both stay batch dimensions of the gather and can be sharded
    take = jax.vmap(jax.vmap(lambda of_head, indices: of_head[indices], (2, 1), 1))
    return take(by_block, jnp.maximum(blocks, 0)).reshape(*blocks.shape[:3], -1, size)
