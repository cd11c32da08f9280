"""Treats SIGTERM as a request to stop at the next point from which the work can continue."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def set_on_sigterm(stops: threading.Event) -> Iterator[None]:
    """Set an event on SIGTERM within the context, and call the previous handler, if Python had one.

    This has no effect outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)

    def stop(number: int, frame: FrameType | None) -> None:
        stops.set()
        if callable(before):
            before(number, frame)

    signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
