"""Ends a frozen process: C code that keeps the GIL also stops the thread that watches the process.

A thread of `faulthandler`, which needs no GIL, then writes the stacks of all threads to stderr and ends the process. It
has no exit code but 1, and no message but its own.
"""

import contextlib
import faulthandler
import threading
from collections.abc import Iterator

MARGIN_S = 15.0
"""Seconds that a stuck process gets to end by itself, with a line, before it counts as frozen."""
STDERR = 2
"""File descriptor of stderr."""
_lock = threading.Lock()
_is_allowed = False


@contextlib.contextmanager
def end_if_frozen() -> Iterator[None]:
    """Let a watchdog end this process if it freezes within the context; commands call this.

    `faulthandler` has only one timer per process, so that a timer of the caller is cancelled.
    """
    global _is_allowed
    _is_allowed = True
    try:
        yield
    finally:
        with _lock:
            _is_allowed = False
            faulthandler.cancel_dump_traceback_later()


def expect_python(seconds: float | None) -> None:
    """End this process unless this function is called again within `seconds` and a margin; None for no limit."""
    with _lock:
        if not _is_allowed:
            return
        if seconds is None:
            faulthandler.cancel_dump_traceback_later()
        else:
            faulthandler.dump_traceback_later(max(0.0, seconds) + MARGIN_S, exit=True, file=STDERR)
