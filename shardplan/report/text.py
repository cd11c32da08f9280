"""Text and tables that fit the width of a console: lines break only at spaces, and words stay intact."""

import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence

from rich import box
from rich.console import Console, RenderableType
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

BULLET = "  · "
"""Beginning of a reason in a list."""
LABEL_WIDTH = 14
"""Columns of the labels of facts."""
_TOGETHER = re.compile(r" (?=(?:->|x|=) )|(?<= ->) |(?<= [x=]) |(?<=\d) (?=(?:s\b|%|[GKM]iB\b))")
"""Pattern for spaces at which lines do not break: in `mlp -> model x data`, `replica 4 x data 8`, `data = 8`, `1 s`."""
_UNLIMITED = 10_000
"""More columns than any table fills."""


def print_wrapped(text: str, out: Console, first: str | Text = "", indent: str | None = None, style: str = "") -> None:
    """Print text on as many lines as it needs; a word longer than the console has its own line.

    Args:
        first: text at the beginning of the first line.
        indent: text at the beginning of every further line; default: blanks of the width of `first`.
        style: style of the text, without `first`.
    """
    head = Text(first) if isinstance(first, str) else first
    blank = " " * len(head)
    rest = blank if indent is None else indent
    lines = textwrap.wrap(
        _TOGETHER.sub("\xa0", text), max(1, out.width), initial_indent=blank, subsequent_indent=rest,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip
    for number, line in enumerate(line.replace("\xa0", " ") for line in lines or [blank]):
        body = Text(line, style) if number else Text.assemble(head, (line[len(blank) :], style))
        out.print(body, soft_wrap=True)


def print_bullets(reasons: Iterable[str], out: Console) -> None:
    """Print one list item per reason."""
    for reason in reasons:
        print_wrapped(reason, out, BULLET)


def print_fact(label: str, text: str, out: Console) -> None:
    """Print a fact with its label at the left."""
    print_wrapped(text, out, Text(label.ljust(LABEL_WIDTH), "bold"))


def make_table(title: str, texts: Sequence[str], numbers: Sequence[str] = (), *, is_narrow: bool = False) -> Table:
    """Make an empty table whose first column wraps at spaces; other columns do not wrap.

    Args:
        texts: the titles of the columns of text.
        numbers: the titles of the columns of numbers, which are flush right.
        is_narrow: whether to leave out the vertical lines.
    """
    style = {"box": box.SIMPLE_HEAD, "pad_edge": False, "show_edge": False} if is_narrow else {}
    table = Table(title=title, title_justify="left", header_style="bold", **style)  # type: ignore[arg-type]
    for number, column in enumerate(texts):
        table.add_column(column, overflow="fold", no_wrap=number > 0)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def fits(table: Table, out: Console) -> bool:
    """Return whether the table fits the console with every cell on one line."""
    return _measure(table, out).maximum <= out.width


def print_first_fitting(tables: Iterable[Table], out: Console) -> None:
    """Print the first table that fits the console; every table is narrower than the one before.

    If no table fits with every cell on one line, print the first table that fits when its first column wraps at spaces.
    If a word is too long even then, print the last table, which is wider than the console.
    """
    forms = list(tables)
    for table in forms:
        if fits(table, out):
            break
    else:
        for table in forms:
            width = _measure(table, out).maximum - _spare_width(table, out)
            if width <= out.width:
                break
        table.width = max(out.width, width)
    out.print(table, crop=False)  # a table that is too wide is wrapped by the terminal, and nothing of it is lost


def with_path_ends(build: Callable[[list[str]], Table], paths: Sequence[str]) -> Iterator[Table]:
    """Yield a table with complete paths, then tables with ever shorter ends of the paths; the ends stay distinct.

    Args:
        build: makes the table from the paths to show, in the order of `paths`.
        paths: paths with dots or slashes; texts with spaces, such as descriptions of operations, are never shortened.
    """
    split = [_components(path) for path in paths]
    for length in range(max(map(len, split), default=1), 0, -1):
        yield build([_distinct_end(components, split, length) for components in split])


def _components(path: str) -> list[str]:
    """Split a path into components, each with the separator that follows it; a text with spaces is one component."""
    if " " in path:
        return [path]
    separator = "/" if "/" in path else "."
    *before, last = path.split(separator)
    return [*(component + separator for component in before), last]


def _distinct_end(components: list[str], others: Sequence[list[str]], length: int) -> str:
    """Return the last `length` components of a path, or more if another path has the same end."""
    while any(other[-length:] == components[-length:] and other != components for other in others):
        length += 1
    return "".join(components[-length:])


def _spare_width(table: Table, out: Console) -> int:
    """Return the number of columns that wrapping saves in the first column of a table."""
    first = table.columns[0]
    if first.no_wrap:
        return 0
    cells = [_measure(cell, out) for cell in (first.header, *first.cells)]
    return max(cell.maximum for cell in cells) - max(cell.minimum for cell in cells)


def _measure(renderable: RenderableType, out: Console) -> Measurement:
    return Measurement.get(out, out.options.update(width=_UNLIMITED, max_width=_UNLIMITED), renderable)
