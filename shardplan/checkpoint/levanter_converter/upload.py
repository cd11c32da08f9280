"""Uploads a checkpoint to the Hugging Face hub after it was written, as Levanter's converter does."""

import tempfile
from collections.abc import Mapping
from typing import IO, Any

import huggingface_hub
from levanter.compat.hf_checkpoints import RepoRef

from shardplan.checkpoint.saving.save import SLOWEST_BYTES_PER_S
from shardplan.checkpoint.saving.target import list_checkpoint_files
from shardplan.errors import ConfigError, one_line
from shardplan.runtime.processes.group import open_process_group
from shardplan.runtime.processes.watch.activity import DEADLINE_S
from shardplan.storage import File
from shardplan.storage.writing import OutputFolder

UPLOAD_MESSAGE = "Upload checkpoint from Levanter"
"""Commit message if the caller passes none."""


def find_repository(converter: Any, upload_to_hf: bool | str | RepoRef | None) -> RepoRef | None:
    """Return the repository to upload to, if any.

    >>> find_repository(None, False)
    >>> find_repository(None, "org/model@main")
    RemoteRev('org/model', 'main')
    """
    if upload_to_hf is True:
        upload_to_hf = converter.reference_checkpoint
        if upload_to_hf is None:
            raise ConfigError(
                "upload_to_hf is True, and the converter has no reference_checkpoint that it would name; give the "
                "repository as text"
            )
    if not upload_to_hf:
        return None
    return upload_to_hf if isinstance(upload_to_hf, RepoRef) else RepoRef.from_string(str(upload_to_hf))


def make_repository(repository: RepoRef, token: Any) -> None:
    """Make a private repository on the hub, unless it exists; called before the weights are written."""

    def make() -> None:
        if processes.process_index != 0:
            return
        name = repository.model_name_or_path
        try:
            if not huggingface_hub.repo_exists(name, repo_type="model", token=token):
                huggingface_hub.create_repo(name, repo_type="model", exist_ok=True, private=True, token=token)
        except Exception as error:  # of requests, and of the hub
            raise ConfigError(f"cannot upload to {name}: {one_line(error)}") from error

    with open_process_group() as processes:
        processes.agree("repository", make, lambda _: {})


def upload_checkpoint(
    ref: str, names: list[str], repository: RepoRef, nbytes: int, settings: Mapping[str, Any]
) -> None:
    """Upload a checkpoint to the hub from process 0.

    Args:
        ref: folder of the checkpoint.
        names: files beside the weights and config.json.
        nbytes: bytes of the weights.
        settings: further arguments of `upload_folder`.
    """

    def upload() -> None:
        if processes.process_index != 0:
            return
        folder = OutputFolder(ref)
        files = [*list_checkpoint_files(folder), *names]
        arguments = {
            "repo_id": repository.model_name_or_path, "revision": repository.revision,
            "commit_message": UPLOAD_MESSAGE, **settings,
        }  # fmt: skip
        try:
            if "://" not in ref:
                huggingface_hub.upload_folder(folder_path=folder.ref, allow_patterns=files, **arguments)
                return
            source = folder.open_for_reading()
            for name in files:  # one at a time: all of them need not fit on the disk of this host
                with tempfile.NamedTemporaryFile(prefix="shardplan-upload-") as file:
                    stored = source.open(name)
                    assert stored is not None
                    _copy(stored, file)
                    huggingface_hub.upload_file(path_or_fileobj=file.name, path_in_repo=name, **arguments)
        except Exception as error:  # of requests, and of the hub
            raise ConfigError(
                f"{ref} is complete, and cannot be uploaded to {repository.model_name_or_path}: {one_line(error)}"
            ) from error

    with open_process_group() as processes, processes.phase("uploading", DEADLINE_S + nbytes / SLOWEST_BYTES_PER_S):
        processes.agree("upload", upload, lambda _: {})


def _copy(source: File, target: IO[bytes]) -> None:
    """Copy all bytes of a file, piece by piece."""
    for offset in range(0, source.size, source.tuning.bytes_per_read):
        buffer = bytearray(min(source.tuning.bytes_per_read, source.size - offset))
        source.read_into(offset, memoryview(buffer))
        target.write(buffer)
    target.flush()
