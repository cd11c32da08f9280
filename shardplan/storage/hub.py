"""Model repositories of the Hugging Face hub.

Files in the hub's cache are read from there. Of other files, small ones are downloaded into the cache, and of large
ones only the requested ranges are fetched.
"""

from functools import cache
from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError

from shardplan.errors import ConfigError, one_line
from shardplan.storage.filesystem import FilesystemFile
from shardplan.storage.folder import File, open_or_none
from shardplan.storage.local import LocalFile

STREAMED_SUFFIX = ".safetensors"
"""Suffix of files of which only ranges are fetched."""


@cache
def _is_reachable() -> bool:
    """Whether the hub answers. Asked first, and once: huggingface_hub itself retries for half a minute."""
    try:
        huggingface_hub.utils.get_session().head(
            huggingface_hub.constants.ENDPOINT, timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
        )
    except OSError:  # of requests as well
        return False
    return True


class HubFolder:
    """A model repository on the Hugging Face hub, at one commit."""

    def __init__(self, ref: str):
        self._repository, _, revision = ref.partition("@")
        self._revision = revision or None
        self._pinned = False
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`. The first file determines the commit of all later ones."""
        if self._pinned:
            cached = huggingface_hub.try_to_load_from_cache(self._repository, name, revision=self._revision)
            if isinstance(cached, str):
                return LocalFile(Path(cached))
            if name.endswith(STREAMED_SUFFIX) and not huggingface_hub.constants.HF_HUB_OFFLINE:
                return self._open_stream(name)
        try:
            is_offline = huggingface_hub.constants.HF_HUB_OFFLINE or not _is_reachable()
            path = huggingface_hub.hf_hub_download(
                self._repository, name, revision=self._revision, local_files_only=is_offline
            )
        except EntryNotFoundError as error:
            # An error that is a FileNotFoundError too means that the hub could not be reached. Then only files in the
            # cache exist, and if none was read so far, the reference is wrong or unavailable.
            if isinstance(error, FileNotFoundError) and not self._pinned:
                raise ConfigError(
                    f"model.ref {self.ref!r}: not a local folder, and {name} can neither be downloaded from the "
                    "hub nor read from its cache; check the spelling and the network, name a local folder, or plan "
                    "from a config.json or bundled model with model.config"
                ) from error
            return None
        except Exception as error:
            raise ConfigError(f"model.ref {self.ref!r}: {one_line(error)}") from error
        # .../snapshots/<commit>/<name>
        self._revision = Path(path).parts[-1 - len(Path(name).parts)]
        self._pinned = True
        self.ref = f"{self._repository}@{self._revision}"
        return LocalFile(Path(path))

    def _open_stream(self, name: str) -> File | None:
        filesystem = huggingface_hub.HfFileSystem(use_listings_cache=False)
        path = f"{self._repository}@{self._revision}/{name}"
        url = f"hf://{path}"
        return open_or_none(url, lambda: FilesystemFile(filesystem, path, url, version=self._revision))
