"""Writes the records of a run beside its results: environment, memory, and time."""

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardplan.plan.serialization import json_bytes
from shardplan.storage import read_bytes
from shardplan.storage.writing import OutputFolder

ENVIRONMENT, AUDIT, MEMORY, GOODPUT = "env.json", "audit.txt", "memory.json", "goodput.json"
HEARTBEAT, STACKS = "heartbeat-{}.jsonl", "stacks-{}.txt"
"""Files of one process, by its number."""


class RunRecords:
    """The folder of a run's records."""

    def __init__(self, ref: str, process: int):
        """Prepare to write records into the results folder `ref`.

        Args:
            process: number of this process.
        """
        self._folder = OutputFolder(ref)
        self._process = process
        self.is_local = "://" not in self._folder.ref
        """Whether the folder is on a disk of this host."""
        self._local: Path | None = None

    def write(self, name: str, data: Mapping[str, Any] | str) -> None:
        """Write a file about all processes, in place of an earlier run's file; one process calls this."""
        with self._folder.create(name) as file:
            file.write(data.encode() if isinstance(data, str) else json_bytes(data))

    def read(self, name: str) -> bytes | None:
        """Return the content of a file about all processes; None if there is no such file."""
        return read_bytes(self._folder.open_for_reading(), name)

    def own_file(self, name: str) -> Path:
        """Return the local path of a file of this process, to append to; `upload` copies it to a remote folder.

        Args:
            name: `HEARTBEAT` or `STACKS`.
        """
        name = name.format(self._process)
        if self.is_local:
            return Path(self._folder.ref) / name
        if self._local is None:
            self._local = Path(tempfile.mkdtemp(prefix="shardplan-run-"))
        return self._local / name

    def upload(self) -> None:
        """Copy files of this process to a remote folder."""
        for path in self._local.iterdir() if self._local is not None else ():
            with self._folder.create(path.name) as file:
                file.write(path.read_bytes())

    def close(self) -> None:
        """Upload the files and remove their local copies, if there are any."""
        if self._local is not None:
            self.upload()
            shutil.rmtree(self._local)
