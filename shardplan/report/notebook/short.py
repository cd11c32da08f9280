"""A plan or a verdict in a notebook: whether it fits, its mesh on the torus, and a bar of its memory."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shardplan.hardware import GIB
from shardplan.plan.file.sections import MemoryVerdict
from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.notebook.drawing import draw_numbers, draw_tiles
from shardplan.report.page.panels.torus import default_tiling, mesh_coordinates, tilings_of
from shardplan.report.page.units import gib_text, seconds_text
from shardplan.report.plan.summary import speed_text
from shardplan.report.plan.tables import MEMORY_PARTS
from shardplan.report.plan.verdicts import reason_text
from shardplan.report.templating import environment
from shardplan.verify.verdict import Verdict

COLOURS = {
    "parameters": "#0072b2", "optimizer": "#56b4e9", "gradients": "#d55e00", "cast_parameters": "#8c8c8c",
    "gathered_weights": "#e69f00", "activations": "#009e73", "logits": "#cc79a7", "arguments": "#0072b2",
    "temporaries": "#009e73", "output": "#e69f00",
}  # fmt: skip
"""Part of memory -> its colour, the same as in the report."""


@dataclass(frozen=True)
class BarSegment:
    """A stretch of the memory bar."""

    name: str
    colour: str
    percent: float
    size: str


def plan_html(plan: Plan) -> str:
    """Return a plan as HTML for a notebook, without links and scripts."""
    memory, tilings = plan.memory, tilings_of(plan)
    tiling = tilings[default_tiling(tilings)]
    parts = {name: (part, getattr(memory, part)) for part, name in MEMORY_PARTS.items()}
    fits = "fits" if memory.fits else "does not fit"
    return _render(
        f"{plan.model.name} {fits} on {plan.hardware.slice}",
        memory.fits,
        [
            speed_text(plan),
            f"mesh {mesh_text(plan.mesh)}",
            _memory_text(memory.verdict),
        ],
        draw_tiles(tiling, plan.hardware.slice, plan.mesh),
        parts,
        memory.available,
    )


def verdict_html(verdict: Verdict) -> str:
    """Return a verdict as HTML for a notebook, without links and scripts."""
    memory = verdict.memory
    axis = max(verdict.mesh, key=verdict.mesh.__getitem__)
    title, *lines = verdict_lines(verdict)
    names = ("arguments", "temporaries", "output") if memory is not None else ()
    return _render(
        title,
        verdict.fits,
        lines,
        draw_numbers(
            [at[axis] for at in mesh_coordinates(verdict.mesh)],
            verdict.slice,
            verdict.mesh,
            f"its number is its coordinate on {axis}.",
        ),
        {name: (name, getattr(memory, name)) for name in names},
        memory.available if memory is not None else 0,
    )


def verdict_lines(verdict: Verdict) -> list[str]:
    """Describe a verdict: the outcome, the time of a step, the mesh, arguments against it, and the memory."""
    memory, time = verdict.memory, verdict.time
    lines = [f"{verdict.program} on {verdict.slice}: {verdict.outcome}"]
    if time is not None:
        # the assembly of a model has no FLOPs that the model needs
        mfu = f"MFU {time.mfu:.1%}, " if time.model_flops else ""
        lines.append(f"{seconds_text(time.step_seconds)} a step, {mfu}by the TPU compiler")
    lines.append(f"mesh {mesh_text(verdict.mesh)}")
    if verdict.reason is not None:
        lines.append(reason_text(verdict.reason))
    if memory is not None:
        lines.append(_memory_text(MemoryVerdict(verdict.fits, memory.peak, memory.available)))
    return lines


def _render(
    title: str, fits: bool, lines: list[str], drawing: dict[str, Any], parts: Mapping[str, tuple[str, int]],
    available: int,
) -> str:  # fmt: skip
    """Render the template of a plan or a verdict.

    Args:
        drawing: the drawing of the slice.
        parts: name -> field and bytes per device.
        available: bytes of a device's memory; 0 if unknown.
    """
    full = max(available, sum(size for _, size in parts.values()), 1)
    return (
        environment()
        .get_template("plan_short.html")
        .render(
            title=title,
            fits=fits,
            lines=lines,
            parts=[
                BarSegment(name, COLOURS[field], 100 * size / full, gib_text(size))
                for name, (field, size) in parts.items()
                if size
            ],
            **drawing,
        )
    )


def _memory_text(memory: MemoryVerdict) -> str:
    return f"{memory.bytes / GIB:.2f} of {memory.limit / GIB:.2f} GiB {memory.place}"
