"""Presents files of any storage as Python streams, for libraries that require these."""

import io
from typing import Any

from shardplan.storage.folder import File
from shardplan.storage.writing import Writer


class FileStream(io.RawIOBase):
    """A file of `shardplan.storage` as a seekable stream."""

    def __init__(self, file: File):
        """Start at the beginning of `file`."""
        self._file, self._position = file, 0

    def readable(self) -> bool:
        """Return True: the stream can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: the stream can seek."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        """Move to an offset, and return the offset from the start of the file."""
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._file.size}[whence]
        return self._position

    def tell(self) -> int:
        """Return the offset at which the next read begins."""
        return self._position

    def readinto(self, buffer: Any, /) -> int:
        """Fill the buffer with as many bytes as the file has left, and return their number."""
        count = max(0, min(len(buffer), self._file.size - self._position))
        self._file.read_into(self._position, memoryview(buffer).cast("B")[:count])
        self._position += count
        return count


class Sink(io.RawIOBase):
    """A file of an `OutputFolder` as a stream, whose closing does not close the file."""

    def __init__(self, writer: Writer):
        """Write to `writer`."""
        self._writer = writer

    def writable(self) -> bool:
        """Return True: the stream can be written to."""
        return True

    def write(self, data: Any, /) -> int:
        """Append data."""
        self._writer.write(memoryview(data).cast("B"))
        return len(data)
