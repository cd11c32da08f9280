"""Files that fsspec reads: what is left of the schemes."""

from typing import Any

import fsspec

from shardplan.errors import CheckpointError, ConfigError, one_line
from shardplan.storage.checksums import Checksum, of_properties
from shardplan.storage.folder import REMOTE, File, asked, changed, ends_early, opened


class FilesystemFile:
    """A file of an fsspec file system, read by ranges."""

    pace = REMOTE
    is_shared = True

    def __init__(self, filesystem: Any, path: str, name: str, version: str | None = None):
        """
        Args:
            version: of what cannot change under this path, such as a file at a commit.
        """
        self._filesystem, self._path, self.name, self._fixed = filesystem, path, name, version
        self.size: int = filesystem.size(path)
        self.version: str = version or filesystem.ukey(path)

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        try:
            data = self._filesystem.cat_file(self._path, start=offset, end=offset + len(buffer))
            version = self._fixed or self._filesystem.ukey(self._path)
        except Exception as error:
            raise CheckpointError(
                f"{self.name}: bytes {offset}+{len(buffer)} cannot be read: {one_line(error)}"
            ) from error
        if version != self.version:
            raise changed(self, "its properties are others")
        if len(data) < len(buffer):
            raise ends_early(self, offset + len(data), len(buffer) - len(data))
        if len(data) > len(buffer):
            raise CheckpointError(f"{self.name}: {len(data)} bytes came for {len(buffer)} asked at {offset}")
        buffer[:] = data

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`."""
        return asked(self, lambda: of_properties(self._filesystem.info(self._path)))


class FilesystemFolder:
    """A folder of an fsspec file system."""

    def __init__(self, ref: str):
        self.ref = ref
        try:
            self._filesystem, self._root = fsspec.url_to_fs(ref.rstrip("/"), use_listings_cache=False)
        except Exception as error:
            raise ConfigError(f"model.ref {ref!r} cannot be opened: {one_line(error)}") from error

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        url = f"{self.ref}/{name}"
        return opened(url, lambda: FilesystemFile(self._filesystem, f"{self._root}/{name}", url))
