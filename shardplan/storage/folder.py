"""The interface of folders of files, and code that all kinds of storage share."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from shardplan.errors import CheckpointError, ShardplanError, one_line
from shardplan.storage.checksums import Checksum


@dataclass(frozen=True)
class ReadTuning:
    """Size and number of reads that give a storage medium its best throughput.

    Hosts may have different tunings, because they affect only how a host reads, not which transfers there are.
    """

    bytes_per_read: int
    concurrent_reads: int


MAX_SMALL_FILE_BYTES = 256 * 2**20
"""Maximum size of a file that is read at once: the largest tokenizers have some 30 MiB, indices a few."""
REMOTE = ReadTuning(16 * 2**20, 32)
"""Tuning for long, concurrent reads: a request has high latency, and one connection is slower than the network."""


class RefKey(StrEnum):
    """The configuration key that names a folder, for messages."""

    MODEL = "model.ref"
    ADAPTER = "model.adapter"

    @property
    def noun(self) -> str:
        """Noun for the kind of content of the folder."""
        return "checkpoint" if self is RefKey.MODEL else "adapter"


class File(Protocol):
    """A file that several threads can read at the same time, at any offset."""

    name: str
    size: int
    """Size of the file in bytes."""
    version: str
    """Identifier of the content under this name, equal on every host that sees the same content."""
    tuning: ReadTuning
    is_shared: bool
    """Whether all hosts read the same copy of the file, rather than each its own."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes of the file from `offset` on.

        Raises:
            CheckpointError: the file ends before the buffer is full, cannot be read, or has changed since it was
                opened.
        """

    def recorded_checksum(self) -> Checksum | None:
        """Return the checksum recorded by the file's store; None if there is none of a supported kind.

        Raises:
            CheckpointError: the store cannot be queried.
        """


class Folder(Protocol):
    """A folder of files."""

    ref: str
    """The user's reference, with the revision resolved to a commit if there is one."""

    def open(self, name: str) -> File | None:
        """Open the file `name`; return None if it does not exist."""


def open_or_none(name: str, make: Callable[[], File]) -> File | None:
    """Return the file that `make` opens, or None if `make` raises FileNotFoundError.

    Raises:
        CheckpointError: the file exists and cannot be opened.
    """
    try:
        return make()
    except FileNotFoundError:
        return None
    except Exception as error:
        raise CheckpointError(f"{name} cannot be opened: {one_line(error)}") from error


def query_checksum(file: File, query: Callable[[], Checksum | None]) -> Checksum | None:
    """Return the result of `query`, which requests the checksum of `file` from its store.

    Raises:
        CheckpointError: the request failed.
    """
    try:
        return query()
    except ShardplanError:
        raise
    except Exception as error:
        raise CheckpointError(f"{file.name}: the request for its checksum failed: {one_line(error)}") from error


def read_bytes(folder: Folder, name: str) -> bytes | None:
    """Return the content of a small file, or None if it does not exist.

    Raises:
        CheckpointError: the file is larger than a file of its kind can be.
    """
    file = folder.open(name)
    if file is None:
        return None
    if file.size > MAX_SMALL_FILE_BYTES:
        raise CheckpointError(
            f"{file.name}: {file.size} bytes; a file of this name has at most {MAX_SMALL_FILE_BYTES}; check what it is"
        )
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    return bytes(data)


def truncated_error(file: File, end: int, missing: int) -> CheckpointError:
    """Return the error for a file that is shorter than when it was opened, or than its header says."""
    return CheckpointError(
        f"{file.name}: ends at byte {end}, {missing} bytes before the end of a tensor; download the file again"
    )


def changed_error(file: File, what: str) -> CheckpointError:
    """Return the error for a file that was replaced while it was being read."""
    return CheckpointError(f"{file.name}: changed while it was being read ({what}); load again")


def unreadable_error(file: File, offset: int, nbytes: int, why: str) -> CheckpointError:
    """Return the error for a range of a file that cannot be read."""
    return CheckpointError(f"{file.name}: bytes {offset}+{nbytes} cannot be read: {why}")
