"""Progress on stderr: a bar on a terminal, a plain line every few seconds elsewhere, nothing with --quiet."""

import contextlib
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from shardplan.hardware import GIB

FIRST_LINE_S, LINE_INTERVAL_S = 1.0, 5.0
"""Seconds until the first line of progress that is not on a terminal, and from one line to the next."""
REFRESHES_PER_SECOND = 4
BAR_WIDTH = 20
BYTES = "B"
"""The unit of a progress in bytes."""


def size_text(*nbytes: int) -> str:
    """Format numbers of bytes, as in `0.50 of 2.00 GiB`; in MiB if the last number is below a tenth of a GiB."""
    unit, name = (GIB, "GiB") if nbytes[-1] >= GIB / 10 else (2**20, "MiB")
    return f"{' of '.join(f'{amount / unit:.2f}' for amount in nbytes)} {name}"


def rate_text(bytes_per_second: float) -> str:
    """Format a speed in GB/s, or in MB/s below a tenth of a GB/s."""
    return f"{bytes_per_second / 1e9:.2f} GB/s" if bytes_per_second >= 1e8 else f"{bytes_per_second / 1e6:.2f} MB/s"


def print_note(line: str) -> None:
    """Print a line on stderr, such as the location of the results; nothing if only errors are logged (`--quiet`)."""
    if not _is_quiet():
        print(line, file=sys.stderr)


def _is_quiet() -> bool:
    return not logging.getLogger().isEnabledFor(logging.WARNING)


@dataclass
class Progress:
    """The progress of a job, displayed by another thread within the context of `show_progress`."""

    label: str
    """Name of the job."""
    unit: str = ""
    total: int = 0
    """Amount of work in `unit`; 0 for a job whose `note` says how far it is."""
    done: int = 0
    note: str = ""
    """Text on the current step."""
    started: float = field(default_factory=time.perf_counter)

    def update(self, amount: int) -> None:
        """Add `amount` to the work that is done."""
        self.done += amount

    def set_note(self, note: str) -> None:
        """Set the text about the current step."""
        self.note = note

    def describe(self) -> str:
        """Format work done, rate, time left and note on one line, without the label."""
        seconds = time.perf_counter() - self.started
        if not self.total:
            return f"{self.note} ({seconds:.0f} s)"
        is_bytes = self.unit == BYTES
        amounts = size_text(self.done, self.total) if is_bytes else f"{self.done} of {self.total} {self.unit}".rstrip()
        parts = [f"{amounts} ({self.done / self.total:.0%})"]
        if self.done:
            rate = self.done / seconds
            parts.append(rate_text(rate) if is_bytes else f"{rate:.3g} a second")
            parts.append(f"{(self.total - self.done) / rate:.0f} s left")
        return ", ".join([*parts, self.note] if self.note else parts)


@contextlib.contextmanager
def show_progress(progress: Progress, is_shown: bool = True) -> Iterator[Progress]:
    """Show `progress` on stderr within the context, unless only errors are logged (`--quiet`)."""
    if not is_shown or _is_quiet():
        yield progress
        return
    console = Console(file=sys.stderr)
    if console.is_interactive:

        def render() -> RenderableType:
            row = Table.grid(padding=(0, 1))
            bar = [ProgressBar(progress.total, progress.done, BAR_WIDTH)] if progress.total else []
            cells: list[RenderableType] = [progress.label, *bar, progress.describe()]
            for _ in cells:
                row.add_column(no_wrap=True)
            row.add_row(*cells)
            return row

        # what is printed on stdout meanwhile must not go through the console, which is on stderr
        with Live(
            console=console,
            get_renderable=render,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
            redirect_stdout=False,
        ):
            yield progress
        return
    stop = threading.Event()
    printer = threading.Thread(target=_print_lines, args=(progress, stop), daemon=True)
    printer.start()
    try:
        yield progress
    finally:
        stop.set()
        printer.join()


def _print_lines(progress: Progress, stop: threading.Event) -> None:
    """Print a line every few seconds, until `stop` is set."""
    interval = FIRST_LINE_S
    while not stop.wait(interval):
        if progress.total or progress.note:
            print(f"{progress.label}: {progress.describe()}", file=sys.stderr, flush=True)
        interval = LINE_INTERVAL_S


@contextlib.contextmanager
def show_steps(label: str, is_shown: bool = True) -> Iterator[Callable[[str], None]]:
    """Display the current step of a job, and the seconds since its start.

    Yields:
        A function to call with a description of the next step.
    """
    with show_progress(Progress(label), is_shown) as progress:
        yield progress.set_note
