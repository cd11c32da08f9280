"""Native Sparse Attention as the attention of a decoder's layer: `NativeSparseAttention` under a causal mask."""

from dataclasses import dataclass

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from levanter.layers.attention import AttentionMask

from shardplan.decoder.parts.attention.grouped_attention import POSITION, Kernel
from shardplan.decoder.parts.attention.rotary import Positions
from shardplan.decoder.parts.attention.selection_recording import selection_recording
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse.config import Compression, NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.native_sparse_attention import BATCH, NativeSparseAttention
from shardplan.errors import ConfigError
from shardplan.model.attention.mask_pattern import has_static_offset, pattern_of_mask
from shardplan.positions.pattern import CAUSAL
from shardplan.positions.sequence_order import SequenceOrder


@dataclass(frozen=True)
class SparseAttention:
    """The Native Sparse Attention of a layer: its sizes, and the method that computes it."""

    sizes: NativeSparseConfig
    method: SelectedMethod = SelectedMethod.DENSE_MASK
    """How attention to the selected blocks is computed; it does not change the result."""
    layout: SequenceOrder = SequenceOrder.CONTIGUOUS
    """The order of positions in activations."""

    def flops_per_token(self, embed: int, context_length: int) -> int:
        """Count the FLOPs of a token, as `GroupedAttention.flops_per_token` does.

        keys = compressed blocks + min(context_length, selected * selection_block) + min(context_length, window);
        scores = keys * groups * heads_per_group * (2 * (key_size + value_size) + 3);
        a compressed key or value takes 2 * block * size * hidden + 2 * hidden * size, once every `stride` tokens.

        Args:
            embed: elements of the residual stream.
            context_length: tokens of a text.
        """
        sizes = self.sizes
        heads, channels = sizes.groups * sizes.heads_per_group, sizes.key_size + sizes.value_size
        projections = 2 * embed * (heads * channels + 3 * sizes.groups * channels + 3 * heads)
        compression = sum(_compression_flops(sizes, size) for size in (sizes.key_size, sizes.value_size))
        keys = sizes.compressed_blocks(context_length)
        keys += min(context_length, sizes.selected * sizes.selection_block) + min(context_length, sizes.window)
        return projections + sizes.groups * compression // sizes.stride + keys * heads * (2 * channels + 3)

    def init(self, Embed: Axis, key: jax.Array) -> "SparseAttentionLayer":
        """Make the layer with random weights.

        Raises:
            ConfigError: the residual stream has another size than the attention.
        """
        if Embed != self.sizes.Embed:
            raise ConfigError(f"native sparse attention: embed is {self.sizes.embed}; the residual stream has {Embed}")
        return SparseAttentionLayer(NativeSparseAttention.init(self.sizes, key=key), self)


class SparseAttentionLayer(eqx.Module):
    """A layer with Native Sparse Attention."""

    attention: NativeSparseAttention
    config: SparseAttention = eqx.field(static=True)

    def __call__(self, x: NamedArray, mask: AttentionMask, positions: Positions, kernel: Kernel) -> NamedArray:
        """Attend within {batch, position, embed} or {position, embed}, and return the same axes.

        The sequence is one text, in the order of positions that `layout` names.

        Raises:
            ConfigError: the mask has documents, or is not causal.
        """
        del positions, kernel  # both follow from the layout and the method
        _check_mask(mask)
        if x.has_axis(BATCH):
            return self._attend(x).rearrange(x.axes)
        with_batch = x.broadcast_axis(Axis(BATCH, 1))
        return self._attend(with_batch)[BATCH, 0].rearrange(x.axes)

    def _attend(self, x: NamedArray) -> NamedArray:
        """Attend within the axes batch, position and embed, in any order."""
        others = [axis.name for axis in x.axes if axis.name not in (BATCH, POSITION, self.config.sizes.Embed.name)]
        if others:
            raise ConfigError(
                f"native sparse attention: activations have the axis {others[0]} beside {BATCH} and {POSITION}; "
                f"flatten it into {BATCH}"
            )
        method, layout, recording = self.config.method, self.config.layout, selection_recording()
        if recording is None:
            return self.attention(x, method, layout=layout)
        details = self.attention(x, method, layout=layout, with_details=True)
        recording.sums.append(details.sums)
        return details.output


def _check_mask(mask: AttentionMask) -> None:
    """Check that a mask is causal, with one document per sequence and no window.

    Raises:
        ConfigError: the mask is of another kind.
    """
    if mask.segment_ids is not None:
        raise ConfigError(
            "native sparse attention: the mask has documents (segment ids), and a block of tokens would mix two of "
            "them; give every text a sequence of its own (data.block_cross_document_attention: false in Levanter, "
            "which lets tokens attend to the texts before theirs)"
        )
    is_known = mask.explicit_mask is None and has_static_offset(mask)
    if not is_known or pattern_of_mask(mask) != CAUSAL:
        raise ConfigError("native sparse attention: the mask must be causal, and nothing else: AttentionMask.causal()")


def _compression_flops(sizes: NativeSparseConfig, size: int) -> int:
    """Return the FLOPs to compress the keys or values of one block in one group, for heads of `size` channels."""
    match sizes.compression:
        case Compression.MEAN:
            return sizes.block * size
        case Compression.LINEAR:
            return 2 * sizes.block * size * size
        case Compression.MLP:
            hidden = sizes.hidden_size(size)
            return 2 * sizes.block * size * hidden + 2 * hidden * size
