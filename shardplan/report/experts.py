"""Summarizes the use of experts in one line: the load of the busiest, and whether rows overflowed."""

from collections.abc import Mapping
from typing import Any


def experts_line(section: Mapping[str, Any]) -> str:
    """Return the line that an evaluation prints about its experts.

    >>> layers = [{"layer": 17, "load_max_over_mean": 1.43, "overflow_rows": 0, "further_rounds": 0}]
    >>> experts_line({"windows": 8, "all_windows": 8, "layers": layers})
    'experts: busiest 1.43 x mean (layer 17), no overflow'

    Args:
        section: the section `experts` of a summary.
    """
    layers = section["layers"]
    if not layers:
        return "experts: no statistics, as all windows were computed without"
    busiest = max(layers, key=lambda layer: layer["load_max_over_mean"])
    load, number = busiest["load_max_over_mean"], busiest["layer"]
    line = f"experts: busiest {load:.2f} x mean (layer {number}), {_overflow(layers)}"
    windows, all_windows = section["windows"], section["all_windows"]
    return line if windows == all_windows else f"{line}; of {windows:,} of {all_windows:,} windows"


def _overflow(layers: list[Mapping[str, Any]]) -> str:
    over = [layer for layer in layers if layer["overflow_rows"]]
    if not over:
        return "no overflow"
    rows = sum(layer["overflow_rows"] for layer in over)
    rounds = sum(layer["further_rounds"] for layer in over)
    most = max(over, key=lambda layer: layer["overflow_rows"])
    return f"{rows:,} rows beyond buffers in {rounds:,} further rounds (of {len(over)} layers, most in {most['layer']})"
