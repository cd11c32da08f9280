"""Progress of work that the processes of a run share, displayed by the first process."""

import contextlib
import time
from collections.abc import Callable, Iterator

from shardplan.runtime.device_memory import peak_host_bytes
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.processes.group import ProcessGroup
from shardplan.runtime.progress import BYTES, Progress, print_note, rate_text, show_progress, size_text


@contextlib.contextmanager
def shared_progress(total: int, label: str, unit: str) -> Iterator[Progress]:
    """Show progress from 0 to `total` in `unit`, in the first process only."""
    with show_progress(Progress(label, unit, total), is_first_process()) as progress:
        yield progress


@contextlib.contextmanager
def load_progress(total: int, processes: ProcessGroup, deadline_s: float) -> Iterator[Callable[[int, str], None]]:
    """Show one progress for the bytes that all processes read, and print a summary on stderr at the end.

    Args:
        total: bytes that all processes read together.
        deadline_s: most seconds without progress.

    Yields:
        A function to call with the number of bytes of each read of this process, and the name of its array.
    """
    started = time.perf_counter()
    own = 0
    with processes.phase("loading", deadline_s) as advance, shared_progress(total, "loading", BYTES) as progress:

        def report(nbytes: int, array: str) -> None:
            nonlocal own
            own += nbytes
            advance(own, array)
            everywhere = processes.progress()
            if everywhere is not None:
                progress.set_note(f"slowest: process {everywhere.slowest}")
            progress.done = own if everywhere is None else max(own, int(everywhere.done))

        yield report
    if is_first_process():
        seconds = time.perf_counter() - started
        part = f", {size_text(own)} of it by this process" if processes.process_count > 1 else ""
        print_note(
            f"loaded {size_text(total)} in {seconds:.1f} s ({rate_text(total / seconds)}){part}; "
            f"peak host memory {size_text(peak_host_bytes())}"
        )
