"""Folders that files are written to: object stores through obstore, everything else through fsspec."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import fsspec
import obstore
from obstore import exceptions

from shardplan.errors import ConfigError, one_line
from shardplan.storage.filesystem import FilesystemFolder
from shardplan.storage.folder import Folder
from shardplan.storage.local import LocalFolder
from shardplan.storage.objects import ObjectFolder, open_store

STORES = ("gs", "s3", "az")


class Writer(Protocol):
    """An open file."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append some bytes."""


class Target:
    """A folder that is written to."""

    def __init__(self, ref: str) -> None:
        """
        Raises:
            ConfigError: it cannot be written to.
        """
        scheme, separator, _ = ref.partition("://")
        self.ref = ref.rstrip("/") if separator else str(Path(ref).expanduser().absolute())
        """As given, or the absolute path of a local folder."""
        self._store: Any = None
        self._is_local = not separator
        try:
            if separator and scheme in STORES:
                self._store = open_store(self.ref, is_retried=True)
            else:
                self._filesystem, self._root = fsspec.url_to_fs(self.ref, auto_mkdir=True)
        except Exception as error:
            raise self._unusable(error) from error

    def folder(self) -> Folder:
        """The same for reading."""
        if self._store is not None:
            return ObjectFolder(self.ref)
        return LocalFolder(self.ref) if self._is_local else FilesystemFolder(self.ref)

    def holds(self, name: str) -> bool:
        """Whether there is a file of that name.

        Raises:
            ConfigError: the store does not say.
        """
        try:
            if self._store is None:
                return bool(self._filesystem.exists(f"{self._root}/{name}"))
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._unusable(error) from error
        return True

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        """A new file, in the place of one of that name, whole when the block ends.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            if self._store is not None:
                with obstore.open_writer(self._store, name) as writer:
                    yield writer
            else:
                with self._filesystem.open(f"{self._root}/{name}", "wb") as writer:
                    yield writer
        except (OSError, exceptions.BaseError) as error:
            raise self._unusable(error) from error

    def _unusable(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.ref} cannot be written to: {one_line(error)}")
