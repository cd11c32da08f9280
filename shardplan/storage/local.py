"""Files on a local disk, read by `os.preadv`."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from shardplan.storage.checksums import SHA256, Checksum
from shardplan.storage.folder import File, Pace, changed, ends_early

PACE = Pace(4 * 2**20, 2 * (os.cpu_count() or 1))
"""What is read stays in a core's cache until it is copied, and some read while others copy."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Of a file that are hashed for its version: hosts with copies of their own agree on content, not on times."""


class LocalFile:
    """A file on a local disk."""

    pace = PACE
    is_shared = False

    def __init__(self, path: Path):
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        self._state = self._stat()
        self.size = self._state[0]
        self.version = self._sampled()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        done = 0
        while done < len(buffer):
            # one preadv moves at most 2 GiB, and may move less
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise ends_early(self, offset + done, len(buffer) - done)
            done += count
        if self._stat() != self._state:
            raise changed(self, "its size or time of change is another")

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`. The cache of the Hugging Face hub names large files by their SHA-256."""
        blob = Path(self.name).resolve()
        is_digest = blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name)
        return Checksum(SHA256, bytes.fromhex(blob.name)) if is_digest else None

    def _stat(self) -> tuple[int, int]:
        found = os.fstat(self._descriptor)
        return found.st_size, found.st_mtime_ns

    def _sampled(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for i in range(SAMPLES):
            digest.update(os.pread(self._descriptor, SAMPLE_BYTES, self.size * i // SAMPLES))
        return digest.hexdigest()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at the very end `os` is empty already
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


class LocalFolder:
    """A folder on a local disk."""

    def __init__(self, ref: str):
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        path = Path(self.ref) / name
        return LocalFile(path) if path.is_file() else None
