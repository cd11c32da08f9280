"""The layer of Native Sparse Attention: projections, three branches, gates. Source: https://arxiv.org/abs/2502.11089.

The branches are computed in this order: attention to compressed blocks gives the importance of all blocks; the blocks
are selected, and named `ActivationName.SELECTED_BLOCKS`; attention to the selected blocks and to the window follows. A
policy of gradient checkpointing that saves this name computes gradients for exactly the blocks of the forward pass. All
shapes are static, and nothing is computed on the host.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

from shardplan.decoder.parts.attention.grouped_attention import POSITION
from shardplan.decoder.parts.attention.rotary import Positions
from shardplan.decoder.parts.attention.sparse.compressed_branch import attend_to_compressed
from shardplan.decoder.parts.attention.sparse.compression import compress
from shardplan.decoder.parts.attention.sparse.config import CompressedRope, NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.gates import compute_gates, mix
from shardplan.decoder.parts.attention.sparse.parameters import init_parameters, name_arrays
from shardplan.decoder.parts.attention.sparse.query_chunks import map_query_chunks
from shardplan.decoder.parts.attention.sparse.selected_branch import (
    SelectedAttention,
    SelectedMethod,
    attend_to_selected,
)
from shardplan.decoder.parts.attention.sparse.selection import select
from shardplan.decoder.parts.attention.sparse.statistics import SelectionSums, selection_sums
from shardplan.decoder.parts.attention.sparse.window_branch import attend_to_windows
from shardplan.model.activation_names import ActivationName

BATCH = "batch"
QUERIES_PER_CHUNK = 256
"""Queries whose scores or gathered keys are in memory at a time."""
QUERY_TILE = 8
"""Queries whose union of blocks the statistics count; so many a kernel would compute together."""


class DetailedOutput(NamedTuple):
    """The output of the layer, and what it selected."""

    output: NamedArray
    """{batch, position, embed}."""
    blocks: NamedArray
    """int32{batch, position, kv_head, selected}, ascending, -1 where a query has fewer blocks."""
    sums: SelectionSums
    """For `shardplan.decoder.parts.attention.sparse.statistics.figures`."""


class NativeSparseAttention(eqx.Module):
    """A layer of Native Sparse Attention, for causal sequences that are one text each.

    >>> config = NativeSparseConfig(
    ...     embed=8, groups=1, heads_per_group=2, key_size=4, value_size=4, block=4, stride=2, selection_block=4,
    ...     selected=3, window=4, compression="mean",
    ... )
    >>> layer = NativeSparseAttention.init(config, key=jax.random.key(0))
    >>> x = hax.random.normal(jax.random.key(1), (Axis("batch", 1), Axis("position", 16), config.Embed))
    >>> result = eqx.filter_jit(layer)(x, with_details=True)
    >>> result.output.shape
    {'batch': 1, 'position': 16, 'embed': 8}
    >>> result.blocks["position", 15].array.tolist()
    [[[0, 2, 3]]]
    """

    parameters: dict[str, NamedArray]
    """By the names of `shardplan.decoder.parts.attention.sparse.parameters.parameter_table`."""
    config: NativeSparseConfig = eqx.field(static=True)

    @staticmethod
    def init(config: NativeSparseConfig, *, key: jax.Array) -> "NativeSparseAttention":
        """Make the layer with random weights."""
        return NativeSparseAttention(init_parameters(config, key), config)

    @staticmethod
    def from_arrays(config: NativeSparseConfig, parameters: Mapping[str, Any]) -> "NativeSparseAttention":
        """Make the layer of given arrays, by the names and in the shapes of `parameter_table`.

        Raises:
            ConfigError: an array is missing, unknown, or has another shape.
        """
        return NativeSparseAttention(name_arrays(config, parameters), config)

    @overload
    def __call__(
        self,
        x: NamedArray,
        method: SelectedMethod = ...,
        *,
        with_details: Literal[False] = ...,
        queries_per_chunk: int = ...,
        query_tile: int = ...,
    ) -> NamedArray: ...

    @overload
    def __call__(
        self,
        x: NamedArray,
        method: SelectedMethod = ...,
        *,
        with_details: Literal[True],
        queries_per_chunk: int = ...,
        query_tile: int = ...,
    ) -> DetailedOutput: ...

    @named_call  # for profiles and reports
    def __call__(
        self,
        x: NamedArray,
        method: SelectedMethod = SelectedMethod.DENSE_MASK,
        *,
        with_details: bool = False,
        queries_per_chunk: int = QUERIES_PER_CHUNK,
        query_tile: int = QUERY_TILE,
    ) -> NamedArray | DetailedOutput:
        """Compute the output {batch, position, embed} of attention from the same axes.

        All arguments but `x` are static.

        Args:
            method: how attention to the selected blocks is computed.
            with_details: whether the result is a `DetailedOutput`; otherwise no statistics are traced.
            queries_per_chunk: queries of a sequence that are computed at a time; it bounds memory.
            query_tile: queries whose union of blocks the statistics count.
        """
        config, Batch, Pos = self.config, x.resolve_axis(BATCH), x.resolve_axis(POSITION)
        positions, selection_blocks = jnp.arange(Pos.size), config.selection_blocks(Pos.size)
        plain = ActivationName.QUERIES(self._project("q", x))
        rotated = self._rotate(plain, Pos, positions)
        of_compressed = rotated if config.compressed_rope is CompressedRope.BLOCK_START else plain
        compressed_keys, compressed_values = self._compressed_keys_and_values(x)
        selected_keys, selected_values = self._keys_and_values(x, "slc")
        window_keys, window_values = self._keys_and_values(x, "win")

        def attend_compressed(positions: jax.Array, queries: jax.Array) -> tuple[jax.Array, jax.Array]:
            return attend_to_compressed(
                config, positions, queries, compressed_keys, compressed_values, selection_blocks
            )

        def attend_selected(positions: jax.Array, queries: jax.Array, blocks: jax.Array) -> SelectedAttention:
            return attend_to_selected(
                config, method, positions, queries, blocks, selected_keys, selected_values, with_details
            )

        compressed, importance = map_query_chunks(attend_compressed, queries_per_chunk, positions, of_compressed.array)
        chosen = hax.named(select(config, importance, positions), (Batch, Pos, config.KVHeads, config.Selected))
        blocks = ActivationName.SELECTED_BLOCKS(hax.auto_sharded(chosen))
        selected = map_query_chunks(attend_selected, queries_per_chunk, positions, rotated.array, blocks.array)
        window = attend_to_windows(config, rotated.array, window_keys, window_values, queries_per_chunk)
        gates = compute_gates(self._project("gate_w", x).array, self.parameters["gate_b"].array)
        output = self._output(mix(gates, (compressed, selected.output, window)).astype(x.dtype), Batch, Pos)
        if not with_details:
            return output
        assert selected.free_mass is not None
        sums = selection_sums(config, positions, blocks.array, importance, selected.free_mass, gates, query_tile)
        return DetailedOutput(output, blocks, sums)

    def _project(self, name: str, x: NamedArray) -> NamedArray:
        """Multiply {batch, position, embed} by a weight; the result begins with batch and position."""
        product = hax.dot(x, self.parameters[name], axis=self.config.Embed)
        weight = [axis for axis in self.parameters[name].axes if axis != self.config.Embed]
        return hax.auto_sharded(product.rearrange((BATCH, POSITION, *weight)))

    def _rotate(self, x: NamedArray, axis: Axis, indices: jax.Array) -> NamedArray:
        """Rotate queries or keys by the positions `indices` of the axis, if there is a rotary embedding."""
        if self.config.rotary is None:
            return x
        named = hax.named(indices, axis)
        return self.config.rotary(x, self.config.HeadSize, Positions.of(named)).rearrange(x.axes)

    def _keys_and_values(self, x: NamedArray, branch: str) -> tuple[jax.Array, jax.Array]:
        """Return the keys, rotated, and values of the selected (slc) or window (win) branch: float32[b, s, g, d].

        They are float32 so that gradients of all queries and chunks are added in float32.
        """
        Pos = x.resolve_axis(POSITION)
        keys = self._rotate(ActivationName.KEYS(self._project(f"k_{branch}", x)), Pos, jnp.arange(Pos.size))
        values = ActivationName.VALUES(self._project(f"v_{branch}", x))
        return keys.array.astype(jnp.float32), values.array.astype(jnp.float32)

    def _compressed_keys_and_values(self, x: NamedArray) -> tuple[jax.Array, jax.Array]:
        """Return the keys, rotated, and values of the compressed branch: float32[b, c, g, d]."""
        config = self.config
        keys = compress(config, ActivationName.KEYS(self._project("k_cmp", x)).array, self._phi("phi_k_"))
        values = compress(config, ActivationName.VALUES(self._project("v_cmp", x)).array, self._phi("phi_v_"))
        Blocks = Axis("compressed_block", keys.shape[1])
        if config.compressed_rope is CompressedRope.BLOCK_START and Blocks.size > 0:
            named = hax.named(keys, (x.resolve_axis(BATCH), Blocks, config.KVHeads, config.HeadSize))
            keys = self._rotate(named, Blocks, jnp.arange(Blocks.size) * config.stride).array
        return keys.astype(jnp.float32), values.astype(jnp.float32)

    def _phi(self, prefix: str) -> dict[str, jax.Array]:
        """Return the parameters of the compression of keys or of values, without the prefix of their names."""
        named = {name: value.array for name, value in self.parameters.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): array for name, array in named.items()}

    def _output(self, mixed: jax.Array, Batch: Axis, Pos: Axis) -> NamedArray:
        """Project the mixed branches [b, t, g, r, d] to {batch, position, embed}."""
        heads = (self.config.KVHeads, self.config.QHeadsPerGroup, self.config.ValueHeadSize)
        context = ActivationName.CONTEXT(hax.auto_sharded(hax.named(mixed, (Batch, Pos, *heads))))
        return ActivationName.ATTENTION_OUT(hax.auto_sharded(hax.dot(context, self.parameters["o"], axis=heads)))
