"""One device's part of a layer of Native Sparse Attention: three branches for its queries, without projections.

Attention to compressed blocks gives the importance of all blocks; the blocks are selected, where their queries are, and
named `ActivationName.SELECTED_BLOCKS`; attention to the selected blocks and to the window follows. A device has a part
of the batch and of the groups; `PositionShards` gets it what it needs of the positions that other devices have.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from shardplan.decoder.parts.attention.rotary import Positions
from shardplan.decoder.parts.attention.sparse.branches.compressed_branch import attend_to_compressed
from shardplan.decoder.parts.attention.sparse.branches.compression import compress
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import map_query_chunks
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import (
    SelectedMethod,
    attend_to_selected,
)
from shardplan.decoder.parts.attention.sparse.branches.selection import select
from shardplan.decoder.parts.attention.sparse.branches.window_branch import attend_to_windows
from shardplan.decoder.parts.attention.sparse.config import CompressedRope, NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.gates import compute_gates, mix
from shardplan.decoder.parts.attention.sparse.kernels.compressed_kernel import attend_to_compressed_by_kernel
from shardplan.decoder.parts.attention.sparse.kernels.window.kernel import attend_to_windows_by_kernel
from shardplan.decoder.parts.attention.sparse.sharding.position_shards import PositionShards
from shardplan.decoder.parts.attention.sparse.statistics import (
    Neighbours,
    SelectionSums,
    reduce_sums,
    selection_sums,
)
from shardplan.model.gradient_checkpointing.activation_names import ActivationName


class TokenInputs(NamedTuple):
    """Projections of the layer's input, before any rotation."""

    queries: jax.Array
    """Queries, [b, t, g, r, d]."""
    compressed_keys: jax.Array
    """Keys of the compressed branch, [b, t, g, d]; all other keys and values have this shape too."""
    compressed_values: jax.Array
    selected_keys: jax.Array
    selected_values: jax.Array
    window_keys: jax.Array
    window_values: jax.Array
    gate_products: jax.Array
    """Inputs of the gates' sigmoids without biases, [b, t, g, r, 3]."""


class GroupInputs(NamedTuple):
    """The parameters of the branches; the first axis g of each is the group (key head)."""

    gate_biases: jax.Array
    """Biases of the gates, [g, r, 3]."""
    phi_k: Mapping[str, jax.Array]
    """Parameters that compress keys, in the form that `compress` takes."""
    phi_v: Mapping[str, jax.Array]


class TokenResults(NamedTuple):
    """What one device computed for its queries: the mixed output of the branches, and the selected blocks."""

    mixed: jax.Array
    """Sum of the branches, float32[b, t, g, r, d]."""
    blocks: jax.Array
    """Selected blocks, int32[b, t, g, n]."""


@dataclass(frozen=True)
class DeviceBranches:
    """Computes the three branches of one layer (compressed, selected, window) for one device's queries."""

    config: NativeSparseConfig
    shards: PositionShards
    summed_axes: tuple[str, ...]
    """Mesh axes whose devices have different rows, over which statistics are summed."""
    method: SelectedMethod
    queries_per_chunk: int
    query_tile: int | None
    """Number of queries per tile; statistics count the union of the blocks of a tile. None for no statistics."""

    def run(self, inputs: TokenInputs, parameters: GroupInputs) -> tuple[TokenResults, SelectionSums | None]:
        """Compute the branches for this device's queries; with `query_tile`, also sum statistics over devices."""
        config, shards, chunk = self.config, self.shards, self.queries_per_chunk
        positions = shards.positions()
        queries = self._rotate(inputs.queries, positions)
        # scores depend on relative positions only if both sides are rotated
        of_compressed = queries if config.compressed_rope is CompressedRope.BLOCK_START else inputs.queries
        compressed_keys, compressed_values = self._compressed_keys_and_values(inputs, parameters, positions)
        selected_keys = shards.gather(self._rotate(inputs.selected_keys, positions))
        selected_values = shards.gather(inputs.selected_values)
        with_details, length = self.query_tile is not None, shards.parts.length

        has_kernel = self.method is SelectedMethod.KERNEL

        def attend_compressed(positions: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
            blocks = config.selection_blocks(length)
            if has_kernel:
                arrays = queries, compressed_keys, compressed_values
                return attend_to_compressed_by_kernel(config, blocks, positions, *arrays)
            return attend_to_compressed(config, positions, queries, compressed_keys, compressed_values, blocks)

        # kernels bound memory themselves
        compressed_chunk = len(positions) if has_kernel else chunk
        compressed, importance = map_query_chunks(attend_compressed, compressed_chunk, positions, of_compressed)
        chosen = select(config, importance, positions)
        blocks: jax.Array = checkpoint_name(chosen, ActivationName.SELECTED_BLOCKS.value)
        selected = attend_to_selected(
            config.selection,
            self.method,
            chunk,
            positions,
            queries,
            blocks,
            selected_keys,
            selected_values,
            with_details,
        )
        window = self._attend_to_windows(inputs, positions, queries)
        gates = compute_gates(inputs.gate_products, parameters.gate_biases)
        results = TokenResults(mix(gates, (compressed, selected.output, window)), blocks)
        if self.query_tile is None:
            return results, None
        assert selected.free_mass is not None
        neighbours = Neighbours(*shards.with_next_rows(blocks))
        sums = selection_sums(
            config, positions, blocks, importance, selected.free_mass, gates, self.query_tile, neighbours
        )
        return results, reduce_sums(sums, self.summed_axes) if self.summed_axes else sums

    def _compressed_keys_and_values(
        self, inputs: TokenInputs, parameters: GroupInputs, positions: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Return the rotated keys, and the values, of all complete blocks of the sequence: float32[b, c, g, d].

        They are float32, like the keys and values of the other branches, so that gradients of all queries and chunks
        are added in float32.
        """
        config, shards = self.config, self.shards

        def compress_parts(x: jax.Array, phi: Mapping[str, jax.Array]) -> jax.Array:
            parts = shards.with_next(x, config.block - config.stride)
            return jnp.concatenate([compress(config, part, phi) for part in parts], axis=1)

        keys = compress_parts(inputs.compressed_keys, parameters.phi_k)
        values = compress_parts(inputs.compressed_values, parameters.phi_v)
        if config.compressed_rope is CompressedRope.BLOCK_START:
            keys = self._rotate(keys, positions[:: config.stride][: keys.shape[1]])
        complete = config.compressed_blocks(shards.parts.length)
        return shards.gather(keys)[:, :complete], shards.gather(values)[:, :complete]

    def _attend_to_windows(self, inputs: TokenInputs, positions: jax.Array, queries: jax.Array) -> jax.Array:
        """Attend to the windows of the queries [b, t, g, r, d]."""
        shards = self.shards
        halo = min(self.config.window, shards.parts.length) - 1  # a window includes the query's own token
        keys = shards.with_previous(self._rotate(inputs.window_keys, positions), halo)
        values = shards.with_previous(inputs.window_values, halo)
        outputs = []
        for first, of_part, *near in zip(shards.firsts(), shards.split(queries), keys, values, strict=True):
            near_keys, near_values = (x.astype(jnp.float32) for x in near)
            if self.method is SelectedMethod.KERNEL:
                output = attend_to_windows_by_kernel(self.config, first, of_part, near_keys, near_values)
            else:
                chunk = self.queries_per_chunk
                output = attend_to_windows(self.config, first, of_part, near_keys, near_values, chunk)
            outputs.append(output)
        return jnp.concatenate(outputs, axis=1)

    def _rotate(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Rotate queries or keys [b, t, ..., d] by positions int[t], if there is a rotary embedding."""
        if self.config.rotary is None or x.shape[1] == 0:
            return x
        heads = ("kv_head", "q_heads_per_group")[: x.ndim - 3]
        named = hax.named(x, ("batch", "position", *heads, self.config.HeadSize))
        rotated = self.config.rotary(named, self.config.HeadSize, Positions.of(hax.named(positions, "position")))
        result: jax.Array = rotated.rearrange(named.axes).array
        return result
