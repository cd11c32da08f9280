"""SIGTERM as a request to stop at the next point from which the work can go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stop_on_sigterm() -> Iterator[threading.Event]:
    """Yield an event that SIGTERM sets until the block ends; without effect outside the main thread."""
    stops = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stops
        return
    before = signal.signal(signal.SIGTERM, lambda *_: stops.set())
    try:
        yield stops
    finally:
        signal.signal(signal.SIGTERM, before)
