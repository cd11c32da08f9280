"""Plots of extraction results, drawn by matplotlib without its global state."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator, PercentFormatter

from shardplan.report.extraction.file_names import short_label
from shardplan.report.extraction.probability_scale import LABELLED, LOWEST, threshold_text

BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#BBBBBB"
"""Colours that differ for colour-blind people too (Okabe and Ito)."""
COLOURS = (BLUE, ORANGE, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("-", "--", ":", "-.")
MARKERS = "osD^vP*X"
SHADES = "Oranges"
MAX_COMPARED_TEXTS = 40
"""Maximum number of texts with their own row in a plot of several models."""
COMPARED_THRESHOLD = "0.1"
"""Threshold of the coverage that a plot of several models shows for each text."""


def draw_text(title: str, plots: Mapping[str, Any], thresholds: Sequence[float], characters: int) -> Figure:
    """Draw a text's histogram of log p_z, its coverage at each threshold, and its strip if it has one.

    Args:
        plots: `histogram`, `curve`, `suffix_curve` and, for a single text, `strip`, as in summary.json.
        thresholds: thresholds of the curves.
        characters: number of characters of the text.
    """
    has_strip = "strip" in plots
    figure = Figure(figsize=(10, 5.4 if has_strip else 3.9), dpi=110, layout="constrained")
    figure.suptitle(short_label(title), parse_math=False)
    grid = figure.add_gridspec(2 if has_strip else 1, 2, height_ratios=[3.4, 1][: 2 if has_strip else 1])
    _draw_histogram(figure.add_subplot(grid[0, 0]), np.array(plots["histogram"]))
    axes = figure.add_subplot(grid[0, 1])
    _draw_curve(axes, thresholds, plots["curve"], label="windows", color=BLUE)
    _draw_curve(axes, thresholds, plots["suffix_curve"], label="suffixes alone", color=ORANGE, linestyle="--")
    _label_curves(axes, "Coverage over thresholds")
    axes.legend(frameon=False, title="covered by")
    if has_strip:
        _draw_strip(figure, figure.add_subplot(grid[1, :]), plots["strip"], characters)
    return figure


def draw_comparison(labels: Sequence[str], curves: Sequence[Sequence[float]], thresholds: Sequence[float],
                    texts: Mapping[str, Sequence[float]]) -> Figure:  # fmt: skip
    """Draw the coverage of several models: of all texts over thresholds, and of each text at one threshold.

    Args:
        labels: names of the models.
        curves: for each model, the covered fraction of all characters at each of `thresholds`.
        texts: text -> for each model, the covered fraction at `COMPARED_THRESHOLD`.
    """
    shown = dict(list(texts.items())[:MAX_COMPARED_TEXTS])
    height = max(4.2, 1.6 + 0.24 * len(shown), 1.6 + 0.24 * len(labels))
    figure = Figure(figsize=(11, height), dpi=110, layout="constrained")
    left, right = figure.subplots(1, 2)
    for i, (label, curve) in enumerate(zip(labels, curves, strict=True)):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "label": _plain(label)}
        dashes = DASHES[i // len(COLOURS) % len(DASHES)]
        _draw_curve(left, thresholds, curve, linestyle=dashes, markevery=(4 * i % 20, 20), **style)
        rows = np.arange(len(shown)) + 0.6 * (
            (i + 0.5) / len(labels) - 0.5
        )  # one beside the other where values are equal
        right.plot([values[i] for values in shown.values()], rows, linestyle="", markersize=5, **style)
    _label_curves(left, "All texts: coverage over thresholds")
    of = f" (the first {len(shown)} of {len(texts)})" if len(shown) < len(texts) else ""
    right.set(
        title=f"Each text{of}: coverage at p_z ≥ {threshold_text(float(COMPARED_THRESHOLD))}",
        xlabel="covered characters",
        xlim=(-0.03, 1.03),
        ylim=(len(shown) - 0.5, -0.5),
    )
    right.set_yticks(range(len(shown)), [short_label(id_, 30) for id_ in shown], parse_math=False)
    right.xaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    right.grid(alpha=0.3)
    figure.legend(
        *left.get_legend_handles_labels(), loc="outside lower center", ncols=min(len(labels), 4), frameon=False
    )
    return figure


def save_figure(figure: Figure, file: Any, format_: str) -> None:
    """Write a figure to a file opened for writing, in a format of matplotlib."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")  # in the name of a text: a box is drawn
        metadata = {"Date": None} if format_ == "svg" else {"CreationDate": None} if format_ == "pdf" else {}
        figure.savefig(file, format=format_, metadata=metadata)


def _draw_histogram(axes: Axes, histogram: np.ndarray) -> None:
    """Draw the number of windows by log p_z; element i of the histogram counts windows from -(i + 1) to -i nats."""
    used = np.flatnonzero(histogram)
    most = int(used[-1]) + 1 if len(used) else 1
    width = max(1, -(-most // 60))
    bins = -(-most // width)
    counts = np.pad(histogram[:most], (0, bins * width - most)).reshape(bins, width).sum(axis=1)
    axes.stairs(counts[::-1], -width * np.arange(bins, -1, -1), fill=True, color=BLUE)
    axes.set(title="Windows by log-probability", xlabel="log p_z (nats)", ylabel="windows")
    axes.set_yscale("log" if counts.any() else "linear")
    axes.set_ylim(0.7, max(10, 6 * counts.max(initial=1)))  # with room for the legend
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(-width * bins - 0.5, 0.5)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=7))
    for p in (1e-3, 0.1):
        axes.axvline(
            np.log(p), color=ORANGE, linewidth=1, linestyle=":" if p < 0.1 else "--", label=f"p_z = {threshold_text(p)}"
        )
    axes.legend(frameon=False, loc="upper left", ncols=2)
    if most == len(histogram):
        axes.text(
            0.02, 0.02, f"leftmost: all below {1 - most}", transform=axes.transAxes, fontsize="small", color="black"
        )


def _draw_curve(axes: Axes, thresholds: Sequence[float], curve: Sequence[float], **style: Any) -> None:
    axes.plot(thresholds, curve, linewidth=1.8, **style)


def _label_curves(axes: Axes, title: str) -> None:
    axes.set(title=title, xlabel="threshold for p_z", ylabel="covered characters", xscale="log")
    axes.set(xlim=(LOWEST, 1), ylim=(-0.02, 1.02))
    axes.set_xticks(LABELLED, [threshold_text(p) for p in LABELLED])
    axes.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    axes.grid(alpha=0.3)


def _draw_strip(figure: Figure, axes: Axes, strip: Sequence[float | None], characters: int) -> None:
    """Draw the largest p_z in each of equal parts of a text; parts without windows are grey."""
    values = np.array([[np.nan if value is None else value for value in strip]])
    image = axes.imshow(
        np.maximum(np.exp(values), LOWEST), cmap=SHADES, norm=LogNorm(LOWEST, 1), aspect="auto",
        extent=(0, characters, 0, 1), interpolation="nearest",
    )  # fmt: skip
    axes.set_facecolor(GREY)
    axes.set(title="Largest p_z along the text", xlabel="characters")
    axes.yaxis.set_major_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar = figure.colorbar(image, ax=axes, pad=0.01)
    bar.set_ticks(LABELLED, labels=[("≤ " if p == LOWEST else "") + threshold_text(p) for p in LABELLED])
    bar.ax.yaxis.set_minor_locator(NullLocator())
    if np.isnan(values).any():
        handles = [Patch(color=GREY, label="in no window")]
        axes.legend(handles=handles, loc="upper right", bbox_to_anchor=(1, 1.35), frameon=False, fontsize="small")


def _plain(label: str) -> str:
    """Escape dollar signs in a legend's label, so that matplotlib reads no formulas."""
    return short_label(label, 40).replace("$", r"\$")
