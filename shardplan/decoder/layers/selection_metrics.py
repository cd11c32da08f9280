"""The metrics of layers with Native Sparse Attention, as a loss function returns them to Levanter's Trainer."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from levanter.metrics import Metric, ReductionType

from shardplan.decoder.layers.sparse_layers import sparse_attentions
from shardplan.decoder.parts.attention.sparse.statistics import SelectionSums, traced_figures
from shardplan.decoder.parts.attention.sparse_attention import SparseAttention
from shardplan.decoder.parts.segments import Segment, number_layers

PREFIX = "nsa"
MAX_LOADS = 1024
"""Maximum number of blocks in all layers whose loads are separate metrics: more make trackers slow."""
REDUCTIONS = {"rows": ReductionType.SUM, "k_max": ReductionType.MAX}
"""Figure -> its reduction over layers, and over microbatches by Levanter's Trainer; all others are means."""


def selection_metrics(segments: Sequence[Segment], records: Sequence[Sequence[SelectionSums]]) -> dict[str, Metric]:
    """Return metrics of each layer, such as `nsa/layer_00/k_mean`, and of all layers, such as `nsa/k_mean`.

    For short sequences, `nsa/layer_00/block_000_load` is the fraction of rows that select a block.

    Args:
        records: `SelectionRecording.segments`, of a forward pass.
    """
    values: dict[str, jax.Array] = {}
    by_layer = _figures_by_layer(segments, records)
    has_loads = sum(len(figures["load"]) for figures in by_layer.values()) <= MAX_LOADS
    together: dict[str, list[jax.Array]] = {}
    for number, figures in by_layer.items():
        prefix = f"{PREFIX}/layer_{number:02d}"
        loads = figures.pop("load")  # an array; every other figure is one number
        for name, value in figures.items():
            values[f"{prefix}/{name}"] = value
            together.setdefault(name, []).append(value)
        if has_loads:
            values.update((f"{prefix}/block_{block:03d}_load", load) for block, load in enumerate(loads))
    for name, of_layers in together.items():
        values[f"{PREFIX}/{name}"] = _join(jnp.stack(of_layers), _reduction(name))
    metrics = {}
    for name, value in values.items():
        number = jax.lax.stop_gradient(jnp.asarray(value, jnp.float32))
        metrics[name] = Metric.from_value(number, _reduction(name.rpartition("/")[2]))
    return metrics


def _figures_by_layer(
    segments: Sequence[Segment], records: Sequence[Sequence[SelectionSums]]
) -> dict[int, dict[str, jax.Array]]:
    """Return index of each layer with Native Sparse Attention -> its statistics."""
    config = next(sparse_attentions(segments)).sizes  # config.json gives all layers the same
    by_layer = {}
    of_segments = number_layers(segments, lambda layer: isinstance(layer.attention, SparseAttention))
    for numbers_of_segment, sums_of_segment in zip(of_segments, records, strict=True):
        for numbers, stacked in zip(numbers_of_segment, sums_of_segment, strict=True):
            for repetition, number in enumerate(numbers):
                sums = SelectionSums(*(array[repetition] for array in stacked))
                by_layer[number] = traced_figures(config, sums)
    return dict(sorted(by_layer.items()))


def _join(of_layers: jax.Array, reduction: ReductionType) -> jax.Array:
    """Combine the statistics of all layers into one set, for example by their mean."""
    match reduction:
        case ReductionType.SUM:
            return of_layers.sum()
        case ReductionType.MAX:
            return of_layers.max()
        case _:
            return of_layers.mean()


def _reduction(figure: str) -> ReductionType:
    return REDUCTIONS.get(figure, ReductionType.MEAN)
