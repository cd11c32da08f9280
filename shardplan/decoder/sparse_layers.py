"""The layers of a decoder with Native Sparse Attention, and the method that computes all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse_attention import SparseAttention
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.segments import Segment
from shardplan.positions.sequence_order import SequenceOrder


def sparse_attentions(segments: Sequence[Segment]) -> Iterator[SparseAttention]:
    """Yield the attention of each layer with Native Sparse Attention, once for each block of layers."""
    for segment in segments:
        for layer in segment.layers:
            if isinstance(layer.attention, SparseAttention):
                yield layer.attention


def selected_method(segments: Sequence[Segment]) -> SelectedMethod | None:
    """Return how layers attend to their selected blocks; None if no layer has Native Sparse Attention."""
    return next((attention.method for attention in sparse_attentions(segments)), None)


def with_selected_method(
    segments: Sequence[Segment], method: SelectedMethod, layout: SequenceOrder = SequenceOrder.CONTIGUOUS
) -> tuple[Segment, ...]:
    """Return the segments with another method of attention to selected blocks, and another order of positions."""

    def change(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.attention, SparseAttention):
            return layer
        return replace(layer, attention=replace(layer.attention, method=method, layout=layout))

    return tuple(replace(segment, layers=tuple(map(change, segment.layers))) for segment in segments)
