"""The stacks of all threads of a process, for when it is stuck: what each line of its code waits for."""

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from shardplan.errors import one_line
from shardplan.runtime.processes.activity import Activity
from shardplan.runtime.processes.places import THREAD_PREFIX

WRITE_S = 3.0
"""Most seconds to wait for the disk of the stacks, before the line is printed that names their file."""
logger = logging.getLogger(__name__)


class Stacks:
    """The file to which the stacks of this process are written."""

    def __init__(self, path: Path):
        """Open the file at `path`, which is created if it is not there."""
        self._path = path
        # without a buffer, which would be written again when the file is closed
        self._file = open(path, "ab", buffering=0)  # noqa: SIM115

    def write(self, reason: str, activity: Activity, device_lines: Callable[[], list[str]]) -> str:
        """Write the stacks of all threads, what the process was doing, and then what is known of its devices.

        Returns:
            A clause that says where they are, or why they are not: the disk may be full, or not answer.
        """
        failure = f"it does not answer for {WRITE_S:.0f} s"

        def write() -> None:
            nonlocal failure
            try:
                self._write(_describe(reason, activity))
                self._write("".join(f"{line}\n" for line in device_lines()))
            except Exception as error:  # whatever it is, the reason is to be printed
                failure = one_line(error)
            else:
                failure = ""

        thread = threading.Thread(target=write, name=f"{THREAD_PREFIX}stacks", daemon=True)
        thread.start()
        thread.join(WRITE_S)
        if failure:
            return f"what this process was doing could not all be written to {self._path} ({failure})"
        return f"what this process was doing is in {self._path}"

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """Have the stacks written on SIGUSR1 as well, until the block ends; for commands.

        That needs no GIL. Then the handler of before is called, but for the default one, which would end the process.
        """
        has_handler = signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        faulthandler.register(signal.SIGUSR1, self._file, chain=has_handler)
        try:
            yield
        finally:
            faulthandler.unregister(signal.SIGUSR1)

    def move(self, path: Path) -> None:
        """Go on in another file, such as one in the folder of the run; stay in this one if that cannot be written."""
        try:
            with open(path, "ab") as file:
                file.write(self._path.read_bytes())
                file.flush()
                os.dup2(file.fileno(), self._file.fileno(), inheritable=False)
            before, self._path = self._path, path
            before.unlink()
        except OSError as error:
            logger.warning("stacks of a process that is stuck are written to %s: %s", self._path, one_line(error))

    def close(self) -> None:
        """Write no more; a file in which nothing is, is removed."""
        self._file.close()
        with contextlib.suppress(OSError):  # somebody has removed it already
            if self._path.stat().st_size == 0:
                self._path.unlink()

    def _write(self, text: str) -> None:
        data = memoryview(text.encode())
        while data:
            data = data[self._file.write(data) :]


def _describe(reason: str, activity: Activity) -> str:
    """Return why this process writes, what it was doing, and the stacks of its threads.

    Not by `faulthandler`, which keeps the GIL while it waits for a disk.
    """
    doing = f" ({activity.doing})" if activity.doing else ""
    seconds = time.monotonic() - activity.since
    lines = [
        f"{time.strftime('%Y-%m-%d %H:%M:%S')} {reason}",
        f"this process was {activity.phase}{doing}; its last progress was {seconds:.0f} s ago",
    ]
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        lines += ["", f"Thread {names.get(ident, ident)} (most recent call first):"]
        lines += [
            f'  File "{each.f_code.co_filename}", line {number} in {each.f_code.co_name}'
            for each, number in traceback.walk_stack(frame)
        ]
    return "\n".join([*lines, "", ""])


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


def current_stacks() -> Stacks | None:
    """Return where the stacks of this process are written; None if nobody asked for them."""
    return _stacks
