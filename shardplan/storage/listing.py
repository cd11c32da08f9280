"""The names of the files in a folder; checkpoints need no listing, because their index names their files."""

from pathlib import Path

import fsspec
import obstore

from shardplan.errors import ConfigError, one_line
from shardplan.storage.objects import open_store

LISTED_STORES = ("gs", "s3", "az")
WEB = ("http", "https")


def list_names(ref: str) -> list[str] | None:
    """Return the sorted names of files and folders (with a final slash) in a folder; None if they cannot be listed.

    Only local folders and object stores list subfolders. `ref` may also be a repository of the hub.
    """
    scheme, separator, _ = ref.partition("://")
    try:
        if not separator and not Path(ref).is_dir():
            import huggingface_hub

            repository, _, revision = ref.partition("@")
            return sorted(huggingface_hub.HfApi().list_repo_files(repository, revision=revision or None))
        if not separator:
            return sorted(f"{path.name}/" if path.is_dir() else path.name for path in Path(ref).iterdir())
        if scheme in LISTED_STORES:
            listed = obstore.list_with_delimiter(open_store(ref))
            folders = [f"{prefix.rstrip('/').rpartition('/')[2]}/" for prefix in listed["common_prefixes"]]
            return sorted([*(entry["path"].rpartition("/")[2] for entry in listed["objects"]), *folders])
        return list_files(ref)
    except Exception:  # every store has its own; the name of the folder's kind is only a hint
        return None


def list_files(ref: str) -> list[str]:
    """Return the sorted names of the files in a folder, without subfolders.

    Raises:
        ConfigError: the folder cannot be listed: it does not exist, or is on a web server.
    """
    scheme, separator, _ = ref.partition("://")
    try:
        if not separator:
            return sorted(path.name for path in Path(ref).iterdir() if path.is_file())
        if scheme in LISTED_STORES:
            return sorted(entry["path"] for entry in obstore.list_with_delimiter(open_store(ref))["objects"])
        if scheme not in WEB:
            filesystem, root = fsspec.url_to_fs(ref)
            entries = filesystem.ls(root, detail=True)
            return sorted(entry["name"].rpartition("/")[2] for entry in entries if entry["type"] == "file")
    except Exception as error:  # every store has its own
        raise ConfigError(f"{ref} cannot be listed: {one_line(error)}") from error
    raise ConfigError(f"{ref} cannot be listed, as web servers have no lists of files; name a file in it")
