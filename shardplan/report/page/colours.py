"""The colours of tiles and coordinates on the torus."""

SCALE = [(0, 34, 78), (53, 69, 108), (102, 105, 112), (148, 142, 119), (200, 184, 102), (254, 232, 56)]
"""Red, green and blue at equally spaced numbers: from dark blue to yellow, distinguishable without red and green."""
BRIGHT = 130
"""Brightness of a colour above which text on it is black."""


def tile_colour(part: float) -> tuple[str, str]:
    """Return the colours of a tile and of text on it; `part` is 0 for the first tile and 1 for the last."""
    at = part * (len(SCALE) - 1)
    index = min(int(at), len(SCALE) - 2)
    pairs = zip(SCALE[index], SCALE[index + 1], strict=True)
    red, green, blue = (round(low + (at - index) * (high - low)) for low, high in pairs)
    brightness = 0.3 * red + 0.59 * green + 0.11 * blue
    return f"rgb({red},{green},{blue})", "#000" if brightness > BRIGHT else "#fff"
