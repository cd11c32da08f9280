"""The panel of memory: a device's live bytes over the step, by the plan's estimate and by the compiler."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardplan.hardware import GIB, parse_slice
from shardplan.plan.file.details import LivePoint
from shardplan.plan.file.sections import MemoryPlan
from shardplan.plan.plan import Plan
from shardplan.report.page.judgement import Judgement
from shardplan.report.page.labels import NO_DETAILS, repeated_runs, short_label
from shardplan.report.page.units import Tick, gib_text, linear_ticks
from shardplan.report.plan.tables import MEMORY_PARTS
from shardplan.verify.verdict import CompiledMemory

NO_VERDICT = (
    "No verdict of the TPU compiler. `verify --json verdicts.json` writes one, "
    "`--verdicts verdicts.json` shows it here."
)
"""Message in place of the compiler's memory."""
STORED = ("parameters", "optimizer")
"""Fields for arrays that are live at every point."""
MIN_WIDTH = 9
"""Minimum width of a repeat with text, in percent of the chart's width."""
HEADROOM = 1.05
"""Height of the chart / largest value shown."""


@dataclass(frozen=True)
class MemoryBand:
    """The memory of one role of buffers over the step, as a path of the chart, x and y from 0 to 100."""

    part: str
    name: str
    path: str
    peak: int
    """Bytes per device at the peak of the step."""


@dataclass(frozen=True)
class PointMark:
    """A point of the step, with the text shown when the pointer is there."""

    x: float
    width: float
    tip: str


@dataclass(frozen=True)
class LoopRepeat:
    """Points of the step that a loop runs several times."""

    x: float
    width: float
    text: str

    @classmethod
    def over(cls, start: float, end: float, times: int) -> "LoopRepeat":
        """Make the repeat of the points from `start` to `end`, in percent of the width; if narrow, it has no text."""
        return cls(start, end - start, f"{times} times" if end - start >= MIN_WIDTH else "")


@dataclass(frozen=True)
class LiveChart:
    """Live bytes over the step."""

    title: str
    bands: list[MemoryBand]
    marks: list[PointMark]
    repeats: list[LoopRepeat]
    peak_x: float
    """Percent of the width at which the peak is."""
    ticks: list[Tick]
    limits: list[tuple[float, str, str]]
    """Horizontal lines: (percent of the height, kind of line, text)."""


@dataclass(frozen=True)
class MemoryPanel:
    """The memory of a device."""

    charts: list[LiveChart]
    parts: list[tuple[str, str, int, float]]
    """Field, name, bytes at the peak, and percent of available memory, for parts of more than 0 bytes."""
    compiled: CompiledMemory | None
    missing: list[str]
    """Text on what cannot be drawn, and why."""


def memory_panel(plan: Plan, judgement: Judgement | None) -> MemoryPanel:
    """Lay out the memory of a plan."""
    memory, compiled = plan.memory, judgement.memory if judgement else None
    top = HEADROOM * max(memory.available, memory.peak, compiled.peak if compiled else 0)
    limits = list(_limits(memory, top))
    charts, missing = [], []
    if plan.details is not None and plan.details.live:
        live = plan.details.live
        peak = max(sum(point.bytes.values()) for point in live)
        title = f"Estimate: what is live over the step; its peak is {gib_text(peak)}"
        charts.append(_estimated_chart(title, live, top, limits))
        changing = [replace(point, bytes={k: v for k, v in point.bytes.items() if k not in STORED}) for point in live]
        most = max(sum(point.bytes.values()) for point in changing)
        if 0 < most < peak / 2:  # else the first chart shows well enough what comes and goes
            title = f"Estimate, without what is stored: at most {gib_text(most)} come and go"
            charts.append(_estimated_chart(title, changing, HEADROOM * most, []))
    else:
        missing.append(NO_DETAILS)
    if compiled is not None and compiled.live:
        charts.append(_compiled_chart(compiled, top, limits[:1]))  # the other one is that of estimates
    elif judgement is None and not parse_slice(plan.hardware.slice).is_cpu:
        missing.append(NO_VERDICT)
    elif judgement is not None:
        missing.append("This verdict does not say what the compiler keeps in memory when.")
    return MemoryPanel(
        charts=charts,
        parts=[
            (part, name, getattr(memory, part), 100 * getattr(memory, part) / memory.available)
            for part, name in MEMORY_PARTS.items()
            if getattr(memory, part)
        ],
        compiled=compiled,
        missing=missing,
    )


def _limits(memory: MemoryPlan, top: float) -> Iterator[tuple[float, str, str]]:
    yield 100 - 100 * memory.available / top, "available", f"memory of a device, {gib_text(memory.available)}"
    if memory.reserved:
        text = f"usable: less {gib_text(memory.reserved)} for the error of the estimate, {gib_text(memory.usable)}"
        yield 100 - 100 * memory.usable / top, "usable", text


def _estimated_chart(title: str, live: list[LivePoint], top: float, limits: list[tuple[float, str, str]]) -> LiveChart:
    """Draw the estimate by part of memory; all points have the same width."""
    totals = [sum(point.bytes.values()) for point in live]
    peak = max(range(len(live)), key=totals.__getitem__)
    below = [0.0] * len(live)
    bands = []
    width = 100 / len(live)
    for part, name in MEMORY_PARTS.items():
        sizes = [point.bytes.get(part, 0) for point in live]
        if not any(sizes):
            continue
        above = [low + size for low, size in zip(below, sizes, strict=True)]
        bands.append(MemoryBand(part, name, _band_path(below, above, width, top), sizes[peak]))
        below = above
    marks = [
        PointMark(i * width, width, f"{short_label(point.label)}: {gib_text(total)}\n" + _parts_text(point))
        for i, (point, total) in enumerate(zip(live, totals, strict=True))
    ]
    repeats = [
        LoopRepeat.over(first * width, (last + 1) * width, executions)
        for first, last, executions in repeated_runs([point.executions for point in live])
    ]
    return LiveChart(title, bands, marks, repeats, (peak + 0.5) * width, linear_ticks(top / GIB), limits)


def _parts_text(point: LivePoint) -> str:
    return "\n".join(
        f"{name} {gib_text(point.bytes[part])}" for part, name in MEMORY_PARTS.items() if part in point.bytes
    )


def _compiled_chart(memory: CompiledMemory, top: float, limits: list[tuple[float, str, str]]) -> LiveChart:
    """Draw the compiler's live ranges: arguments of the program, and buffers that it makes."""
    width = 100 / len(memory.live)
    zero = [0.0] * len(memory.live)
    # a verdict has sizes without owners; the arguments of a program are there throughout
    arguments = [float(min(memory.arguments, each.bytes)) for each in memory.live]
    totals = [float(each.bytes) for each in memory.live]
    peak = max(range(len(totals)), key=totals.__getitem__)
    stored, temporary = _band_path(zero, arguments, width, top), _band_path(arguments, totals, width, top)
    bands = [
        MemoryBand("parameters", "arguments of the program", stored, int(arguments[peak])),
        MemoryBand("activations", "temporaries", temporary, int(totals[peak] - arguments[peak])),
    ]
    marks = [PointMark(i * width, width, f"{each.op}: {gib_text(each.bytes)}") for i, each in enumerate(memory.live)]
    title = f"TPU compiler: what is live in the compiled program; its peak with padding is {gib_text(memory.peak)}"
    return LiveChart(title, bands, marks, [], (peak + 0.5) * width, linear_ticks(top / GIB), limits)


def _band_path(below: list[float], above: list[float], width: float, top: float) -> str:
    """Return the outline of a band with steps, as an SVG path."""
    up = " ".join(f"H{i * width:.2f} V{100 - 100 * y / top:.2f} H{(i + 1) * width:.2f}" for i, y in enumerate(above))
    down = " ".join(f"V{100 - 100 * below[i] / top:.2f} H{i * width:.2f}" for i in range(len(below) - 1, -1, -1))
    return f"M0 {100 - 100 * above[0] / top:.2f} {up} {down}Z"
