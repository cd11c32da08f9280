"""The section `experts` of a summary: one entry for each layer with routed experts."""

from collections.abc import Mapping
from typing import Any

from shardplan.experts.statistics.layer_record import LayerRecord, layer_figures


def describe_experts(records: Mapping[int, LayerRecord], windows: int, all_windows: int) -> dict[str, Any]:
    """Return the section `experts`: numbers of windows, and the index, counts and figures of each layer.

    `shardplan.experts.statistics.layer_record.layer_figures` computes the figures.

    >>> import numpy as np
    >>> record = LayerRecord(*map(np.asarray, ([3, 1], 2, 0.5, 3, 2.0, 0.75, 0, 0)))
    >>> describe_experts({4: record}, windows=8, all_windows=8)["layers"][0]["load"]
    [3, 1]

    Args:
        records: number of a layer -> the record of all steps.
        windows: number of recorded windows.
        all_windows: number of windows of the run; larger than `windows` if the run was once started without statistics.
    """
    layers = []
    for number, record in records.items():
        figures = {name: value.item() for name, value in layer_figures(record).items()}
        layers.append({"layer": number, "tokens": int(record.tokens), "load": record.load.tolist(), **figures})
    return {"windows": windows, "all_windows": all_windows, "layers": layers}
