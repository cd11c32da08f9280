"""Draws the devices of a slice for a notebook, each with a number and its colour."""

from collections.abc import Sequence
from typing import Any

from shardplan.report.page.colours import tile_colour
from shardplan.report.page.panels.torus import Tiling, draw_slice, mesh_coordinates

MAX_DEVICES = 256
"""Maximum number of devices that a notebook draws."""


def draw_tiles(tiling: Tiling, slice_name: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Return the variables of `drawing_short.html` that draw which tile each device holds."""
    numbers = [tiling.tile(at) for at in mesh_coordinates(mesh)]
    meaning = f"its number is that of the tile of {tiling.name} it holds, of {tiling.tiles}."
    return draw_numbers(numbers, slice_name, mesh, meaning)


def draw_numbers(numbers: Sequence[int], slice_name: str, mesh: dict[str, int], meaning: str) -> dict[str, Any]:
    """Return the variables of `drawing_short.html` that draw a number on every device.

    Args:
        numbers: the number of every device of the mesh, in row-major order.
        meaning: description of the numbers.
    """
    return {
        "drawing": draw_slice(slice_name, mesh, MAX_DEVICES),
        "numbers": numbers,
        "colours": [tile_colour(number / max(*numbers, 1)) for number in numbers],
        "meaning": f"Each box is a device; {meaning}",
    }
