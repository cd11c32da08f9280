"""The panel of routed experts: how evenly an evaluation's tokens were routed, layer by layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.report.experts import experts_line
from shardplan.report.page.units import Tick, linear_ticks

HEADROOM = 1.05
"""Height of the chart / largest value shown."""
MAX_TICKS = 16
"""Maximum number of layers whose numbers are written under the chart."""


@dataclass(frozen=True)
class LayerBar:
    """The range of loads of a layer's experts, from the least to the largest, in percent of the chart."""

    x: float
    width: float
    top: float
    height: float
    tip: str


@dataclass(frozen=True)
class ExpertsPanel:
    """The loads of experts, as a chart and as rows."""

    summary: str
    bars: list[LayerBar]
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    mean: float
    """Percent of the chart's height at which the mean load is."""
    rows: list[Mapping[str, Any]]
    """`layers` of the summary's section, each with the number of the busiest expert as `busiest` and the entropy of
    equal loads as `max_entropy`."""


def experts_panel(section: Mapping[str, Any]) -> ExpertsPanel:
    """Lay out the section `experts` of a summary with at least one layer."""
    layers = section["layers"]
    top = HEADROOM * max(max(layer["load_max_over_mean"] for layer in layers), 1.0)
    width = 100 / len(layers)
    rows: list[Mapping[str, Any]] = []
    bars: list[LayerBar] = []
    for i, layer in enumerate(layers):
        load = layer["load"]
        busiest = max(range(len(load)), key=load.__getitem__)
        rows.append({**layer, "busiest": busiest, "max_entropy": math.log(len(load))})
        least, most = layer["load_min_over_mean"], layer["load_max_over_mean"]
        tip = f"layer {layer['layer']}: expert {busiest} has {most:.2f} x the mean, the least {least:.2f} x"
        bars.append(LayerBar((i + 0.15) * width, 0.7 * width, 100 - 100 * most / top, 100 * (most - least) / top, tip))
    step = -(-len(layers) // MAX_TICKS)
    ticks = [Tick((i + 0.5) * width, str(layers[i]["layer"])) for i in range(0, len(layers), step)]
    return ExpertsPanel(experts_line(section), bars, ticks, linear_ticks(top), 100 - 100 / top, rows)
