"""Whether a checkpoint's files are what their store has on record, found in the pass that loads them.

Every read is followed by a CRC of what came. Afterwards the CRC of each file is put together from those of all
processes, and only bytes that nobody needed are read besides. A SHA, of which that cannot be, is of a second reading.
"""

import sys
from collections import defaultdict
from collections.abc import Iterable

from shardplan.checkpoint.header import Tensor
from shardplan.errors import CheckpointError
from shardplan.runtime.devices import is_first_process
from shardplan.runtime.peers import Peers
from shardplan.storage import File, Folder
from shardplan.storage.checksums import Checksum, crc, joined, sha256
from shardplan.storage.folder import Pace

Part = tuple[int, int, int]
"""First byte of a part of a file, one past its last, and the CRC of what is between."""


class CheckedFile:
    """A file that keeps the CRC of everything that is read of it, where the store has one of the whole."""

    def __init__(self, file: File) -> None:
        self._file = file
        self.name: str = file.name
        self.size: int = file.size
        self.version: str = file.version
        self.pace: Pace = file.pace
        self.recorded = file.recorded_checksum()
        self.parts: list[Part] = []

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        self._file.read_into(offset, buffer)
        if self.recorded and self.recorded.is_crc and len(buffer):
            self.parts.append((offset, offset + len(buffer), crc(self.recorded.algorithm, buffer)))

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return self.recorded


class CheckedFolder:
    """A folder whose files are `CheckedFile`s."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self.ref = folder.ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        file = self._folder.open(name)
        return None if file is None else CheckedFile(file)


def check_files(tensors: Iterable[Tensor], peers: Peers) -> None:
    """Compare the files of `tensors`, of a `CheckedFolder`, with what is on record; say on stderr what was compared.

    Every process calls this when it has read its part, and checks its share of the files.

    Raises:
        CheckpointError: a file is another; in all processes.
    """
    files = {tensor.file.name: tensor.file for tensor in tensors}
    checked = [file for _, file in sorted(files.items()) if isinstance(file, CheckedFile)]
    said = peers.gather("parts", [merged_parts(file) for file in checked])
    mine = range(peers.here, len(checked), peers.count)

    def check() -> None:
        for i in mine:
            check_file(checked[i], [(start, stop, value) for parts in said.values() for start, stop, value in parts[i]])

    peers.agree("checksums", check, lambda _: {})
    if is_first_process():
        print(_summary(checked), file=sys.stderr)


def _summary(files: list[CheckedFile]) -> str:
    by_kind: defaultdict[str, list[str]] = defaultdict(list)
    for file in files:
        by_kind[file.recorded.algorithm if file.recorded else ""].append(file.name)
    unknown = by_kind.pop("", [])
    said = [f"{len(names)} files match the {kind} of their store" for kind, names in sorted(by_kind.items())]
    if unknown:
        said.append(f"of {len(unknown)} the store has no checksum ({unknown[0]}{', ...' if unknown[1:] else ''})")
    return f"checksums: {'; '.join(said)}"


def check_file(file: CheckedFile, parts: Iterable[Part]) -> None:
    """Compare a file with what is on record; `parts` are those that have been read.

    Raises:
        CheckpointError: it is another.
    """
    recorded = file.recorded
    if recorded is None:
        return
    if recorded.is_crc:
        found = Checksum.of_crc(recorded.algorithm, _whole(file, recorded.algorithm, parts))
    else:
        found = sha256(file, file.pace.nbytes)
    if found != recorded:
        raise CheckpointError(
            f"{file.name}: is {found}, and {recorded} on record at its store; it is damaged, replace it there"
        )


def merged_parts(file: CheckedFile) -> list[Part]:
    """What has been read of a file, with neighbours as one part."""
    found: list[Part] = []
    for part in sorted(file.parts):
        if found and found[-1][1] == part[0]:
            assert file.recorded is not None
            start, _, before = found.pop()
            part = (start, part[1], joined(file.recorded.algorithm, before, part[2], part[1] - part[0]))
        found.append(part)
    return found


def _whole(file: CheckedFile, algorithm: str, parts: Iterable[Part]) -> int:
    """The CRC of a file: of parts that follow each other, and of bytes read now where there is none."""
    position, result = 0, 0
    for start, stop, value in [*sorted(parts, key=lambda part: (part[0], -part[1])), (file.size, file.size, 0)]:
        if start < position:
            continue  # of what is counted already; its end, if that is beyond, is read again
        while position < start:
            buffer = memoryview(bytearray(min(file.pace.nbytes, start - position)))
            file.read_into(position, buffer)
            result = joined(algorithm, result, crc(algorithm, buffer), len(buffer))
            position += len(buffer)
        result = joined(algorithm, result, value, stop - start)
        position = stop
    return result
