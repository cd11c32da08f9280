"""Folders that files are written to: object stores through obstore, everything else through fsspec."""

from contextlib import AbstractContextManager
from typing import Protocol

import fsspec

from shardplan.errors import ConfigError, one_line

STORES = ("gs", "s3", "az")


class Writer(Protocol):
    """An open file."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append some bytes."""


class Target:
    """A folder that is written to.

    Raises:
        ConfigError: it cannot be.
    """

    def __init__(self, ref: str) -> None:
        self.ref = ref.rstrip("/")
        scheme, separator, _ = ref.partition("://")
        try:
            if separator and scheme in STORES:
                from shardplan.storage.objects import open_store

                self._store = open_store(self.ref)
            else:
                self._store = None
                self._filesystem, self._root = fsspec.url_to_fs(self.ref, auto_mkdir=True)
        except Exception as error:
            raise ConfigError(f"output {ref!r} cannot be written: {one_line(error)}") from error

    def create(self, name: str) -> AbstractContextManager[Writer]:
        """A new file, in the place of one of that name.

        Raises:
            ConfigError: it cannot be written.
        """
        try:
            if self._store is not None:
                import obstore

                return obstore.open_writer(self._store, name)
            found: AbstractContextManager[Writer] = self._filesystem.open(f"{self._root}/{name}", "wb")
            return found
        except Exception as error:
            raise ConfigError(f"output {self.ref}/{name} cannot be written: {one_line(error)}") from error
