"""Shows an extraction run: tables, plots, pages."""

from importlib.util import find_spec

INSTALL_PLOTS = "pip install matplotlib"


def can_plot() -> bool:
    """Return whether matplotlib, an optional dependency, is installed."""
    return find_spec("matplotlib") is not None
