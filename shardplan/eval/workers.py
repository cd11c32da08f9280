"""Worker processes that make the sequences of a run from its texts.

Imports no JAX, so that a worker starts within a second and shares no device with the process that feeds them.
"""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context, parent_process

from shardplan.eval.texts.reader import Source, TextReader
from shardplan.eval.windows import Rows, SequenceJob

PIECES_PER_JOB = 16
"""Number of pieces of texts whose tokens a worker counts at a time."""

_reader: TextReader


def _start_worker(source: Source) -> None:
    """Prepare this worker process to end with its parent, whatever signal ends the parent."""
    global _reader
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _reader = TextReader(source)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)


def _count_tokens(pieces: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
    return _reader.count_tokens(pieces)


def make_rows(job: SequenceJob) -> Rows:
    """Run a job in a worker."""
    return job.make(_reader)


@contextmanager
def open_workers(source: Source, count: int) -> Iterator[Executor]:
    """Start `count` worker processes, which end with the context; yield their executor."""
    # a forked process would inherit JAX's locks, but not the threads that release them
    with ProcessPoolExecutor(count, get_context("spawn"), _start_worker, (source,)) as workers:
        try:
            yield workers
        finally:
            workers.shutdown(wait=False, cancel_futures=True)


def count_tokens(
    workers: Executor, pieces: Sequence[tuple[int, int]], on_counted: Callable[[int], None]
) -> tuple[list[int], int]:
    """Count the tokens of pieces in worker processes; return the result of `TextReader.count_tokens`.

    Args:
        on_counted: called with the number of pieces that were counted since the last call.
    """
    jobs = [pieces[i : i + PIECES_PER_JOB] for i in range(0, len(pieces), PIECES_PER_JOB)]
    parts = []
    for counts, largest in workers.map(_count_tokens, jobs):
        on_counted(len(counts))
        parts.append((counts, largest))
    return [count for counts, _ in parts for count in counts], max((largest for _, largest in parts), default=0)
