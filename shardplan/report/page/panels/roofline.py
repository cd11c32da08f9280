"""The roofline of contractions: the FLOP/s that each reaches, against the limit by its FLOPs per byte."""

from dataclasses import dataclass

from shardplan.hardware import parse_slice
from shardplan.plan.plan import Plan
from shardplan.report.page.labels import NO_DETAILS, join_with_counts, short_label
from shardplan.report.page.units import LogAxis, Tick, rate_text, seconds_text

MARGIN = 2.0
"""Factor by which the axes extend beyond the smallest and largest points."""
RADII = (8, 14)
"""Radius, in pixels, of the points with the shortest and with the longest time."""
NEAR = (3.0, 8.0)
"""Percent of the chart's width and height within which the numbers of two points would overlap."""


@dataclass(frozen=True)
class Contraction:
    """One matmul of the step."""

    label: str
    kind: str
    intensity: float
    """FLOPs per byte of HBM."""
    rate: float
    """FLOP/s that one device reaches."""
    part_of_roof: float
    seconds: float


@dataclass(frozen=True)
class RooflinePoint:
    """Contractions at one point of the chart; x and y in percent."""

    x: float
    y: float
    radius: float
    kind: str
    label: str
    tip: str


@dataclass(frozen=True)
class RooflinePanel:
    """The contractions, and the roof of a device."""

    contractions: list[Contraction]
    """Contractions, the longest first."""
    points: list[RooflinePoint]
    roof: list[tuple[float, float]]
    """Corners of the roof, in percent of the chart."""
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    peak: str
    bandwidth: str
    ridge: str
    """FLOPs per byte above which peak FLOP/s, rather than bandwidth, is the limit."""
    missing: str


def roofline_panel(plan: Plan) -> RooflinePanel:
    """Place the contractions of a plan's step under the roof."""
    generation = parse_slice(plan.hardware.slice).generation
    peak, bandwidth = generation.flops, generation.hbm_bandwidth
    ridge = peak / bandwidth
    contractions = _contractions(plan, peak, bandwidth)
    x_axis = LogAxis(
        min([ridge, *(c.intensity for c in contractions)]) / MARGIN,
        max([ridge, *(c.intensity for c in contractions)]) * MARGIN,
    )
    y_axis = LogAxis(min([peak / 4, *(c.rate for c in contractions)]) / MARGIN, peak * 1.4)
    corners = [x_axis.low, ridge, x_axis.high]
    return RooflinePanel(
        contractions=contractions,
        points=_points(contractions, x_axis, y_axis),
        roof=[(x_axis.at(x), 100 - y_axis.at(min(peak, x * bandwidth))) for x in corners],
        x_ticks=x_axis.ticks(),
        y_ticks=y_axis.ticks(unit=1e12),
        peak=rate_text(peak),
        bandwidth=f"{bandwidth / 1e9:,.0f} GB/s",
        ridge=f"{ridge:,.0f}",
        missing="" if contractions else NO_DETAILS,
    )


def _contractions(plan: Plan, peak: float, bandwidth: float) -> list[Contraction]:
    contractions = []
    for task in plan.details.tasks if plan.details is not None else []:
        if task.flops and task.hbm_bytes and task.compute_seconds:
            intensity, rate = task.flops / task.hbm_bytes, task.flops / task.compute_seconds
            part = rate / min(peak, intensity * bandwidth)
            label = short_label(task.label)
            contractions.append(Contraction(label, task.kind, intensity, rate, part, task.compute_seconds))
    return sorted(contractions, key=lambda each: -each.seconds)


def _points(contractions: list[Contraction], x_axis: LogAxis, y_axis: LogAxis) -> list[RooflinePoint]:
    """Merge contractions close to a longer one into its point, and add up their times."""
    places: dict[tuple[float, float, str], list[Contraction]] = {}
    for each in contractions:
        place = x_axis.at(each.intensity), 100 - y_axis.at(each.rate), each.kind
        places.setdefault(next((other for other in places if _is_near(place, other)), place), []).append(each)
    seconds = {place: sum(each.seconds for each in group) for place, group in places.items()}
    longest = max(seconds.values(), default=1.0)
    return [
        RooflinePoint(
            x, y, RADII[0] + (RADII[1] - RADII[0]) * (seconds[x, y, kind] / longest) ** 0.5, kind,
            join_with_counts(each.label for each in group), "\n".join(map(_text, group)),
        )
        for (x, y, kind), group in places.items()
    ]  # fmt: skip


def _is_near(place: tuple[float, float, str], other: tuple[float, float, str]) -> bool:
    """Return whether two points of one kind would overlap on the chart."""
    (x, y, kind), (other_x, other_y, other_kind) = place, other
    return kind == other_kind and abs(x - other_x) < NEAR[0] and abs(y - other_y) < NEAR[1]


def _text(each: Contraction) -> str:
    return (
        f"{each.label}: {each.intensity:,.0f} FLOPs per byte, {rate_text(each.rate)}, {each.part_of_roof:.0%} of the "
        f"roof, {seconds_text(each.seconds)} a step"
    )
