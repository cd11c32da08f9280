"""Model repositories of the Hugging Face hub.

Files in the hub's cache are read from there. Of other files, small ones are downloaded into the cache, and of large
ones only the requested ranges are fetched, as from any web server. The version of all of them is the commit, so that a
file which one host has in its cache is the same as one that another host streams.
"""

from functools import cache
from pathlib import Path

import huggingface_hub
from httpx import TransportError
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import build_hf_headers

from shardplan.errors import ConfigError, one_line
from shardplan.storage.checksums import Checksum, checksum_from_properties
from shardplan.storage.folder import File, RefKey, open_or_none, query_checksum
from shardplan.storage.local import LocalFile
from shardplan.storage.objects import ObjectFile, open_store

STREAMED_SUFFIX = ".safetensors"
"""Suffix of files that are never downloaded completely, only read by ranges."""
WITHOUT_CHECKPOINT = "plan from a config.json or bundled model with model.config"
"""Advice for a folder without the files of a model."""


@cache
def _is_reachable() -> bool:
    """Return whether the hub answers; asked only once, because huggingface_hub retries for half a minute."""
    try:
        huggingface_hub.utils.get_session().head(
            huggingface_hub.constants.ENDPOINT, timeout=huggingface_hub.constants.HF_HUB_ETAG_TIMEOUT
        )
    except (OSError, TransportError):  # of requests, in huggingface_hub 0, and of httpx, in huggingface_hub 1
        return False
    return True


class HubFile(ObjectFile):
    """A file of a repository at a given commit, read by ranges."""

    def __init__(self, repository: str, commit: str, name: str):
        folder = huggingface_hub.hf_hub_url(repository, name, revision=commit).removesuffix(f"/{name}")
        self._location = repository, commit, name
        store = open_store(folder, headers=build_hf_headers())
        super().__init__(store, name, f"hf://{repository}@{commit}/{name}", version=commit)

    def recorded_checksum(self) -> Checksum | None:
        """See `File.recorded_checksum`: the hub has the SHA-256 of large files."""
        repository, commit, name = self._location
        return query_checksum(
            self,
            lambda: checksum_from_properties(
                vars(huggingface_hub.HfApi().get_paths_info(repository, name, revision=commit)[0])
            ),
        )


class HubFolder:
    """A model repository on the Hugging Face hub, at a given commit."""

    def __init__(self, ref: str, key: RefKey = RefKey.MODEL):
        self._repository, _, revision = ref.partition("@")
        self._revision = revision or None
        self._commit: str | None = None
        self._key = key
        self.ref = ref

    def open(self, name: str) -> File | None:
        """See `Folder.open`. The first file determines the commit of all later ones."""
        repository, commit = self._repository, self._commit
        if commit is not None:
            cached = huggingface_hub.try_to_load_from_cache(repository, name, revision=commit)
            if isinstance(cached, str):
                return LocalFile(Path(cached), version=commit)
            if name.endswith(STREAMED_SUFFIX) and not huggingface_hub.constants.HF_HUB_OFFLINE:
                return open_or_none(f"hf://{self.ref}/{name}", lambda: HubFile(repository, commit, name))
        try:
            is_offline = huggingface_hub.constants.HF_HUB_OFFLINE or not _is_reachable()
            path = huggingface_hub.hf_hub_download(
                repository, name, revision=commit or self._revision, local_files_only=is_offline
            )
        except EntryNotFoundError as error:
            # An error that is a FileNotFoundError too means that the hub could not be reached. Then only files in the
            # cache exist, and if none was read so far, the reference is wrong or unavailable.
            if isinstance(error, FileNotFoundError) and commit is None:
                without = "leave it out" if self._key is RefKey.ADAPTER else WITHOUT_CHECKPOINT
                raise ConfigError(
                    f"{self._key} {self.ref!r}: not a local folder, and {name} can neither be downloaded from the "
                    "hub nor read from its cache; check the spelling and the network, name a local folder, or "
                    f"{without}"
                ) from error
            return None
        except Exception as error:
            raise ConfigError(f"{self._key} {self.ref!r}: {one_line(error)}") from error
        # .../snapshots/<commit>/<name>
        self._commit = Path(path).parts[-1 - len(Path(name).parts)]
        self.ref = f"{repository}@{self._commit}"
        return LocalFile(Path(path), version=self._commit)
