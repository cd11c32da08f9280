"""Progress bars: drawn on a terminal, a log line every few seconds elsewhere."""

import contextlib
import datetime
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Protocol, Self

from tqdm_loggable.auto import tqdm
from tqdm_loggable.tqdm_logging import tqdm_logging

from shardplan.hardware import GIB
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.process_group import ProcessGroup

LOG_INTERVAL_S = 5
"""Seconds between log lines of a bar that is not drawn."""


class ProgressBar(Protocol):
    """The part of tqdm's interface that is used here."""

    n: int
    """Amount of work done."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> object: ...

    def update(self, n: int) -> object:
        """Add `n` to the amount of work done."""

    def set_postfix_str(self, s: str, refresh: bool) -> object:
        """Set the text after the bar."""


def progress_bar(total: int, label: str, unit: str) -> ProgressBar:
    """Return a progress bar that counts to `total` in `unit`.

    Drawn on a terminal, otherwise logged every 5 seconds; only in the first process, and not with --quiet.
    """
    # a bar that is not drawn logs its lines at level INFO, which the root logger's own level hides by default
    logging.getLogger("tqdm_loggable").setLevel(logging.INFO)
    tqdm_logging.set_level(logging.INFO)
    tqdm_logging.set_log_rate(datetime.timedelta(seconds=LOG_INTERVAL_S))
    bar: ProgressBar = tqdm(
        disable=not _is_shown(),
        total=total,
        desc=label,
        unit=unit,
        unit_scale=True,
        unit_divisor=1024 if unit == "B" else 1000,
    )
    return bar


@contextlib.contextmanager
def load_progress(total: int, processes: ProcessGroup) -> Iterator[Callable[[int], None]]:
    """Show one bar for the bytes that all processes read, and print a summary on stderr at the end.

    Args:
        total: bytes that all processes read together.

    Yields:
        A function to call with the number of bytes of each read of this process.
    """
    started = time.perf_counter()
    with progress_bar(total, "loading", "B") as bar:

        def report(nbytes: int) -> None:
            processes.done += nbytes
            done = {**processes.progress, processes.process_index: processes.done}
            if processes.process_count > 1:
                slowest = min(done, key=lambda process: done[process])
                bar.set_postfix_str(f"slowest: process {slowest}", refresh=False)
            bar.update(sum(done.values()) - bar.n)

        yield report
    if _is_shown():
        seconds = time.perf_counter() - started
        own = f", {processes.done / GIB:.2f} GiB of it by this process" if processes.process_count > 1 else ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"loaded {total / GIB:.2f} GiB in {seconds:.1f} s ({total / 1e9 / seconds:.2f} GB/s){own}; "
            f"peak host memory {peak / GIB:.2f} GiB",
            file=sys.stderr,
        )


def _is_shown() -> bool:
    """Whether this process reports progress: the first one does, unless only errors are logged (`--quiet`)."""
    return is_first_process() and logging.getLogger().isEnabledFor(logging.WARNING)
