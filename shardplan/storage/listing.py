"""The names of the files in a folder; checkpoints need none, for their index names them."""

from pathlib import Path

import fsspec
import obstore

from shardplan.errors import ConfigError, one_line
from shardplan.storage.objects import open_store

LISTED_STORES = ("gs", "s3", "az")
WEB = ("http", "https")


def list_files(ref: str) -> list[str]:
    """Return the names of the files in a folder, without those of its subfolders, in order.

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
