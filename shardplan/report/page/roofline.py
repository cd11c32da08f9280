"""The roofline of contractions: the FLOP/s that each reaches, against what its FLOPs per byte allow."""

from dataclasses import dataclass

from shardplan.hardware import parse_slice
from shardplan.plan.plan import Plan
from shardplan.report.page.labels import short_label
from shardplan.report.page.units import LogAxis, Tick, rate_text, seconds_text

MARGIN = 2.0
"""Factor of free space around the points."""


@dataclass(frozen=True)
class Contraction:
    """One matmul of the step on the chart."""

    x: float
    y: float
    radius: float
    kind: str
    tip: str
    label: str
    intensity: float
    """FLOPs per byte of HBM."""
    rate: float
    """FLOP/s that a device reaches."""
    part_of_roof: float
    seconds: float


@dataclass(frozen=True)
class RooflinePanel:
    """Contractions under the roof of a device."""

    contractions: list[Contraction]
    roof: list[tuple[float, float]]
    """Corners of the roof."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    peak: str
    bandwidth: str
    ridge: str
    """FLOPs per byte above which the peak is the limit."""
    missing: str


def roofline_panel(plan: Plan) -> RooflinePanel:
    """Place the contractions of a plan's step under the roof."""
    generation = parse_slice(plan.hardware.slice).generation
    peak, bandwidth = generation.flops, generation.hbm_bandwidth
    ridge = peak / bandwidth
    tasks = [
        task for task in (plan.details.tasks if plan.details else []) if task.flops and task.hbm_bytes and task.compute_seconds
    ]
    intensities = [task.flops / task.hbm_bytes for task in tasks]
    rates = [task.flops / task.compute_seconds for task in tasks]
    x_axis = LogAxis(min([ridge, *intensities]) / MARGIN, max([ridge, *intensities]) * MARGIN)
    y_axis = LogAxis(min([peak / 10, *rates]) / MARGIN, max([peak, *rates]) * 1.3)
    longest = max((task.compute_seconds for task in tasks), default=1.0)
    contractions = []
    for task, intensity, rate in zip(tasks, intensities, rates, strict=True):
        roof = min(peak, intensity * bandwidth)
        label = short_label(task.label)
        contractions.append(
            Contraction(
                x=x_axis.at(intensity),
                y=100 - y_axis.at(rate),
                radius=4 + 8 * (task.compute_seconds / longest) ** 0.5,
                kind=task.kind,
                tip=f"{label}: {intensity:,.0f} FLOPs per byte, {rate_text(rate)}, {rate / roof:.0%} of the roof, "
                f"{seconds_text(task.compute_seconds)} a step",
                label=label,
                intensity=intensity,
                rate=rate,
                part_of_roof=rate / roof,
                seconds=task.compute_seconds,
            )
        )
    corners = [x_axis.low, min(max(ridge, x_axis.low), x_axis.high), x_axis.high]
    return RooflinePanel(
        contractions=sorted(contractions, key=lambda each: -each.seconds),
        roof=[(x_axis.at(x), 100 - y_axis.at(min(peak, x * bandwidth))) for x in corners],
        x_ticks=x_axis.ticks(),
        y_ticks=[Tick(each.at, f"{float(each.text.replace(',', '')) / 1e12:,.4g}") for each in y_axis.ticks()],
        peak=rate_text(peak),
        bandwidth=f"{bandwidth / 1e9:,.0f} GB/s",
        ridge=f"{ridge:,.0f}",
        missing=""
        if tasks
        else "This Plan was written by an older version: it does not say what its contractions compute. Plan again.",
    )
