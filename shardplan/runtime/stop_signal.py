"""SIGTERM as a request to stop at the next point from which the work can go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_on_sigterm(stops: threading.Event) -> Iterator[None]:
    """Have SIGTERM set an event until the block ends; without effect outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stops.set())
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
