"""The layers of a decoder with Native Sparse Attention, and the method that computes all of them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardplan.decoder.architecture import Architecture
from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse_attention import SparseAttention
from shardplan.decoder.parts.block import LayerConfig
from shardplan.decoder.parts.segments import Segment, number_layers
from shardplan.errors import ConfigError
from shardplan.positions.sequence_order import SequenceOrder


def sparse_attentions(segments: Sequence[Segment]) -> Iterator[SparseAttention]:
    """Yield the attention of each layer with Native Sparse Attention, once for each block of layers.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("nsa-125m", None))
    >>> config.num_layers, [attention.sizes.selected for attention in sparse_attentions(config.segments)]
    (12, [16])
    """
    for segment in segments:
        for layer in segment.layers:
            if isinstance(layer.attention, SparseAttention):
                yield layer.attention


def selected_method(segments: Sequence[Segment]) -> SelectedMethod | None:
    """Return how layers attend to their selected blocks; None if no layer has Native Sparse Attention.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> configs = [DecoderConfig.from_hf_config(read_config(name, None)) for name in ("nsa-125m", "llama-3.1-8b")]
    >>> [selected_method(config.segments) for config in configs]
    [<SelectedMethod.DENSE_MASK: 'dense_mask'>, None]
    """
    return next((attention.method for attention in sparse_attentions(segments)), None)


def position_order(segments: Sequence[Segment]) -> SequenceOrder | None:
    """Return the order of positions that Native Sparse Attention is set to; None if no layer has it.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> position_order(DecoderConfig.from_hf_config(read_config("nsa-125m", None)).segments).value
    'contiguous'
    """
    return next((attention.layout for attention in sparse_attentions(segments)), None)


def methods_by_layer(segments: Sequence[Segment]) -> dict[int, SelectedMethod]:
    """Return index of each layer with Native Sparse Attention -> the method that attends to its selected blocks.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> methods = methods_by_layer(DecoderConfig.from_hf_config(read_config("nsa-125m", None)).segments)
    >>> len(methods), methods[11].value
    (12, 'dense_mask')
    """
    methods: dict[int, SelectedMethod] = {}
    of_segments = number_layers(segments, lambda layer: isinstance(layer.attention, SparseAttention))
    for segment, numbers_of_segment in zip(segments, of_segments, strict=True):
        for attention, numbers in zip(sparse_attentions([segment]), numbers_of_segment, strict=True):
            methods.update((number, attention.method) for number in numbers)
    return dict(sorted(methods.items()))


def check_has_selection(key: str, config: Architecture) -> None:
    """Check that a model has Native Sparse Attention, for a key that turns on its statistics.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("llama-3.1-8b", None))
    >>> check_has_selection("selection_statistics", config)
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: selection_statistics is true, and a llama has no native sparse attention; leave it out

    Raises:
        ConfigError: the model does not have it.
    """
    if selected_method(config.segments) is None:
        raise ConfigError(f"{key} is true, and a {config.family} has no native sparse attention; leave it out")


def with_selected_method(
    segments: Sequence[Segment], method: SelectedMethod, layout: SequenceOrder = SequenceOrder.CONTIGUOUS
) -> tuple[Segment, ...]:
    """Return the segments with `method` for attention to selected blocks, and with `layout` as the order of positions.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> segments = DecoderConfig.from_hf_config(read_config("nsa-125m", None)).segments
    >>> selected_method(segments).value, selected_method(with_selected_method(segments, SelectedMethod.KERNEL)).value
    ('dense_mask', 'kernel')
    """

    def change(layer: LayerConfig) -> LayerConfig:
        if not isinstance(layer.attention, SparseAttention):
            return layer
        return replace(layer, attention=replace(layer.attention, method=method, layout=layout))

    return tuple(replace(segment, layers=tuple(map(change, segment.layers))) for segment in segments)
