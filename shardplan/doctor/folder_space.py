"""Checks whether files can be written in a folder, and how much space is left there."""

import os
import shutil
import tempfile
from pathlib import Path

from shardplan.doctor.findings import HostFinding, Level
from shardplan.hardware import GIB
from shardplan.runtime.progress import size_text

PROBE = bytes(2**20)
"""Content of a test file: on a full disk or a used-up quota, files can be created but not written."""
ROOM = GIB
"""Free bytes below which the check warns."""


def check_folder(key: str, folder: str, unwritable: Level = Level.ERROR) -> HostFinding:
    """Write a temporary file to a folder, or to its nearest parent that exists.

    Args:
        key: name of the folder for people, such as a configuration key.
        unwritable: level of the finding if nothing can be written there.
    """
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(PROBE)
            file.flush()
        free = shutil.disk_usage(existing).free
    except OSError as error:
        where = "" if existing == path else f" ({existing})"
        remedy = f"make room, or name another folder in {key}"
        return HostFinding(unwritable, f"{key} {folder!r} cannot be written: {error.strerror}{where}", remedy=remedy)
    measured = f"{key} {folder!r}: {size_text(free)} free"
    if free < ROOM:
        return HostFinding(Level.WARNING, measured, size_text(ROOM), f"make room, or name another folder in {key}")
    return HostFinding(Level.OK, measured)
