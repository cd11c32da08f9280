"""The tiles of a parameter: which device of a slice holds which part of it."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.plan.displayed import Displayed

if TYPE_CHECKING:
    from shardplan.plan.plan import ParameterPlan


@dataclass(frozen=True)
class Tiles(Displayed):
    """The tiles of a parameter on the devices of a slice."""

    parameter: "ParameterPlan"
    slice: str
    mesh: dict[str, int]
    """Mesh axis -> size, major to minor."""
