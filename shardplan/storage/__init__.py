"""Folders of files behind one small interface: local disks, object stores, web servers, the Hugging Face hub.

| reference | read through |
|---|---|
| local folder | `os.preadv` |
| `gs://`, `s3://`, `az://`, `http(s)://` | obstore |
| `org/model` or `org/model@revision`, also after `hf://` | huggingface_hub: files from its cache, otherwise ranges |
| other schemes that fsspec knows | fsspec |
"""

import os
import re
from pathlib import Path

from fsspec.registry import known_implementations, registry

from shardplan.errors import ConfigError, closest, nearest
from shardplan.storage.folder import File, Folder, RefKey, read_bytes

__all__ = ["File", "Folder", "is_local", "open_adapter", "open_folder", "read_bytes"]

REPOSITORY = r"[\w.-]+/[\w.-]+(@[\w./-]+)?"
"""A model repository of the hub, with or without a revision."""
OBJECT_SCHEMES = ("gs", "s3", "az", "http", "https")


def open_adapter(ref: str | None) -> Folder | None:
    """Return the folder of the adapter that `ref` names; None if `ref` is None.

    Raises:
        ConfigError: see `open_folder`.
    """
    return None if ref is None else open_folder(ref, RefKey.ADAPTER)


def open_folder(ref: str, key: RefKey = RefKey.MODEL) -> Folder:
    """Return the folder that `ref` names.

    Args:
        key: the configuration key of `ref`, for messages.

    Raises:
        ConfigError: the folder does not exist, or its scheme is not supported.
    """
    if "${" in ref:
        raise ConfigError(
            f"{key} {ref!r}: variables are replaced by the shell, not in a file; write out the value, or give "
            f"{'--model' if key is RefKey.MODEL else f'--{key}'} on the command line"
        )
    if ref.startswith("~"):
        ref = os.path.expanduser(ref)
    if ref.startswith("hf://") and re.fullmatch(REPOSITORY, ref.removeprefix("hf://")):
        from shardplan.storage.hub import HubFolder

        return HubFolder(ref.removeprefix("hf://"), key)
    scheme, separator, _ = ref.partition("://")
    if separator and scheme in OBJECT_SCHEMES:
        from shardplan.storage.objects import ObjectFolder

        return ObjectFolder(ref, key)
    if separator:
        schemes = {*OBJECT_SCHEMES, *known_implementations, *registry}
        if scheme not in schemes:
            raise ConfigError(f"{key} {ref!r}: unknown scheme {scheme!r}; {nearest(scheme, schemes)}")
        from shardplan.storage.filesystem import FilesystemFolder

        return FilesystemFolder(ref, key)
    if Path(ref).is_dir():
        from shardplan.storage.local import LocalFolder

        return LocalFolder(ref)
    if _is_repository(ref):
        from shardplan.storage.hub import HubFolder

        return HubFolder(ref, key)
    if Path(ref).is_file():
        raise ConfigError(f"{key} {ref} is a file; name the folder of the {key.noun}")
    raise ConfigError(f"{key.noun} folder {ref} does not exist; {_missing_part(Path(ref))}")


def _missing_part(path: Path) -> str:
    """Describe which part of a path does not exist, and what is near it."""
    missing = path
    while not missing.parent.exists() and not missing.is_symlink():
        missing = missing.parent
    if missing.is_symlink():
        return f"{missing} is a link to {os.readlink(missing)}, which does not exist"
    siblings = [entry.name for entry in missing.parent.iterdir() if entry.is_dir()] if missing.parent.is_dir() else []
    close = closest(missing.name, siblings)
    if close:
        return f"did you mean {str(missing.parent / close)!r}?"
    parent = missing.parent.resolve()
    return f"nothing in {parent} has a similar name" if missing == path else f"{parent} has no {missing.name!r}"


def is_local(ref: str) -> bool:
    """Return whether `ref` names a folder of this machine, which need not exist."""
    return "://" not in ref and not _is_repository(ref)


def _is_repository(ref: str) -> bool:
    """Return whether `ref`, which is not a folder, names a repository of the hub."""
    return re.fullmatch(REPOSITORY, ref) is not None and not Path(ref).parent.is_dir()
