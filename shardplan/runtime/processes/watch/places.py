"""The lines of code at which this process's threads are, for the message about a stuck process."""

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

from shardplan.runtime.processes.watch.activity import CodeLocation

PACKAGE = str(Path(__file__).parents[3])
LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
"""Folders of libraries, whose code is not the process's own."""
JAX = ("jax", "jaxlib")
THREAD_PREFIX = "shardplan-"
"""Prefix of the names of threads that watch a run, which are left out."""


def find_place() -> CodeLocation:
    """Find where this process is: in its main thread, or in a program's callback, which JAX runs in another thread."""
    frames = sys._current_frames()
    main = frames.pop(threading.main_thread().ident or 0)
    if not _is_in_jax(main):
        return CodeLocation(_text_of(main), False)
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_PREFIX):
            frames.pop(thread.ident or 0, None)
    # threads of libraries wait for work all the time, but for one that is in own code somebody waits
    busy = [frame for frame in frames.values() if _is_own(frame)]
    return CodeLocation(_text_of(busy[0] if busy else main), not busy)


def _is_in_jax(frame: FrameType) -> bool:
    """Return whether the innermost frame is in JAX."""
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in JAX


def _is_own(frame: FrameType) -> bool:
    """Return whether a frame belongs to a program or this package, not to a library."""
    file = frame.f_code.co_filename
    return file.startswith(PACKAGE) or not file.startswith((*LIBRARIES, "<frozen"))


def _text_of(frame: FrameType) -> str:
    """Return the innermost line of own code, or of a library if there is none."""
    own: FrameType | None = frame
    while own is not None and not _is_own(own):
        own = own.f_back
    shown = own or frame
    return f"{Path(shown.f_code.co_filename).name}:{shown.f_lineno} in {shown.f_code.co_name}"
