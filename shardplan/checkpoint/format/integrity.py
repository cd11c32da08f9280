"""Whether a checkpoint's files are what their store has on record, found in the pass that loads them.

Every read is followed by a CRC of what came. Afterwards the CRC of each file is put together from those of all
processes, and only bytes that nobody needed are read besides. A SHA, of which that cannot be, is of a second reading.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable

from shardplan.checkpoint.format.header import Tensor
from shardplan.errors import CheckpointError
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.process_group import ProcessGroup
from shardplan.storage import File, Folder
from shardplan.storage.checksums import Checksum, crc, joined, sha256
from shardplan.storage.folder import Pace

TENSORS = ".safetensors"
"""Files that are checked."""
Part = tuple[int, int, int]
"""First byte of a part of a file, one past its last, and the CRC of what is between."""


class CheckedFile:
    """A file that keeps the CRC of everything that is read of it, where the store has one of the whole."""

    def __init__(self, file: File) -> None:
        self.file = file
        self.name: str = file.name
        self.size: int = file.size
        self.version: str = file.version
        self.pace: Pace = file.pace
        self.is_shared: bool = file.is_shared
        self.recorded = file.recorded_checksum()
        self.parts: list[Part] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        self.file.read_into(offset, buffer)
        if self.recorded and self.recorded.is_crc and len(buffer):
            self.parts.append((offset, offset + len(buffer), crc(self.recorded.algorithm, buffer)))

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return self.recorded


class CheckedFolder:
    """A folder whose files with tensors are `CheckedFile`s."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.ref = folder.ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        file = self._folder.open(name)
        self.ref = self._folder.ref  # the hub's has a commit once a file of it is open
        return CheckedFile(file) if file is not None and name.endswith(TENSORS) else file


def check_files(tensors: Iterable[Tensor], processes: ProcessGroup) -> None:
    """Compare the files of `tensors`, of a `CheckedFolder`, with what is on record; say on stderr what was compared.

    Every process calls this when it has read its part. Files that all read are shared out; of what each has a copy of
    its own, each checks its own.

    Raises:
        CheckpointError: a file is another; in all processes.
    """
    files = {tensor.file.name: tensor.file for tensor in tensors}
    checked = [file for _, file in sorted(files.items()) if isinstance(file, CheckedFile)]
    to_each = {
        process: [file.parts if _checks(file, i, process, processes) else [] for i, file in enumerate(checked)]
        for process in range(processes.count)
    }
    said = processes.tell("parts", to_each)

    def check() -> None:
        for i, file in enumerate(checked):
            if _checks(file, i, processes.here, processes):
                those = said.values() if file.is_shared else [said[processes.here]]
                check_file(file, [(start, stop, value) for parts in those for start, stop, value in parts[i]])

    processes.agree("checksums", check, lambda _: {})
    if is_first_process():
        print(_summary(checked), file=sys.stderr)


def _checks(file: CheckedFile, number: int, process: int, processes: ProcessGroup) -> bool:
    return not file.is_shared or number % processes.count == process


def _summary(files: list[CheckedFile]) -> str:
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        by_kind[file.recorded.algorithm if file.recorded else ""].append(file.name)
    unknown = by_kind.pop("", [])
    said = [f"the {kind} on record is that of {len(names)} of {len(files)} files" for kind, names in by_kind.items()]
    if unknown:
        said.append(f"none is on record of {len(unknown)} ({unknown[0]}{', ...' if unknown[1:] else ''})")
    return f"checksums: {'; '.join(said)}"


def check_file(file: CheckedFile, parts: Iterable[Part]) -> None:
    """Compare a file with what is on record; `parts` are those that have been read.

    Raises:
        CheckpointError: it is another, or some of it was when it was read.
    """
    recorded = file.recorded
    if recorded is None:
        return
    if recorded.is_crc:
        found = Checksum.of_crc(recorded.algorithm, _whole(file, recorded.algorithm, parts))
    else:
        found = sha256(file.file, file.pace.nbytes)
    if found != recorded:
        raise CheckpointError(f"{file.name}: is {found}, and {recorded} is on record; it is damaged, replace it")


def _whole(file: CheckedFile, algorithm: str, parts: Iterable[Part]) -> int:
    """The CRC of a file: of parts that follow each other, and of bytes read now where there is none."""
    position, result = 0, 0
    counted: dict[tuple[int, int], int] = {}
    for start, stop, value in sorted(set(parts), key=lambda part: (part[0], -part[1])):
        if start < position:  # of what is counted already
            again = counted.get((start, stop))
            if value != (_read(file, algorithm, start, stop) if again is None else again):
                raise CheckpointError(f"{file.name}: bytes {start} to {stop} came in two ways; load again")
            continue
        result = joined(algorithm, result, _read(file, algorithm, position, start), start - position)
        result = joined(algorithm, result, value, stop - start)
        counted[start, stop] = value
        position = stop
    return joined(algorithm, result, _read(file, algorithm, position, file.size), file.size - position)


def _read(file: CheckedFile, algorithm: str, start: int, stop: int) -> int:
    """The CRC of some bytes, read now."""
    result = 0
    for offset in range(start, stop, file.pace.nbytes):
        buffer = memoryview(bytearray(min(file.pace.nbytes, stop - offset)))
        file.file.read_into(offset, buffer)
        result = joined(algorithm, result, crc(algorithm, buffer), len(buffer))
    return result
