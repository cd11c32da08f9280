"""The panel of Native Sparse Attention: the blocks that a training's last step selected, layer by layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SelectionPanel:
    """Figures of all layers in one sentence, and of each layer in a row."""

    summary: str
    rows: list[Mapping[str, Any]]
    """`layers` of the summary's section."""


def selection_panel(section: Mapping[str, Any]) -> SelectionPanel:
    """Lay out the section `selection` of a summary with at least one layer."""
    return SelectionPanel(selection_line(section), section["layers"])


def selection_line(section: Mapping[str, Any]) -> str:
    """Return the sentence about all layers.

    >>> figures = {"rows": 2048.0, "k_mean": 44.5, "k_max": 64.0, "tile_union": 4.3}
    >>> selection_line({"step": 12, "figures": figures, "layers": []})
    'step 12: 2,048 rows attend to 44.5 selected tokens on average, 64 at most; 8 neighbouring queries to 4.3 blocks'
    """
    figures = section["figures"]
    return (
        f"step {section['step']}: {figures['rows']:,.0f} rows attend to {figures['k_mean']:g} selected tokens on "
        f"average, {figures['k_max']:g} at most; 8 neighbouring queries to {figures['tile_union']:.1f} blocks"
    )
