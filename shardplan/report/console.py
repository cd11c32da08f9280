"""Makes the console of an output stream: its width, and its behaviour when its reader stops early."""

import os
from typing import TextIO

from rich.console import Console

PIPED_WIDTH = 240
"""Columns if the output is no terminal and COLUMNS is not set, wide enough that a search finds complete rows."""


class _Console(Console):
    """A console whose reader may stop early."""

    def on_broken_pipe(self) -> None:
        # rich would end the process with exit code 1; a reader such as `head` that stops early is no failure
        raise BrokenPipeError


def console(stream: TextIO) -> Console:
    """Make a console on `stream`, as wide as the terminal, else as COLUMNS, else `PIPED_WIDTH` columns."""
    columns = os.environ.get("COLUMNS", "")
    piped_width = int(columns) if columns.isdecimal() and int(columns) else PIPED_WIDTH
    return _Console(file=stream, width=None if stream.isatty() else piped_width)
