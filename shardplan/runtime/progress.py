"""One progress bar: drawn on a terminal, a log line every few seconds elsewhere."""

import contextlib
import datetime
import logging
import resource
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from tqdm_loggable.auto import tqdm
from tqdm_loggable.tqdm_logging import tqdm_logging

from shardplan.hardware import GIB
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.process_group import ProcessGroup


def progress_bar(total: int, label: str, unit: str) -> Any:
    """A bar (tqdm's interface: `update(n)`, context manager) that counts to `total` in `unit`."""
    logging.getLogger("tqdm_loggable").setLevel(logging.INFO)
    tqdm_logging.set_level(logging.INFO)
    tqdm_logging.set_log_rate(datetime.timedelta(seconds=5))
    return tqdm(
        disable=not is_first_process(),
        total=total,
        desc=label,
        unit=unit,
        unit_scale=True,
        unit_divisor=1024 if unit == "B" else 1000,
    )


@contextlib.contextmanager
def load_progress(total: int, processes: ProcessGroup) -> Iterator[Callable[[int], None]]:
    """One bar for what all processes read together, and a summary of it on stderr.

    Args:
        total: bytes that all read.

    Yields:
        What to call with the bytes of each read of this process.
    """
    started = time.perf_counter()
    with progress_bar(total, "loading", "B") as bar:

        def report(nbytes: int) -> None:
            processes.done += nbytes
            everybody = {**processes.progress, processes.here: processes.done}
            if processes.count > 1:
                slowest = min(everybody, key=lambda process: everybody[process])
                bar.set_postfix_str(f"slowest: process {slowest}", refresh=False)
            bar.update(sum(everybody.values()) - bar.n)

        yield report
    if is_first_process():
        seconds = time.perf_counter() - started
        of = f", of them {processes.done / GIB:.2f} by this process" if processes.count > 1 else ""
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(
            f"loaded {total / GIB:.2f} GiB in {seconds:.1f} s ({total / 1e9 / seconds:.2f} GB/s){of}; at most "
            f"{peak / GIB:.2f} GiB of host memory",
            file=sys.stderr,
        )
