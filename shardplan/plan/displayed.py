"""Base class of objects that have a text for `print` and a picture for notebooks."""

from importlib import import_module
from typing import Any

VIEWS_MODULE = "shardplan.report.notebook.views"
"""The module with the text and the picture of each class: it is above them, and imported when it is needed."""


class Displayed:
    """An object that shows itself, where it is printed and where it is the value of a notebook's cell."""

    def __str__(self) -> str:
        text: str = import_module(VIEWS_MODULE).full_text(self)
        return text

    def _repr_html_(self) -> str | None:
        """The picture in a notebook; None for what is text alone."""
        picture: str | None = import_module(VIEWS_MODULE).picture(self)
        return picture

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The picture for notebooks, and a short text for where there are none, such as IPython in a terminal."""
        bundle: dict[str, str] = {"text/plain": import_module(VIEWS_MODULE).short_text(self)}
        picture = self._repr_html_()
        return bundle if picture is None else {**bundle, "text/html": picture}
