"""The stacks of all threads of a process, for when it is stuck: what each line of its code waits for.

They are written by `faulthandler`, which needs neither the GIL nor memory, on SIGUSR1, when a run is found to be stuck,
and when no Python code of the process has run for a while.
"""

import contextlib
import faulthandler
import os
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

GIL_S = 15.0
"""Seconds without Python code, which sends signs of life every two, after which the stacks are written."""


class Stacks:
    """The file to which the stacks of this process are written."""

    def __init__(self, file: IO[str]):
        """Write to `file`, which stays open."""
        self._file = file

    @property
    def path(self) -> str:
        """Path of the file."""
        return self._file.name

    def write(self, reason: str) -> None:
        """Write the stacks of all threads, under a line that says why."""
        print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}", file=self._file, flush=True)
        faulthandler.dump_traceback(self._file, all_threads=True)
        self._file.flush()

    def arm(self) -> None:
        """Have them written unless this is called again in time."""
        faulthandler.dump_traceback_later(GIL_S, file=self._file)


_stacks: Stacks | None = None


@contextlib.contextmanager
def record_stacks() -> Iterator[Stacks]:
    """Have the stacks of this process written to a file in the folder for temporary files, which is removed if empty.

    Its name is `shardplan-stacks-PID.txt`.
    """
    global _stacks
    path = Path(tempfile.gettempdir()) / f"shardplan-stacks-{os.getpid()}.txt"
    is_main = threading.current_thread() is threading.main_thread()
    with open(path, "a", encoding="utf-8") as file:
        before, _stacks = _stacks, Stacks(file)
        if is_main:
            faulthandler.register(signal.SIGUSR1, file)
        try:
            yield _stacks
        finally:
            faulthandler.cancel_dump_traceback_later()
            if is_main:
                faulthandler.unregister(signal.SIGUSR1)
            _stacks = before
    if os.path.getsize(path) == 0:
        path.unlink()


def current_stacks() -> Stacks | None:
    """Return where the stacks of this process are written; None if nobody asked for them."""
    return _stacks
