"""Files that fsspec reads, for all schemes without a reader of their own."""

from typing import Any

import fsspec

from shardplan.errors import CheckpointError, ConfigError, one_line
from shardplan.storage.checksums import Checksum, checksum_from_properties
from shardplan.storage.folder import (
    REMOTE,
    File,
    RefKey,
    changed_error,
    open_or_none,
    query_checksum,
    truncated_error,
    unreadable_error,
)


class FilesystemFile:
    """A file of an fsspec file system, read by ranges."""

    tuning = REMOTE
    is_shared = True

    def __init__(self, filesystem: Any, path: str, name: str):
        """Open the file at `path`.

        Raises:
            FileNotFoundError: there is no such file.
        """
        self._filesystem, self._path, self.name = filesystem, path, name
        self.size: int = filesystem.size(path)
        self.version: str = filesystem.ukey(path)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        try:
            data = self._filesystem.cat_file(self._path, start=offset, end=offset + len(buffer))
            version = self._filesystem.ukey(self._path)
        except Exception as error:
            raise unreadable_error(self, offset, len(buffer), one_line(error)) from error
        if version != self.version:
            raise changed_error(self, "its properties differ")
        if len(data) < len(buffer):
            raise truncated_error(self, offset + len(data), len(buffer) - len(data))
        if len(data) > len(buffer):
            raise CheckpointError(
                f"{self.name}: received {len(data)} bytes instead of the {len(buffer)} requested at {offset}"
            )
        buffer[:] = data

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return query_checksum(self, lambda: checksum_from_properties(self._filesystem.info(self._path)))


class FilesystemFolder:
    """A folder of an fsspec file system."""

    def __init__(self, ref: str, key: RefKey = RefKey.MODEL):
        self.ref = ref
        try:
            self._filesystem, self._root = fsspec.url_to_fs(ref.rstrip("/"), use_listings_cache=False)
        except Exception as error:
            raise ConfigError(f"{key} {ref!r} cannot be opened: {one_line(error)}") from error

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        url = f"{self.ref}/{name}"
        return open_or_none(url, lambda: FilesystemFile(self._filesystem, f"{self._root}/{name}", url))
