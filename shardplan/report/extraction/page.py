"""HTML pages of extraction results: a text shaded by probability, and an index of the texts.

A page is one file that needs nothing else. It is produced piece by piece, so that a text is never in memory as a whole.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from jinja2 import Environment
from markupsafe import Markup, escape

from shardplan.report.extraction.file_names import short_label
from shardplan.report.extraction.probability_scale import LABELLED, SHADES, probability_text, shade, threshold_text
from shardplan.report.templating import environment, template_text

READ_CHARACTERS = 2**16
"""Number of characters of a text that are in memory at a time."""
ANCHOR_CHARACTERS = 400
"""Minimum distance, in characters, of two places in a text that its strip links to."""


@dataclass(frozen=True)
class ShadedText:
    """A text, and the largest log p_z of its characters."""

    runs: Iterable[tuple[np.ndarray, np.ndarray]]
    """Runs of characters in order: bounds int64[run + 1], and values float64[run]; minus infinity for characters in no
    window."""
    read: Callable[[int, int], str]
    """Returns the characters of the text from a start to an end."""
    characters: int


def page_parts(
    id_: str, model: str, task: Mapping[str, Any], summary: Mapping[str, Any], strip: Sequence[float | None],
    text: ShadedText,
) -> Iterator[bytes]:  # fmt: skip
    """Yield the parts of the page of a text, in UTF-8.

    Args:
        id_: id of the text.
        model: name of the model.
        task, summary, strip: the text's entries in summary.json.
    """
    # the parts of the strip lead to places in the text that are not so close that they split words
    step = max(1, -(-len(strip) * ANCHOR_CHARACTERS // max(text.characters, 1)))
    anchors = {i: -(-i * text.characters // len(strip)) for i in range(0, len(strip), step)}
    stream = _environment().get_template("extraction_page.html").generate(
        label=short_label(id_, 200), model=model, task=task, summary=summary, strip=strip, step=step, shades=SHADES,
        labelled=LABELLED, style=template_text("style.css"), body=_body(text, anchors),
    )  # fmt: skip
    return (part.encode() for part in stream)


def index_page(
    model: str, summary: Mapping[str, Any], names: Mapping[str, str], without_page: Container[str], has_plots: bool
) -> bytes:
    """Return a page with a row for each text, in UTF-8.

    Args:
        names: file names without endings, for the texts that have pictures.
        without_page: ids of the texts that have only a plot.
        has_plots: whether plots are among the pictures.
    """
    rows = [
        (short_label(id_, 80), each, names.get(id_), id_ in names and id_ not in without_page)
        for id_, each in summary["texts"].items()
    ]
    return (
        _environment()
        .get_template("extraction_index.html")
        .render(
            model=model,
            task=summary["task"],
            total=summary["total"],
            rows=[*rows, ("total", summary["total"], None, False)],
            has_plots=has_plots,
            style=template_text("style.css"),
        )
        .encode()
    )


@cache
def _environment() -> Environment:
    own = environment().overlay()
    own.filters = {
        **own.filters,
        "shade": shade,
        "probability": probability_text,
        "threshold": lambda value: threshold_text(float(value)),
    }
    return own


def _body(text: ShadedText, anchors: Mapping[int, int]) -> Iterator[Markup]:
    """Yield the HTML of the text, shaded by probability."""
    reader, places = _Reader(text.read), iter([*anchors.items(), (-1, text.characters + 1)])
    number, place = next(places)
    for start, end, label in _spans(text):
        if label:
            level, title = label
            yield Markup('<span class=s{} title="{}">' if level else '<span{} title="{}">').format(level or "", title)
        while start < end:
            while place <= start:
                yield Markup("<a id=c{}></a>").format(number)
                number, place = next(places)
            stop = min(end, place)
            yield from map(_escaped, reader.read(start, stop))
            start = stop
        if label:
            yield Markup("</span>")


def _spans(text: ShadedText) -> Iterator[tuple[int, int, tuple[int, str] | None]]:
    """Yield (start, end, (shade, text)) for each run of characters whose values have the same shade and text.

    Neighbouring runs that look the same are merged.
    """
    last: tuple[int, int, tuple[int, str] | None] | None = None
    for bounds, values in text.runs:
        for start, end, value in zip(bounds[:-1].tolist(), bounds[1:].tolist(), values.tolist(), strict=True):
            label = None if value == -np.inf else (shade(value), probability_text(value))
            if last and last[2] == label:
                last = (last[0], end, label)
            else:
                if last:
                    yield last
                last = (start, end, label)
    if last:
        yield last


class _Reader:
    """Reads a text from its start to its end."""

    def __init__(self, read: Callable[[int, int], str]):
        self._read, self._start, self._text = read, 0, ""

    def read(self, start: int, end: int) -> Iterator[str]:
        """Yield the characters from `start` to `end` in parts; the caller must not ask beyond the text's end."""
        while start < end:
            if not self._start <= start < self._start + len(self._text):
                self._start, self._text = start, self._read(start, start + READ_CHARACTERS)
                if not self._text:
                    raise ValueError(f"the text has no character {start}")
            part = self._text[start - self._start : end - self._start]
            yield part
            start += len(part)


def _escaped(text: str) -> Markup:
    """Escape text for HTML, where a carriage return must be a reference, and a null character is not allowed."""
    return Markup(str(escape(text)).replace("\r", "&#13;").replace("\0", "\u2400"))
