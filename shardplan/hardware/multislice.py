"""How several slices lie in a mesh. Pure."""

import math
from collections.abc import Mapping

from shardplan.errors import ConfigError

SLICE_AXES = ("replica", "data")
"""The mesh axes that may cross slices, the one that does so first in front."""


def slices_by_axis(slices: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """How many parts the slices cut each axis of the mesh into; the product is the number of slices.

    Raises:
        ConfigError: the slices do not divide replica x data.
    """
    parts, left = dict.fromkeys(sizes, 1), slices
    for axis in SLICE_AXES:
        if axis in parts:
            parts[axis] = math.gcd(left, sizes[axis])
            left //= parts[axis]
    if left > 1:
        crossing = math.prod(sizes.get(axis, 1) for axis in SLICE_AXES)
        raise ConfigError(
            f"the {slices} slices do not divide replica x data = {crossing}, and only these cross slices; "
            f"make mesh.replica or mesh.data a multiple of {slices}"
        )
    return tuple(parts.values())
