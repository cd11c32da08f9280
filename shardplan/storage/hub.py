"""Repositories of the Hugging Face hub: what its cache holds is read from there, small files are downloaded into it,
and of large ones only the ranges that are asked for are fetched."""

from pathlib import Path

import huggingface_hub
from huggingface_hub.errors import EntryNotFoundError

from shardplan.errors import ConfigError, one_line
from shardplan.storage.filesystem import FilesystemFile
from shardplan.storage.folder import File, opened
from shardplan.storage.local import LocalFile

STREAMED = ".safetensors"
"""Files that are not downloaded as a whole."""


class HubFolder:
    """A model repository on the Hugging Face hub, at one commit."""

    def __init__(self, ref: str):
        self._repository, _, revision = ref.partition("@")
        self._revision = revision or None
        self._pinned = False
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`. The first file pins the commit that all later ones come from."""
        if self._pinned:
            cached = huggingface_hub.try_to_load_from_cache(self._repository, name, revision=self._revision)
            if isinstance(cached, str):
                return LocalFile(Path(cached))
            if name.endswith(STREAMED) and not huggingface_hub.constants.HF_HUB_OFFLINE:
                return self._streamed(name)
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

    def _streamed(self, name: str) -> File | None:
        filesystem = huggingface_hub.HfFileSystem(use_listings_cache=False)
        path = f"{self._repository}@{self._revision}/{name}"
        url = f"hf://{path}"
        return opened(url, lambda: FilesystemFile(filesystem, path, url, version=self._revision))
