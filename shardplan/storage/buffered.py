"""A file that reads complete blocks for small reads, because the scales of many tensors are adjacent."""

import threading
from collections import OrderedDict

from shardplan.storage.checksums import Checksum
from shardplan.storage.folder import File

BLOCK_BYTES = 64 * 1024
"""Bytes that are read at a time: more bytes cost less than another request (as `GAP_BYTES` of `byte_ranges`)."""
BLOCKS = 4
"""Number of blocks of a file that are kept, because threads read a few places of a file at the same time."""


class BufferedFile:
    """A file that reads complete blocks, and keeps the last ones."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.name, self.size, self.version = file.name, file.size, file.version
        self.tuning, self.is_shared = file.tuning, file.is_shared
        self._blocks: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        if len(buffer) >= BLOCK_BYTES or offset + len(buffer) > self.size:  # the file says what is missing
            self.file.read_into(offset, buffer)
            return
        position = 0
        while position < len(buffer):
            number, first = divmod(offset + position, BLOCK_BYTES)
            part = self._block(number)[first : first + len(buffer) - position]
            buffer[position : position + len(part)] = part
            position += len(part)

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return self.file.recorded_checksum()

    def _block(self, number: int) -> bytes:
        with self._lock:  # so that threads that need the same block read it once
            block = self._blocks.pop(number, None)
            if block is None:
                start = number * BLOCK_BYTES
                data = bytearray(min(BLOCK_BYTES, self.size - start))
                self.file.read_into(start, memoryview(data))
                block = bytes(data)
            self._blocks[number] = block
            if len(self._blocks) > BLOCKS:
                self._blocks.popitem(last=False)
            return block
