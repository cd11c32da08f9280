"""What a folder of files is, wherever it lies."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shardplan.errors import CheckpointError, ShardplanError, one_line
from shardplan.storage.checksums import Checksum


@dataclass(frozen=True)
class Pace:
    """How a medium is best read."""

    nbytes: int
    """Of one read."""
    at_once: int
    """Reads in flight."""


REMOTE = Pace(16 * 2**20, 32)
"""Long ranges, many at once: the time to the first byte is long, and a connection is slower than the network."""


class File(Protocol):
    """A file that can be read at any offset, from several threads at once."""

    name: str
    size: int
    """Bytes."""
    version: str
    """Tells its content from another under the same name; equal on every host that sees the same content."""
    pace: Pace
    is_shared: bool
    """Whether every host reads one copy of it, rather than a copy of its own."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises:
            CheckpointError: the file ends before the buffer is full, cannot be read, or is not the one that was opened
                any more.
        """

    def recorded_checksum(self) -> Checksum | None:
        """What the store has on record of its content, or None where that is nothing that can be checked.

        Raises:
            CheckpointError: the store cannot be asked.
        """


class Folder(Protocol):
    """A folder of files."""

    ref: str
    """What the user called it, with the revision resolved to a commit where there is one."""

    def open(self, name: str) -> File | None:
        """The file called `name`, or None where there is none."""


def opened(name: str, make: Callable[[], File]) -> File | None:
    """The file that `make` opens, or None where there is none.

    Raises:
        CheckpointError: it cannot be opened.
    """
    try:
        return make()
    except FileNotFoundError:
        return None
    except Exception as error:
        raise CheckpointError(f"{name} cannot be opened: {one_line(error)}") from error


def asked(file: File, ask: Callable[[], Checksum | None]) -> Checksum | None:
    """What `ask` says of the checksum of `file`.

    Raises:
        CheckpointError: it cannot be asked.
    """
    try:
        return ask()
    except ShardplanError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file.name}: the store does not say its checksum: {one_line(error)}") from error


def read_bytes(folder: Folder, name: str) -> bytes | None:
    """A whole small file, or None where there is none."""
    file = folder.open(name)
    if file is None:
        return None
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    return bytes(data)


def ends_early(file: File, end: int, missing: int) -> CheckpointError:
    """What is raised where a file is shorter than it was when opened, or than its header says."""
    return CheckpointError(
        f"{file.name}: ends at byte {end}, {missing} bytes before the end of a tensor; download the file again"
    )


def changed(file: File, what: str) -> CheckpointError:
    """What is raised where a file is replaced while it is being read."""
    return CheckpointError(f"{file.name}: changed while it was being read ({what}); load again")
