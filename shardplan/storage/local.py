"""Files on a local disk, read with `os.preadv`."""

import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path

from shardplan.errors import CheckpointError
from shardplan.storage.checksums import Checksum, ChecksumAlgorithm
from shardplan.storage.folder import File, ReadTuning, changed_error, truncated_error

LOCAL = ReadTuning(4 * 2**20, 2 * (os.cpu_count() or 1))
"""Tuning such that data stays in a core's cache until it is copied, and some threads read while others copy."""
SAMPLES, SAMPLE_BYTES = 16, 4096
"""Number and size of the samples whose hash is a file's version; modification times differ between copies on hosts."""


class LocalFile:
    """A file on a local disk."""

    tuning = LOCAL
    is_shared = False

    def __init__(self, path: Path, version: str | None = None):
        """Open the file at `path`.

        Args:
            version: version of a file that cannot change, such as a file at a commit; default: a hash of samples.
        """
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        self._state = self._stat()
        self.size = self._state[0]
        self.version = version or self._hash_samples()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        done = 0
        while done < len(buffer):
            # one preadv moves at most 2 GiB, and may move less
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise truncated_error(self, offset + done, len(buffer) - done)
            done += count
        if self._stat() != self._state:
            raise changed_error(self, "its size or modification time differs")

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`. The Hugging Face hub's cache names large files by their SHA-256."""
        blob = Path(self.name).resolve()
        is_digest = blob.parent.name == "blobs" and re.fullmatch("[0-9a-f]{64}", blob.name)
        return Checksum(ChecksumAlgorithm.SHA256, bytes.fromhex(blob.name)) if is_digest else None

    def _stat(self) -> tuple[int, int]:
        status = os.fstat(self._descriptor)
        return status.st_size, status.st_mtime_ns

    def _hash_samples(self) -> str:
        digest = hashlib.blake2b(digest_size=16)
        for i in range(SAMPLES):
            digest.update(os.pread(self._descriptor, SAMPLE_BYTES, self.size * i // SAMPLES))
        return digest.hexdigest()

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # at interpreter exit `os` is empty already
        if hasattr(self, "_descriptor"):
            close(self._descriptor)


class LocalFolder:
    """A folder on a local disk."""

    def __init__(self, ref: str):
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        path = Path(self.ref) / name
        if path.is_symlink() and not path.exists():
            raise CheckpointError(
                f"{path} is a link to {os.readlink(path)}, which does not exist; download the file again"
            )
        return LocalFile(path) if path.is_file() else None
