"""Folders of files behind one small interface: local disks, object stores, the Hugging Face hub.

| reference | read through |
|---|---|
| local folder | `os.preadv` |
| `gs://`, `s3://`, `az://`, `http(s)://` | obstore |
| `org/model` or `org/model@revision` | huggingface_hub (its cache), then as a local folder |
"""

import os
import re
from pathlib import Path
from typing import Protocol

from shardplan.errors import CheckpointError, ConfigError, nearest, one_line

REMOTE_SCHEMES = ("gs", "s3", "az", "http", "https")


class File(Protocol):
    """A file that can be read at any offset, from several threads at once."""

    name: str
    size: int
    """Bytes."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises:
            CheckpointError: the file ends before the buffer is full, or cannot be read.
        """


class Folder(Protocol):
    """A folder of files."""

    ref: str
    """What the user called it, with the revision resolved to a commit where there is one."""

    def open(self, name: str) -> File | None:
        """The file called `name`, or None where there is none."""


def open_folder(ref: str) -> Folder:
    """The folder that `ref` names.

    Raises:
        ConfigError: it does not exist, or its scheme is not supported.
    """
    scheme, separator, _ = ref.partition("://")
    if separator:
        if scheme not in REMOTE_SCHEMES:
            raise ConfigError(f"model.ref {ref!r}: unknown scheme {scheme!r}; {nearest(scheme, REMOTE_SCHEMES)}")
        return ObjectFolder(ref)
    if Path(ref).is_dir():
        return LocalFolder(ref)
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", ref) and not Path(ref).parent.is_dir():
        return HubFolder(ref)
    parent = Path(ref).parent
    siblings = [str(entry) for entry in parent.iterdir() if entry.is_dir()] if parent.is_dir() else []
    raise ConfigError(f"checkpoint folder {ref} does not exist; {nearest(ref, siblings)}")


class LocalFile:
    """A file on a local disk."""

    def __init__(self, path: Path):
        self.name = str(path)
        self._descriptor = os.open(path, os.O_RDONLY)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        done = 0
        while done < len(buffer):
            # One preadv moves at most 2 GiB, and may move less.
            count = os.preadv(self._descriptor, [buffer[done:]], offset + done)
            if count == 0:
                raise CheckpointError(
                    f"{self.name}: ends at byte {offset + done}, {len(buffer) - done} bytes before the end of a "
                    "tensor; download the file again"
                )
            done += count

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


class LocalFolder:
    """A folder on a local disk."""

    def __init__(self, ref: str):
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        path = Path(self.ref) / name
        return LocalFile(path) if path.is_file() else None


class ObjectFile:
    """An object in a store, read by ranges."""

    def __init__(self, store: object, name: str, size: int, url: str):
        self._store, self._path, self.size, self.name = store, name, size, url

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """See `File.read_into`."""
        import obstore

        if len(buffer) == 0:
            return
        try:
            data = obstore.get_range(self._store, self._path, start=offset, length=len(buffer))  # type: ignore[arg-type]
        except Exception as error:
            raise CheckpointError(
                f"{self.name}: bytes {offset}+{len(buffer)} cannot be read: {one_line(error)}"
            ) from error
        if len(data) != len(buffer):
            raise CheckpointError(f"{self.name}: {len(data)} bytes came for {len(buffer)} asked at {offset}")
        buffer[:] = memoryview(data)


class ObjectFolder:
    """A prefix in an object store or a folder on a web server."""

    def __init__(self, ref: str):
        import obstore.store

        self.ref = ref
        options = {"allow_http": True} if ref.startswith("http://") else {}
        try:
            self._store = obstore.store.from_url(ref.rstrip("/"), client_options=options)  # type: ignore[call-overload]
        except Exception as error:
            raise ConfigError(f"model.ref {ref!r} cannot be opened: {one_line(error)}") from error

    def open(self, name: str) -> File | None:
        """See `Folder.open`."""
        import obstore

        try:
            size = obstore.head(self._store, name)["size"]
        except FileNotFoundError:
            return None
        except Exception as error:
            raise CheckpointError(f"{self.ref}/{name} cannot be opened: {one_line(error)}") from error
        return ObjectFile(self._store, name, size, f"{self.ref}/{name}")


class HubFolder:
    """A model repository on the Hugging Face hub, one downloaded file at a time."""

    def __init__(self, ref: str):
        self._repository, _, revision = ref.partition("@")
        self._revision = revision or None
        self._pinned = False
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`. The first file pins the commit that all later ones come from."""
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError

        try:
            path = huggingface_hub.hf_hub_download(self._repository, name, revision=self._revision)
        except EntryNotFoundError as error:
            # A FileNotFoundError besides: the hub could not be reached. What the cache holds of the repository is then
            # all there is, and if it holds nothing, the reference is wrong or cannot be had.
            if isinstance(error, FileNotFoundError) and not self._pinned:
                raise ConfigError(
                    f"model.ref {self.ref!r}: no such folder here, and {name} can neither be downloaded from the "
                    "hub nor found in its cache; check the spelling, or give a local folder"
                ) from error
            return None
        except Exception as error:
            raise ConfigError(f"model.ref {self.ref!r}: {one_line(error)}") from error
        # .../snapshots/<commit>/<name>
        self._revision = Path(path).parts[-1 - len(Path(name).parts)]
        self._pinned = True
        self.ref = f"{self._repository}@{self._revision}"
        return LocalFile(Path(path))


def read_bytes(folder: Folder, name: str) -> bytes | None:
    """A whole small file, or None where there is none."""
    file = folder.open(name)
    if file is None:
        return None
    data = bytearray(file.size)
    file.read_into(0, memoryview(data))
    return bytes(data)
