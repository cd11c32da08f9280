"""A plan as SVG, drawn as the report draws it, in the light or dark scheme of the reader."""

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, FileSystemLoader
from markupsafe import Markup

from shardplan.plan.mapping import mesh_text
from shardplan.plan.plan import Plan
from shardplan.report.page.colours import tile_colour
from shardplan.report.page.labels import short_label
from shardplan.report.page.panels.memory import LiveChart, memory_panel
from shardplan.report.page.panels.torus import (
    ChipLayer,
    Drawing,
    Tiling,
    default_tiling,
    draw_slice,
    mesh_coordinates,
    tilings_of,
)
from shardplan.report.page.units import gib_text
from shardplan.report.templating import environment, template_text

TEMPLATES = Path(__file__).resolve().parent / "templates"
TORUS_WIDTH, MEMORY_WIDTH = 740, 960
MARGIN = 20
LINE = 20
"""Height of a line of text."""
LAYER_GAP, CAPTION = 16, 28
"""Between layers, and above each one for its name."""
PLOT_HEIGHT, PLOT_TOP, PLOT_LEFT = 280, 76, 60
KEY_COLUMNS = 2


@cache
def templates() -> Environment:
    """The templates of the report, and those of these scripts."""
    return environment().overlay(loader=ChoiceLoader([environment().loader, FileSystemLoader(TEMPLATES)]))


def draw_torus(plan: Plan) -> str:
    """Draw the devices of the slice, with the tiles of the largest parameter that is sharded."""
    tilings = tilings_of(plan)
    return _draw_tiles(plan, tilings[default_tiling(tilings)])


def draw_tokens(plan: Plan) -> str:
    """Draw the devices of the slice, with the part of the tokens that each of them has."""
    return _draw_tiles(plan, tilings_of(plan)[-1])


def _draw_tiles(plan: Plan, tiling: Tiling) -> str:
    drawing = draw_slice(plan.hardware.slice, plan.mesh)
    numbers = [tiling.tile(at) for at in mesh_coordinates(plan.mesh)]
    lines = [
        f"{short_label(tiling.name)}: {tiling.tiles} tiles, {tiling.spec},",
        f"on the mesh {mesh_text(plan.mesh)}. Each box is a device, with the number of the tile that it holds.",
        *drawing.dimensions,
    ]
    layers, height = _place_layers(drawing, MARGIN + 38 + LINE * len(lines) + CAPTION)
    return _render(
        "torus.svg", _title(plan), TORUS_WIDTH, height, lines=lines, layers=layers, numbers=numbers,
        colours=[tile_colour(number / max(*numbers, 1)) for number in numbers],
    )  # fmt: skip


def draw_memory(plan: Plan) -> str:
    """Draw what is live over the step, by the estimate."""
    chart = memory_panel(plan, None).charts[0]
    key = list(_place_key(chart, PLOT_TOP + PLOT_HEIGHT + 52))
    return _render(
        "memory.svg", _title(plan), MEMORY_WIDTH, key[-1][-1] + MARGIN, chart=chart, key=key,
        left=PLOT_LEFT, top=PLOT_TOP, plot_width=MEMORY_WIDTH - PLOT_LEFT - MARGIN, plot_height=PLOT_HEIGHT,
    )  # fmt: skip


def _render(template: str, title: str, width: int, height: int, **values: object) -> str:
    style = Markup("").join(template_text(name) for name in ("style.css", "colours.css"))
    style += Markup((TEMPLATES / "picture.css").read_text(encoding="utf-8"))
    return templates().get_template(template).render(
        title=title, width=width, height=height, margin=MARGIN, style=style, **values
    )  # fmt: skip


def _title(plan: Plan) -> str:
    model, kind = plan.model.name.rpartition("/")[2], plan.workload.kind
    return f"{model} on {plan.hardware.slice}: {kind}, {plan.workload.batch} x {plan.workload.position:,} tokens"


def _place_layers(drawing: Drawing, top: int) -> tuple[list[tuple[ChipLayer, int, int]], int]:
    """Place layers in rows; return each with its place, and the height of the picture."""
    widest, tallest = max(each.width for each in drawing.layers), max(each.height for each in drawing.layers)
    most = max(1, (TORUS_WIDTH - 2 * MARGIN + LAYER_GAP) // (widest + LAYER_GAP))
    rows = -(-len(drawing.layers) // most)
    in_a_row = -(-len(drawing.layers) // rows)
    placed = [
        (layer, MARGIN + i % in_a_row * (widest + LAYER_GAP), top + i // in_a_row * (tallest + CAPTION))
        for i, layer in enumerate(drawing.layers)
    ]
    return placed, placed[-1][-1] + tallest + MARGIN


def _place_key(chart: LiveChart, top: int) -> Iterator[tuple[str, str, int, int]]:
    """Yield the kind, the text and the place of each entry of the key, the highest band first."""
    entries = [
        (band.part, f"{band.name} ({gib_text(band.peak) if band.peak else 'nothing'} at the peak)")
        for band in reversed(chart.bands)
    ]
    entries += [(kind, text) for _, kind, text in chart.limits]
    for i, (kind, text) in enumerate(entries):
        row, column = divmod(i, KEY_COLUMNS)
        yield kind, text, PLOT_LEFT + column * (MEMORY_WIDTH - PLOT_LEFT) // KEY_COLUMNS, top + row * LINE
