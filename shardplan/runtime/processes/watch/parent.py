"""Ends this process when its parent has ended, whatever ended the parent."""

import os
import threading
import time

POLL_SECONDS = 1.0


def end_with_parent() -> None:
    """Start a thread that ends this process as soon as its parent has ended.

    Python code of the process cannot do this by itself while it imports modules or compiles.
    """
    threading.Thread(target=_wait_and_exit, args=(os.getppid(),), daemon=True).start()


def _wait_and_exit(parent: int) -> None:
    # a process whose parent has ended gets another one
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)
