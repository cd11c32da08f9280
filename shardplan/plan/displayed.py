"""What shows itself: `print` gives the text that the command prints, a notebook also draws a picture."""

from importlib import import_module
from typing import Any

VIEWS = "shardplan.report.views"
"""The module with the text and the picture of each class: it is above them, and imported when it is needed."""


class Displayed:
    """An object that shows itself, where it is printed and where it is the value of a notebook's cell."""

    def __str__(self) -> str:
        text: str = import_module(VIEWS).full_text(self)
        return text

    def _repr_html_(self) -> str | None:
        """The picture in a notebook; None for what is text alone."""
        picture: str | None = import_module(VIEWS).picture(self)
        return picture

    def _repr_mimebundle_(self, **_: Any) -> dict[str, str]:
        """The picture for notebooks, and a short text for where there are none, such as IPython in a terminal."""
        bundle: dict[str, str] = {"text/plain": import_module(VIEWS).short_text(self)}
        picture = self._repr_html_()
        return bundle if picture is None else {**bundle, "text/html": picture}
