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
from collections.abc import Callable, Iterator
from pathlib import Path

from shardplan.runtime.processes.activity import Activity

GIL_S = 15.0
"""Seconds without Python code, which sends signs of life every two, after which the stacks are written."""


class Stacks:
    """The file to which the stacks of this process are written."""

    def __init__(self, path: Path):
        """Open the file at `path`, which is created if it is not there."""
        self._path, self._lock = path, threading.Lock()
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115
        self._register()

    @property
    def path(self) -> str:
        """Path of the file."""
        return str(self._path)

    def write(self, reason: str, activity: Activity, device_lines: Callable[[], list[str]]) -> None:
        """Write the stacks of all threads, what the process was doing, and then what is known of its devices."""
        doing = f" ({activity.doing})" if activity.doing else ""
        seconds = time.monotonic() - activity.since
        self._print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}")
        self._print(f"this process was {activity.phase}{doing}; its last progress was {seconds:.0f} s ago")
        faulthandler.dump_traceback(self._file, all_threads=True)
        for line in device_lines():
            self._print(line)

    def arm(self) -> None:
        """Have them written unless this is called again in time."""
        with self._lock:
            if not self._file.closed:
                faulthandler.dump_traceback_later(GIL_S, file=self._file)

    def move(self, path: Path) -> None:
        """Go on in another file, such as one in the folder of the run."""
        with self._lock:
            file, before = self._file, self._path
            self._file, self._path = open(path, "a", encoding="utf-8"), path  # noqa: SIM115
            self._register()
            file.close()
            self._print(before.read_text(encoding="utf-8"), end="")
            before.unlink()

    def close(self) -> None:
        """Write no more; a file in which nothing is, is removed."""
        with self._lock:
            faulthandler.cancel_dump_traceback_later()
            if _is_main_thread():
                faulthandler.unregister(signal.SIGUSR1)
            self._file.close()
            if self._path.stat().st_size == 0:
                self._path.unlink()

    def _register(self) -> None:
        faulthandler.cancel_dump_traceback_later()
        if _is_main_thread():
            faulthandler.register(signal.SIGUSR1, self._file)

    def _print(self, line: str, end: str = "\n") -> None:
        print(line, end=end, file=self._file, flush=True)


_stacks: Stacks | None = None


@contextlib.contextmanager
def record_stacks() -> Iterator[Stacks]:
    """Have the stacks of this process written to a file in the folder for temporary files.

    Its name is `shardplan-stacks-PID.txt`.
    """
    global _stacks
    before, _stacks = _stacks, Stacks(Path(tempfile.gettempdir()) / f"shardplan-stacks-{os.getpid()}.txt")
    try:
        yield _stacks
    finally:
        _stacks.close()
        _stacks = before


def _is_main_thread() -> bool:
    """Whether this is the thread that may install handlers of signals."""
    return threading.current_thread() is threading.main_thread()


def current_stacks() -> Stacks | None:
    """Return where the stacks of this process are written; None if nobody asked for them."""
    return _stacks
