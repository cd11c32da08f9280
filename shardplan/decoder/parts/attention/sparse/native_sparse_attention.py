"""The layer of Native Sparse Attention: projections, three branches, gates. Source: https://arxiv.org/abs/2502.11089.

The layer projects its input, a `SparseCall` computes the branches on every device, and the output is projected. A
policy of gradient checkpointing that saves `ActivationName.SELECTED_BLOCKS` computes gradients for exactly the blocks
of the forward pass. All shapes are static, and nothing is computed on the host.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, overload

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

from shardplan.decoder.parts.attention.grouped_attention import POSITION
from shardplan.decoder.parts.attention.sparse.branches.query_chunks import QUERIES_PER_CHUNK
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.device_branches import GroupInputs, TokenInputs
from shardplan.decoder.parts.attention.sparse.parameters import init_parameters, name_arrays
from shardplan.decoder.parts.attention.sparse.sharding.mesh_sharding import device_count, resolve_mesh_sharding
from shardplan.decoder.parts.attention.sparse.sharding.traffic import importance_all_reduce_bytes
from shardplan.decoder.parts.attention.sparse.sparse_call import SUBJECT, SparseCall, attend_sparsely
from shardplan.decoder.parts.attention.sparse.statistics import SelectionSums
from shardplan.errors import ConfigError
from shardplan.model.axis_sharding import mesh_axes_of
from shardplan.model.gradient_checkpointing.activation_names import ActivationName
from shardplan.positions.sequence_order import SequenceOrder

BATCH = "batch"
QUERY_TILE = 8
"""Number of queries per tile in statistics of the union of selected blocks, as many as a kernel's tile has."""


class DetailedOutput(NamedTuple):
    """The output of the layer, and the blocks that it selected."""

    output: NamedArray
    """{batch, position, embed}."""
    blocks: NamedArray
    """Selected blocks, int32{batch, position, kv_head, selected}, ascending; -1 if a query has fewer blocks."""
    sums: SelectionSums
    """Sums from which `shardplan.decoder.parts.attention.sparse.statistics.figures` computes statistics."""


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

    The axis mapping shards the same call over a mesh, such as one with the axes data, sequence and model::

        with jax.set_mesh(mesh):
            hax.named_jit(layer, axis_resources={"batch": "data", "position": "sequence", "kv_head": "model"})(x)
    """

    parameters: dict[str, NamedArray]
    """Parameters, by their names in `shardplan.decoder.parts.attention.sparse.parameters.parameter_table`."""
    config: NativeSparseConfig = eqx.field(static=True)

    @staticmethod
    def init(config: NativeSparseConfig, *, key: jax.Array) -> "NativeSparseAttention":
        """Make the layer with random weights."""
        return NativeSparseAttention(init_parameters(config, key), config)

    @staticmethod
    def from_arrays(config: NativeSparseConfig, parameters: Mapping[str, Any]) -> "NativeSparseAttention":
        """Make the layer from given arrays, with the names and shapes of `parameter_table`.

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
        layout: SequenceOrder = ...,
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
        layout: SequenceOrder = ...,
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
        layout: SequenceOrder = SequenceOrder.CONTIGUOUS,
        with_details: bool = False,
        queries_per_chunk: int = QUERIES_PER_CHUNK,
        query_tile: int = QUERY_TILE,
    ) -> NamedArray | DetailedOutput:
        """Compute the output {batch, position, embed} of attention from inputs with the same axes.

        It is sharded as the current `hax.axis_mapping` shards batch, position and kv_head over the mesh of
        `jax.set_mesh`. All arguments but `x` are static.

        Args:
            method: how attention to the selected blocks is computed; `SelectedMethod.KERNEL` has kernels for compressed
                blocks and windows as well.
            layout: the order that positions are in already: contiguous or zigzag; see
                `shardplan.positions.sequence_layout`. The result has the same order, and the numbers of blocks count
                from the start of the sequence.
            with_details: whether the result is a `DetailedOutput`; otherwise no statistics are traced.
            queries_per_chunk: queries of a device that are computed at a time; it bounds memory.
            query_tile: queries whose union of blocks the statistics count.

        Raises:
            ConfigError: the axis mapping shards heads within a group or does not divide a size evenly, a tile of
                queries is on two devices, or there is no kernel for the sizes.
        """
        config, Batch, Pos = self.config, x.resolve_axis(BATCH), x.resolve_axis(POSITION)
        # a mapping is refused before the projections use it
        self._check_heads(Pos)
        sharding = resolve_mesh_sharding(SUBJECT, Batch, Pos, config.KVHeads, config.QHeadsPerGroup)
        call = SparseCall(
            config, Pos, sharding, self._token_inputs(x), self._group_inputs(), method, layout, queries_per_chunk
        )
        if not with_details:
            return self._output(attend_sparsely(call).astype(x.dtype), Batch, Pos)
        # not by `attend_sparsely`, whose replacement would return neither blocks nor sums
        results, sums = call.run(query_tile)
        assert sums is not None
        output = self._output(results.mixed.astype(x.dtype), Batch, Pos)
        return DetailedOutput(output, hax.named(results.blocks, (Batch, Pos, config.KVHeads, config.Selected)), sums)

    def _check_heads(self, Pos: Axis) -> None:
        """Check that every device has all query heads of a group, because a sum over these heads selects the blocks.

        Raises:
            ConfigError: the axis mapping shards them.
        """
        config = self.config
        devices = device_count(mesh_axes_of(config.QHeadsPerGroup))
        if devices > 1:
            cost = importance_all_reduce_bytes(config, Pos.size, config.groups, devices)
            raise ConfigError(
                f"{SUBJECT}: {config.QHeadsPerGroup.name} is sharded over {devices} devices; shard "
                f"{config.KVHeads.name} instead, because heads of a group select blocks by one sum, whose all-reduce "
                f"would be {cost / 1e6:.1f} MB for each sequence and layer"
            )

    def _token_inputs(self, x: NamedArray) -> TokenInputs:
        """Return the projections of {batch, position, embed} that the branches need."""

        def keys(branch: str) -> jax.Array:
            return ActivationName.KEYS(self._project(f"k_{branch}", x)).array

        def values(branch: str) -> jax.Array:
            return ActivationName.VALUES(self._project(f"v_{branch}", x)).array

        return TokenInputs(
            queries=ActivationName.QUERIES(self._project("q", x)).array,
            compressed_keys=keys("cmp"),
            compressed_values=values("cmp"),
            selected_keys=keys("slc"),
            selected_values=values("slc"),
            window_keys=keys("win"),
            window_values=values("win"),
            gate_products=self._project("gate_w", x).array,
        )

    def _group_inputs(self) -> GroupInputs:
        """Return the parameters that the branches need."""
        return GroupInputs(self.parameters["gate_b"].array, self._phi("phi_k_"), self._phi("phi_v_"))

    def _project(self, name: str, x: NamedArray) -> NamedArray:
        """Multiply {batch, position, embed} by a weight; the result's first axes are batch and position."""
        product = hax.dot(x, self.parameters[name], axis=self.config.Embed)
        weight = [axis for axis in self.parameters[name].axes if axis != self.config.Embed]
        return hax.auto_sharded(product.rearrange((BATCH, POSITION, *weight)))

    def _phi(self, prefix: str) -> dict[str, jax.Array]:
        """Return name without prefix -> parameter, for the compression of keys or values."""
        named = {name: value.array for name, value in self.parameters.items() if name.startswith(prefix)}
        return {name.removeprefix(prefix): array for name, array in named.items()}

    def _output(self, mixed: jax.Array, Batch: Axis, Pos: Axis) -> NamedArray:
        """Project the mixed branches [b, t, g, r, d] to {batch, position, embed}."""
        heads = (self.config.KVHeads, self.config.QHeadsPerGroup, self.config.ValueHeadSize)
        # the kernels of branches do not name it, as other kernels do where plans compute attention
        context = hax.tree_checkpoint_name(
            hax.auto_sharded(hax.named(mixed, (Batch, Pos, *heads))), ActivationName.CONTEXT.value
        )
        return ActivationName.ATTENTION_OUT(hax.auto_sharded(hax.dot(context, self.parameters["o"], axis=heads)))
