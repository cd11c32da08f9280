"""Divides the axes of a mesh over the slices of a multislice job. Pure arithmetic."""

import math
from collections.abc import Mapping

from shardplan.errors import ConfigError
from shardplan.hardware.mesh_axes import SLICE_AXES


def slices_by_axis(slices: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Return how many slices each mesh axis spans; the product is the number of slices.

    Args:
        sizes: mesh axis -> size.

    Raises:
        ConfigError: the number of slices does not divide the product of the axes that may cross them.
    """
    spanned, left = dict.fromkeys(sizes, 1), slices
    for axis in SLICE_AXES:
        if axis in spanned:
            spanned[axis] = math.gcd(left, sizes[axis])
            left //= spanned[axis]
    if left > 1:
        crossing = math.prod(sizes.get(axis, 1) for axis in SLICE_AXES)
        raise ConfigError(
            f"the {slices} slices do not divide {' x '.join(SLICE_AXES)} = {crossing}, and only these mesh axes cross "
            f"slices; make {' or '.join(f'mesh.{axis}' for axis in SLICE_AXES)} a multiple of {slices}"
        )
    return tuple(spanned.values())
