"""A plan or a verdict in a notebook: whether it fits, its mesh on the torus, and a bar of its memory."""

from collections.abc import Mapping
from dataclasses import dataclass

from shardplan.hardware import GIB
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.page.memory import PARTS
from shardplan.report.page.torus import Drawing, draw_slice, mesh_coordinates, most_telling, tilings_of
from shardplan.report.page.units import gib_text, seconds_text
from shardplan.report.summary import speed_text
from shardplan.report.templating import environment
from shardplan.report.verdicts import reason_text
from shardplan.verify.verdict import Verdict

MAX_DEVICES = 256
"""Devices that a notebook draws."""
COLOURS = {
    "parameters": "#0072b2", "optimizer": "#56b4e9", "gradients": "#d55e00", "cast_parameters": "#8c8c8c",
    "gathered_weights": "#e69f00", "activations": "#009e73", "logits": "#cc79a7", "arguments": "#0072b2",
    "temporaries": "#009e73", "output": "#e69f00",
}  # fmt: skip
"""Part of memory -> colour, the same as in the report."""
DARK, LIGHT = (0, 34, 78), (254, 232, 56)
"""Colours of the first and of the last tile."""


@dataclass(frozen=True)
class Part:
    """A stretch of the memory bar."""

    name: str
    colour: str
    percent: float
    size: str


def plan_html(plan: Plan) -> str:
    """Return a plan as HTML for a notebook, without links and scripts."""
    memory, tilings = plan.memory, tilings_of(plan)
    tiling = tilings[most_telling(tilings)]
    numbers = [tiling.tile(at) for at in mesh_coordinates(plan.mesh)]
    parts = {name: (part, getattr(memory, part)) for part, name in PARTS.items()}
    fits = "fits" if memory.fits else "does not fit"
    return _render(
        f"{plan.model.name} {fits} on {plan.hardware.slice}",
        memory.fits,
        [speed_text(plan), f"mesh {mesh_text(plan.mesh)}"],
        draw_slice(plan.hardware.slice, plan.mesh, MAX_DEVICES),
        numbers,
        f"Each square is a chip; its number is that of the tile of {tiling.name} it holds, of {tiling.tiles}.",
        parts,
        memory.peak,
        memory.available,
    )


def verdict_html(verdict: Verdict) -> str:
    """Return a verdict as HTML for a notebook, without links and scripts."""
    memory, time = verdict.memory, verdict.time
    axis = max(verdict.mesh, key=verdict.mesh.__getitem__)
    lines = [f"mesh {mesh_text(verdict.mesh)}"]
    if time is not None:
        lines.insert(0, f"{seconds_text(time.step_seconds)} a step, MFU {time.mfu:.1%}, by the TPU compiler")
    if verdict.reason is not None:
        lines.append(reason_text(verdict.reason))
    names = ("arguments", "temporaries", "output") if memory is not None else ()
    return _render(
        f"{verdict.program} on {verdict.slice}: {verdict.outcome}",
        verdict.fits,
        lines,
        draw_slice(verdict.slice, verdict.mesh, MAX_DEVICES),
        [at[axis] for at in mesh_coordinates(verdict.mesh)],
        f"Each square is a chip; its number is its coordinate on {axis}.",
        {name: (name, getattr(memory, name)) for name in names},
        memory.peak if memory is not None else 0,
        memory.available if memory is not None else 0,
    )


def _render(
    title: str, fits: bool, lines: list[str], drawing: Drawing, numbers: list[int], meaning: str,
    parts: Mapping[str, tuple[str, int]], peak: int, available: int,
) -> str:  # fmt: skip
    """Render the template.

    Args:
        numbers: of every device of the mesh.
        parts: name -> field and bytes per device.
        peak: bytes per device.
        available: bytes of a device; 0 if no memory is known.
    """
    full = max(available, sum(size for _, size in parts.values()), 1)
    return (
        environment()
        .get_template("plan_short.html")
        .render(
            title=title,
            fits=fits,
            lines=lines,
            drawing=drawing,
            numbers=numbers,
            colours=[tile_colour(number / max(*numbers, 1)) for number in numbers],
            meaning=meaning,
            parts=[
                Part(name, COLOURS[field], 100 * size / full, gib_text(size))
                for name, (field, size) in parts.items()
                if size
            ],
            memory=f"{peak / GIB:.2f} of {available / GIB:.2f} GiB per device" if available else "",
        )
    )


def tile_colour(part: float) -> tuple[str, str]:
    """The colour of a tile, and that of text on it; `part` goes from 0 for the first tile to 1 for the last."""
    red, green, blue = (round(low + part * (high - low)) for low, high in zip(DARK, LIGHT, strict=True))
    return f"rgb({red},{green},{blue})", "#000" if part > 0.5 else "#fff"
