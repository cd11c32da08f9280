"""Finds a host's TPU in the operating system: device files, and the process that holds them. Linux only."""

import fcntl
import glob
import os
import struct
from collections.abc import Iterable
from pathlib import Path

DEVICE_FILES = ("/dev/accel[0-9]*", "/dev/vfio/[0-9]*")
"""Patterns for the device files, one file per chip: the first up to v4, the second since."""
LOCK_FILE = "/tmp/libtpu_lockfile"
"""The file that a process locks while it uses libtpu."""
FLOCK = "hhqqi"
"""Format of Linux's struct flock: type, whence, start, length, pid."""


def device_files() -> list[str]:
    """Return the device files of all chips."""
    return sorted(path for pattern in DEVICE_FILES for path in glob.glob(pattern))


def lock_holder(path: str = LOCK_FILE) -> int | None:
    """Return the process that holds a POSIX lock on a file; None if no such process is visible.

    The result is 0 for a process that this process cannot see, for example from within a container.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    kind, *_, pid = struct.unpack(FLOCK, answer)
    return None if kind == fcntl.F_UNLCK else pid


def file_holder(paths: Iterable[str]) -> int | None:
    """Return another process that has one of the files open; only root sees files of other users' processes."""
    wanted = set(paths)
    for link in glob.iglob("/proc/[0-9]*/fd/*"):
        pid = int(link.split("/")[2])
        try:
            if os.readlink(link) in wanted and pid != os.getpid():
                return pid
        except OSError:  # it has ended, or is another user's
            continue
    return None


def command_line(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
