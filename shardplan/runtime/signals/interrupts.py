"""Delays Ctrl-C until no module is being imported."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

RETRY_S = 0.1
"""Seconds after which an interrupt that came during an import is sent again."""
LONGEST_S = 10.0
"""Maximum seconds that an interrupt is delayed, because the import's file system may be stuck."""


@contextmanager
def interrupts_after_imports() -> Iterator[None]:
    """Raise KeyboardInterrupt after the current import, rather than within it.

    Extension modules in C++, jaxlib among them, abort the process when an exception is raised in their initialization.
    This has no effect outside of the main thread, or if Ctrl-C is ignored or has a handler already.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    deadline: float | None = None

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal deadline
        deadline = deadline or time.monotonic() + LONGEST_S
        if not _is_importing(frame) or time.monotonic() > deadline:
            raise KeyboardInterrupt
        timer = threading.Timer(RETRY_S, signal.pthread_kill, [threading.main_thread().ident, number])
        timer.daemon = True
        timer.start()

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_importing(frame: FrameType | None) -> bool:
    """Return whether a function of the import system is among the callers of a frame."""
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib."):
            return True
        frame = frame.f_back
    return False
