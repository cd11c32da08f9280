"""The devices of a slice in a notebook, each with a number and its colour."""

from collections.abc import Sequence
from typing import Any

from shardplan.hardware import parse_slice
from shardplan.report.page.torus import Tiling, draw_slice, mesh_coordinates

MAX_DEVICES = 256
"""Devices that a notebook draws."""
DARK, LIGHT = (0, 34, 78), (254, 232, 56)
"""Colours of the first and of the last number."""


def draw_tiles(tiling: Tiling, slice_name: str, mesh: dict[str, int]) -> dict[str, Any]:
    """Return the variables of `drawing_short.html` that draw which tile each device holds."""
    numbers = [tiling.tile(at) for at in mesh_coordinates(mesh)]
    meaning = f"its number is that of the tile of {tiling.name} it holds, of {tiling.tiles}."
    return draw_numbers(numbers, slice_name, mesh, meaning)


def draw_numbers(numbers: Sequence[int], slice_name: str, mesh: dict[str, int], meaning: str) -> dict[str, Any]:
    """Return the variables of `drawing_short.html` that draw a number on every device.

    Args:
        numbers: of every device of the mesh, in row-major order.
        meaning: what the number is.
    """
    device = "device" if parse_slice(slice_name).is_cpu else "chip"
    return {
        "drawing": draw_slice(slice_name, mesh, MAX_DEVICES),
        "numbers": numbers,
        "colours": [tile_colour(number / max(*numbers, 1)) for number in numbers],
        "meaning": f"Each square is a {device}; {meaning}",
    }


def tile_colour(part: float) -> tuple[str, str]:
    """The colour of a tile, and that of text on it; `part` goes from 0 for the first tile to 1 for the last."""
    red, green, blue = (round(low + part * (high - low)) for low, high in zip(DARK, LIGHT, strict=True))
    return f"rgb({red},{green},{blue})", "#000" if part > 0.5 else "#fff"
