"""Names and values of trackers' metrics of layers with routed experts. Imports no JAX."""

from collections.abc import Mapping
from types import ModuleType
from typing import Any

import numpy as np

from shardplan.experts.statistics.layer_record import LayerRecord, expert_loads, layer_figures

MAX_LOADS = 1024
"""Maximum number of experts in all layers whose loads are separate metrics: more make trackers slow."""


def layer_metrics(records: Mapping[int, LayerRecord], xp: ModuleType = np) -> dict[str, Any]:
    """Return the metrics of layers, such as `moe/layer_00/load_max_over_mean`.

    For models with few experts, `moe/layer_00/expert_000_load` is the fraction of all rows that an expert gets.

    >>> record = LayerRecord(*map(np.asarray, ([3, 1], 2, 0.5, 3, 2.0, 0.75, 0, 0)))
    >>> metrics = layer_metrics({0: record})
    >>> metrics["moe/layer_00/load_max_over_mean"].item(), metrics["moe/layer_00/expert_000_load"].item()
    (1.5, 0.75)

    Args:
        records: number of a layer -> its record.
        xp: the module with functions for the arrays of records, `numpy` or `jax.numpy`.
    """
    metrics = {}
    has_loads = sum(len(record.load) for record in records.values()) <= MAX_LOADS
    for number, record in records.items():
        prefix = f"moe/layer_{number:02d}"
        metrics.update({f"{prefix}/{name}": value for name, value in layer_figures(record, xp).items()})
        if has_loads:
            loads = expert_loads(record, xp)
            metrics.update({f"{prefix}/expert_{expert:03d}_load": loads[expert] for expert in range(len(loads))})
    return metrics
