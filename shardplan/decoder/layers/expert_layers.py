"""Assigns indices to the layers of a decoder that have routed experts, and maps them to records and metrics."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from levanter.metrics import Metric, ReductionType

from shardplan.decoder.parts.mlp.experts import ExpertsConfig
from shardplan.decoder.parts.segments import Segment, number_layers
from shardplan.experts.statistics.layer_record import LayerRecord
from shardplan.experts.statistics.metrics import layer_metrics

REDUCTIONS = {
    "buffer_use": ReductionType.MAX, "overflow_rows": ReductionType.SUM, "further_rounds": ReductionType.SUM,
}  # fmt: skip
"""Metric of a layer -> how Levanter's Trainer reduces it over microbatches; it averages all others."""


def expert_layers(segments: Sequence[Segment]) -> list[list[range]]:
    """Return the indices of layers with experts: per segment, one range for each such layer of its block.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("deepseek-v2-lite", None))
    >>> expert_layers(config.segments)
    [[], [range(1, 27)]]
    """
    return number_layers(segments, lambda layer: isinstance(layer.mlp, ExpertsConfig))


def has_experts(segments: Sequence[Segment]) -> bool:
    """Return whether any layer has routed experts.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> configs = [DecoderConfig.from_hf_config(read_config(name, None)) for name in ("llama-3.1-8b", "olmoe-1b-7b")]
    >>> [has_experts(config.segments) for config in configs]
    [False, True]
    """
    return any(expert_layers(segments))


def has_corrections(segments: Sequence[Segment]) -> bool:
    """Return whether all routers have score corrections, by which training balances the load of experts.

    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> configs = [DecoderConfig.from_hf_config(read_config(name, None)) for name in ("mixtral-8x7b", "moonlight-16b")]
    >>> [has_corrections(config.segments) for config in configs]
    [False, True]
    """
    routed = [layer.mlp for segment in segments for layer in segment.layers if isinstance(layer.mlp, ExpertsConfig)]
    return all(mlp.router.has_correction for mlp in routed)


def records_by_layer(segments: Sequence[Segment], records: Sequence[Sequence[LayerRecord]]) -> dict[int, LayerRecord]:
    """Return index of each layer with experts -> its record.

    >>> import numpy as np
    >>> from shardplan.decoder.config import DecoderConfig
    >>> from shardplan.model.huggingface.hf_config import read_config
    >>> config = DecoderConfig.from_hf_config(read_config("deepseek-v2-lite", None))
    >>> records = records_by_layer(config.segments, [(), (LayerRecord(*[np.arange(26)] * 8),)])
    >>> list(records)[:3], records[26].tokens.item()
    ([1, 2, 3], 25)

    Args:
        records: `RoutingRecording.segments`, of a forward pass.
    """
    by_layer = {}
    for numbers_of_segment, segment_records in zip(expert_layers(segments), records, strict=True):
        for numbers, stacked in zip(numbers_of_segment, segment_records, strict=True):
            for repetition, number in enumerate(numbers):
                by_layer[number] = LayerRecord(*(array[repetition] for array in stacked))
    return dict(sorted(by_layer.items()))


def training_metrics(segments: Sequence[Segment], records: Sequence[Sequence[LayerRecord]]) -> dict[str, Any]:
    """Return the metrics of layers with experts, as a loss function returns them to Levanter's Trainer.

    Args:
        records: as for `records_by_layer`.
    """
    values = layer_metrics(records_by_layer(segments, records), jnp)
    metrics = {}
    for name, value in values.items():
        reduction = REDUCTIONS.get(name.rpartition("/")[2], ReductionType.MEAN)
        metrics[name] = Metric.from_value(jax.lax.stop_gradient(jnp.asarray(value, jnp.float32)), reduction)
    return metrics
