"""Output folders: object stores are written through obstore, everything else through fsspec.

No file is seen before it is complete: object stores show it then, and a local file has another name until then.
"""

import os
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

WRITABLE_STORES = ("gs", "s3", "az")
PARTIAL_SUFFIX = ".partial"
"""Ending of the name of a local file while it is written."""


class Writer(Protocol):
    """A file opened for writing."""

    def write(self, data: bytes | memoryview, /) -> int:
        """Append `data`; return the number of bytes."""


class OutputFolder:
    """A folder to which files are written."""

    def __init__(self, ref: str) -> None:
        """Open the folder that `ref` names.

        Raises:
            ConfigError: the folder cannot be written to.
        """
        scheme, separator, _ = ref.partition("://")
        self.ref = ref.rstrip("/") if separator else str(Path(ref).expanduser().absolute())
        """The reference as given, or the absolute path of a local folder."""
        self._store: Any = None
        self._is_local = not separator
        try:
            if separator and scheme in WRITABLE_STORES:
                self._store = open_store(self.ref, retries=True)
            else:
                self._filesystem, self._root = fsspec.url_to_fs(self.ref, auto_mkdir=True)
            if self._is_local:
                self._check_local()
        except Exception as error:
            raise self._unusable_error(error) from error

    def open_for_reading(self) -> Folder:
        """Return the same folder, opened for reading."""
        if self._store is not None:
            return ObjectFolder(self.ref)
        return LocalFolder(self.ref) if self._is_local else FilesystemFolder(self.ref)

    def has_file(self, name: str) -> bool:
        """Return whether the folder has a file `name`.

        Raises:
            ConfigError: the store cannot be queried.
        """
        try:
            if self._store is None:
                return bool(self._filesystem.exists(f"{self._root}/{name}"))
            obstore.head(self._store, name)
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._unusable_error(error) from error
        return True

    @contextmanager
    def create(self, name: str) -> Iterator[Writer]:
        """Open a new file that replaces any file `name`; it is complete when the context ends.

        Raises:
            ConfigError: the file cannot be written.
        """
        try:
            if self._store is not None:
                with obstore.open_writer(self._store, name) as writer:
                    yield writer
            elif self._is_local:
                with self._create_local(Path(self.ref) / name) as writer:
                    yield writer
            else:
                with self._filesystem.open(f"{self._root}/{name}", "wb") as writer:
                    yield writer
        except (OSError, exceptions.BaseError) as error:
            raise self._unusable_error(error) from error

    def remove(self, name: str) -> None:
        """Remove a file (also a partly written one) or a folder, if it exists.

        Args:
            name: name of the file or folder; a folder's name ends with `/`.

        Raises:
            ConfigError: the file or folder cannot be removed.
        """
        try:
            if self._store is not None:
                names = [name]
                if name.endswith("/"):
                    names = [entry["path"] for entries in obstore.list(self._store, name) for entry in entries]
                obstore.delete(self._store, names)
            elif self._is_local and not name.endswith("/"):
                for path in (Path(self.ref) / name, Path(self.ref) / f"{name}{PARTIAL_SUFFIX}"):
                    path.unlink(missing_ok=True)
            else:
                self._filesystem.rm(f"{self._root}/{name}", recursive=name.endswith("/"))
        except FileNotFoundError:
            return
        except (OSError, exceptions.BaseError) as error:
            raise self._unusable_error(error) from error

    def remove_partial_files(self) -> None:
        """Remove the partial files that killed writers left in a local folder; other storage shows no partial files."""
        for partial in Path(self.ref).rglob(f"*{PARTIAL_SUFFIX}") if self._is_local else ():
            partial.unlink(missing_ok=True)

    def _check_local(self) -> None:
        """Check that a local folder, and files in it, can be created; raise OSError if not."""
        existing = next(path for path in (Path(self.ref), *Path(self.ref).parents) if path.exists())
        if not existing.is_dir():
            raise NotADirectoryError(f"{existing} is a file, not a folder")
        if not os.access(existing, os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to create files in {existing}")

    @contextmanager
    def _create_local(self, path: Path) -> Iterator[Writer]:
        """Open a local file that has a temporary name until the context ends, and is removed if it fails."""
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + PARTIAL_SUFFIX)
        try:
            with open(partial, "wb") as writer:
                yield writer
            partial.replace(path)
        except BaseException:  # Ctrl-C, too
            partial.unlink(missing_ok=True)
            raise

    def _unusable_error(self, error: Exception) -> ConfigError:
        return ConfigError(f"{self.ref} cannot be written to: {one_line(error)}")
