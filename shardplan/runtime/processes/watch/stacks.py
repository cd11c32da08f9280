"""Writes the stacks of all threads of a stuck process."""

import contextlib
import faulthandler
import functools
import io
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

from shardplan.errors import one_line
from shardplan.runtime.processes.watch.places import THREAD_PREFIX

WRITE_S = 3.0
"""Maximum seconds to wait for the disk before the line is printed that names the file of the stacks."""
logger = logging.getLogger(__name__)


class Stacks:
    """The file for this process's stacks, created when there is something to write."""

    def __init__(self, path: Path, write_s: float = WRITE_S):
        """Write to the file at `path`, waiting for at most `write_s` seconds."""
        self._path, self._write_s = path, write_s
        self._signal_file: io.FileIO | None = None
        """The file for the handler of a signal, which cannot open one."""
        self.activity_lines: Callable[[], list[str]] = list
        """Returns lines on the activity of this process."""
        self.device_lines: Callable[[], list[str]] = list
        """Returns lines on the state of its devices."""

    def write(self, reason: str) -> str:
        """Write the activity of the process, the stacks of all threads, and finally the state of its devices.

        Returns:
            A clause that says where the stacks were written, or why they were not: the disk may be full, or not
                respond.
        """
        failure = f"it does not answer for {self._write_s:.0f} s"
        path = self._path  # the main thread may leave `in_file` meanwhile

        def write() -> None:
            nonlocal failure
            try:
                self._describe(reason, path)
            except Exception as error:  # whatever it is, the reason is to be printed
                failure = one_line(error)
            else:
                failure = ""

        thread = threading.Thread(target=write, name=f"{THREAD_PREFIX}stacks", daemon=True)
        try:
            thread.start()
            thread.join(self._write_s)
        except RuntimeError as error:  # too many threads, or, in Python 3.12.0 to 3.12.2, the program is at its end
            failure = one_line(error)
        if failure:
            return f"what this process was doing could not all be written to {path} ({failure})"
        return f"what this process was doing is in {path}"

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """Write activity, stacks and devices whenever SIGUSR1 arrives within the context; for commands.

        The signal handler writes the stack of the main thread, without the GIL, and a separate thread writes
        everything. An earlier handler is called too, except for the default handler, which would end the process.
        Outside of the main thread this has no effect.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        try:
            file = self._signal_file = open(self._path, "ab", buffering=0)  # noqa: SIM115
        except OSError as error:
            logger.warning("stacks are not written on SIGUSR1: %s", one_line(error))
            yield
            return
        before = signal.getsignal(signal.SIGUSR1)

        def handle(number: int, frame: FrameType | None) -> None:
            if callable(before):
                before(number, frame)

        reader, writer = os.pipe()
        os.set_blocking(writer, False)
        signal.signal(signal.SIGUSR1, handle)
        # Python's handler in C writes to it at once, also while the main thread is in a collective
        other_writer = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        # of all threads it would end the process if one of them ends meanwhile
        faulthandler.register(signal.SIGUSR1, file, all_threads=False, chain=True)
        name = f"{THREAD_PREFIX}signals"
        thread = threading.Thread(target=self._read_signals, args=(reader,), name=name, daemon=True)
        thread.start()
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)
            signal.set_wakeup_fd(other_writer)
            signal.signal(signal.SIGUSR1, before)
            os.close(writer)
            thread.join(self._write_s)
            file.close()
            self._signal_file = None
            _remove_if_empty(self._path)

    def _read_signals(self, reader: int) -> None:
        """Write the process's activity after each SIGUSR1."""
        with open(reader, "rb", buffering=0) as signals:
            while numbers := signals.read(1):
                if numbers[0] == signal.SIGUSR1:
                    with contextlib.suppress(Exception):  # of a disk that is full, or of devices that do not answer
                        self._describe("SIGUSR1", self._path)

    @contextlib.contextmanager
    def in_file(self, path: Path) -> Iterator[None]:
        """Write to another file within the context, such as one in a run's folder; ignored if it cannot be opened."""
        before = self._path
        try:
            self._switch(path)
        except OSError as error:
            logger.warning("stacks of a process that is stuck are written to %s: %s", before, one_line(error))
            yield
            return
        try:
            yield
        finally:
            with contextlib.suppress(OSError):  # it stays where it is
                self._switch(before)

    def _switch(self, path: Path) -> None:
        """Write to another file from now on, under the same file descriptor, which faulthandler holds."""
        before, is_new = self._path, not path.exists()
        with open(path, "ab", buffering=0) as new:
            if self._signal_file is not None:
                os.dup2(new.fileno(), self._signal_file.fileno(), inheritable=False)
        self._path = path
        if self._signal_file is not None:
            _remove_if_empty(before)
        elif is_new:
            _remove_if_empty(path)

    def _describe(self, reason: str, path: Path) -> None:
        """Write the activity and the stacks, and last the devices, whose runtime may have failed."""
        _append(path, [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}", *self.activity_lines(), *_stack_lines(), ""])
        _append(path, self.device_lines())


def _append(path: Path, lines: Iterable[str]) -> None:
    """Append lines to a file without a buffer, because a buffer would be written again when the file is closed."""
    data = memoryview("".join(f"{line}\n" for line in lines).encode())
    with open(path, "ab", buffering=0) as file:
        while data:
            data = data[file.write(data) :]


def _remove_if_empty(path: Path) -> None:
    with contextlib.suppress(OSError):  # somebody has removed it already
        if path.stat().st_size == 0:
            path.unlink()


def _stack_lines() -> Iterator[str]:
    """Yield the stacks of the threads without `faulthandler`, which keeps the GIL while it waits for a disk."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield ""
        yield f"Thread {names.get(ident, ident)} (most recent call first):"
        for each, number in traceback.walk_stack(frame):
            yield f'  File "{each.f_code.co_filename}", line {number} in {each.f_code.co_name}'


@functools.cache
def process_stacks() -> Stacks:
    """Return the path of this process's stacks: `shardplan-stacks-PID.txt` in the temporary folder."""
    try:
        folder = tempfile.gettempdir()
    except OSError:  # there is no folder that can be written to, which nothing but stacks needs
        folder = "/tmp"
    return Stacks(Path(folder) / f"shardplan-stacks-{os.getpid()}.txt")
