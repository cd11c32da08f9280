"""Compares a checkpoint's files with the checksums that their store recorded, in the same pass that loads them.

Every read updates a CRC of the bytes it returned. Afterwards the CRC of each file is combined from those of all
processes, and only bytes that no process needed are read in addition. A SHA cannot be combined from parts: it needs a
second reading of the file.
"""

from collections import defaultdict
from collections.abc import Iterable

from shardplan.checkpoint.format.header import Tensor, header_end
from shardplan.errors import CheckpointError
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.processes.group import ProcessGroup
from shardplan.runtime.progress import print_note
from shardplan.storage import File, Folder
from shardplan.storage.checksums import Checksum, ChecksumAlgorithm, combine_crcs, compute_crc, compute_sha256
from shardplan.storage.folder import ReadTuning

TENSORS_SUFFIX = ".safetensors"
"""Ending of the names of the files that are checked."""
RangeChecksum = tuple[int, int, int]
"""Checksum of a range of a file: (first byte, one past the last byte, CRC of the bytes)."""


class CheckedFile:
    """A file that keeps the CRC of every range read from it, if its store recorded a CRC of the whole file."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.name: str = file.name
        self.size: int = file.size
        self.version: str = file.version
        self.tuning: ReadTuning = file.tuning
        self.is_shared: bool = file.is_shared
        self.recorded = file.recorded_checksum()
        self.ranges: list[RangeChecksum] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        self.file.read_into(offset, buffer)
        if self.recorded and self.recorded.is_crc and len(buffer):
            if offset == 0:
                buffer = buffer[: header_end(buffer)]  # the tensors after it are read again
            self.ranges.append((offset, offset + len(buffer), compute_crc(self.recorded.algorithm, buffer)))

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return self.recorded


class CheckedFolder:
    """A folder that opens its safetensors files as `CheckedFile`s."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.ref = folder.ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        file = self._folder.open(name)
        self.ref = self._folder.ref  # a hub folder resolves its commit when it opens the first file
        return CheckedFile(file) if file is not None and name.endswith(TENSORS_SUFFIX) else file


def check_files(tensors: Iterable[Tensor], processes: ProcessGroup) -> None:
    """Compare the files of `tensors`, from a `CheckedFolder`, with recorded checksums; print a summary on stderr.

    Every process calls this after it has read its part. Shared files are divided among the processes; if each process
    has its own copy of the files, it checks all files of its copy.

    Raises:
        CheckpointError: a file differs from its recorded checksum; raised in all processes.
    """
    files = {tensor.file_name: tensor.file for tensor in tensors}
    checked = [file for _, file in sorted(files.items()) if isinstance(file, CheckedFile)]
    checkers = {str(i): i % processes.process_count for i in range(len(checked))}
    ranges_for: defaultdict[int, dict[str, list[RangeChecksum]]] = defaultdict(dict)
    for (number, checker), file in zip(checkers.items(), checked, strict=True):
        if file.is_shared and file.ranges:
            ranges_for[checker][number] = file.ranges
    received = processes.exchange("range checksums", ranges_for)

    def check() -> None:
        for (number, checker), file in zip(checkers.items(), checked, strict=True):
            if not file.is_shared:
                check_file(file, file.ranges)
            elif checker == processes.process_index:
                ranges = (each for files in received.values() for each in files.get(number, ()))
                check_file(file, [(start, stop, value) for start, stop, value in ranges])

    processes.agree("checksums", check, lambda _: {})
    if is_first_process():
        print_note(_summary(checked))


def _summary(files: list[CheckedFile]) -> str:
    """Return one line that counts, per algorithm, the files that match, and the files without a recorded checksum."""
    by_algorithm: defaultdict[ChecksumAlgorithm | None, list[str]] = defaultdict(list)
    for file in files:
        by_algorithm[file.recorded.algorithm if file.recorded else None].append(file.name)
    unknown = by_algorithm.pop(None, [])
    counts = [
        f"{algorithm} matches for {len(names)} of {len(files)} files" for algorithm, names in by_algorithm.items()
    ]
    if unknown:
        names = f"{unknown[0]}{', ...' if unknown[1:] else ''}"
        counts.append(f"their store has none for {len(unknown)} of {len(files)} files ({names}), which are not checked")
    return f"checksums: {'; '.join(counts)}"


def check_file(file: CheckedFile, ranges: Iterable[RangeChecksum]) -> None:
    """Compare a file with its recorded checksum, if there is one.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from shardplan.storage.local import LocalFile
    >>> with TemporaryDirectory() as folder:  # the hub's cache names files by their SHA-256
    ...     blob = Path(folder, "blobs", 64 * "0")
    ...     blob.parent.mkdir()
    ...     _ = blob.write_bytes(b"damaged")
    ...     check_file(CheckedFile(LocalFile(blob)), [])  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.CheckpointError: ...: checksum is sha256 ..., its store recorded sha256 000...

    Args:
        ranges: the CRCs of ranges that processes have read.

    Raises:
        CheckpointError: the file differs, or a process received other bytes than the file has.
    """
    recorded = file.recorded
    if recorded is None:
        return
    if recorded.is_crc:
        actual = Checksum.from_crc(recorded.algorithm, _file_crc(file, recorded.algorithm, ranges))
    else:
        actual = compute_sha256(file.file, file.tuning.bytes_per_read)
    if actual != recorded:
        raise CheckpointError(
            f"{file.name}: checksum is {actual}, its store recorded {recorded}; the file is damaged, replace it"
        )


def _file_crc(file: CheckedFile, algorithm: ChecksumAlgorithm, ranges: Iterable[RangeChecksum]) -> int:
    """Combine the CRC of a file from consecutive ranges, reading the gaps between them."""
    position, result = 0, 0
    combined: dict[tuple[int, int], int] = {}
    for start, stop, value in sorted(set(ranges), key=lambda part: (part[0], -part[1])):
        if start < position:  # overlaps what is combined already: only compare
            earlier = combined.get((start, stop))
            if value != (_read_crc(file, algorithm, start, stop) if earlier is None else earlier):
                raise CheckpointError(f"{file.name}: two reads of bytes {start} to {stop} differ; load again")
            continue
        result = combine_crcs(algorithm, result, _read_crc(file, algorithm, position, start), start - position)
        result = combine_crcs(algorithm, result, value, stop - start)
        combined[start, stop] = value
        position = stop
    return combine_crcs(algorithm, result, _read_crc(file, algorithm, position, file.size), file.size - position)


def _read_crc(file: CheckedFile, algorithm: ChecksumAlgorithm, start: int, stop: int) -> int:
    """Read a range of a file and return its CRC."""
    result = 0
    for offset in range(start, stop, file.tuning.bytes_per_read):
        buffer = memoryview(bytearray(min(file.tuning.bytes_per_read, stop - offset)))
        file.file.read_into(offset, buffer)
        result = combine_crcs(algorithm, result, compute_crc(algorithm, buffer), len(buffer))
    return result
