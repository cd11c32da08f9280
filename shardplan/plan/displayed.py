"""Base class of objects with a text for `print` and a picture for notebooks."""

from importlib import import_module
from typing import Any

VIEWS_MODULE = "shardplan.report.notebook.views"
"""The module with the text and picture of each class, imported on first use because it is in a higher folder."""


class Displayed:
    """An object that displays itself, printed or as the value of a notebook's cell."""

    def __str__(self) -> str:
        text: str = import_module(VIEWS_MODULE).full_text(self)
        return text

    def _repr_html_(self) -> str | None:
        """Return the picture for a notebook; None for an object that has only text."""
        picture: str | None = import_module(VIEWS_MODULE).picture(self)
        return picture

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """Return the picture for notebooks, and a short text for displays without pictures, such as a terminal."""
        bundle: dict[str, str] = {"text/plain": import_module(VIEWS_MODULE).short_text(self)}
        picture = self._repr_html_()
        return bundle if picture is None else {**bundle, "text/html": picture}
