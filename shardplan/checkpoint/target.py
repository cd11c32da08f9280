"""The folder that a checkpoint is written to: refused if it holds another, and marked until the checkpoint is complete.

The mark is a file that names all that the run writes. A run that is interrupted leaves it behind; the next
run removes those files, and writes its own.
"""

import json
from collections.abc import Iterable
from typing import TYPE_CHECKING

from shardplan.checkpoint.format.index import INDEX, SINGLE
from shardplan.errors import ConfigError
from shardplan.storage import read_bytes
from shardplan.storage.writing import OutputFolder

if TYPE_CHECKING:
    from shardplan.runtime.process_group import ProcessGroup

CONFIG = "config.json"
LEVANTER_METADATA = "metadata.json"
"""The file that Levanter writes last, and by which it recognises a checkpoint."""
LEVANTER_SCHEMES = ("gs", "s3")
"""Object stores that JAX writes tensorstore arrays to."""
INCOMPLETE = "shardplan.incomplete"
"""The mark: a JSON list of files, and folders with `/` at their end. It is written first and removed last."""


def open_target(ref: str, is_levanter: bool = False) -> OutputFolder:
    """Open the folder that `ref` names to write a checkpoint to.

    Args:
        is_levanter: whether it is a Levanter checkpoint.

    Raises:
        ConfigError: the folder holds a complete checkpoint already, or cannot be written to.
    """
    scheme, separator, _ = ref.partition("://")
    if is_levanter and separator and scheme not in LEVANTER_SCHEMES:
        raise ConfigError(
            f"{ref}: Levanter's checkpoints are written to local folders, gs:// and s3://, not {scheme}://"
        )
    target = OutputFolder(ref)
    if target.has_file(INCOMPLETE):
        return target
    for name in (CONFIG, INDEX, SINGLE, LEVANTER_METADATA):
        if target.has_file(name):
            raise ConfigError(f"{target.ref} holds {name} already; name another folder, or remove it")
    return target


def claim_target(ref: str, names: Iterable[str], processes: "ProcessGroup", is_levanter: bool = False) -> OutputFolder:
    """Open a target, mark it as incomplete, and check that all processes see the mark.

    Each process may have a disk of its own on which a folder of that name exists.

    Args:
        names: the files and folders (with `/` at the end) that all processes together are going to write.
    """
    target = processes.agree("target", lambda: open_target(ref, is_levanter), lambda _: {})
    if processes.process_index == 0:
        for name in _marked_files(target):
            target.remove(name)
        write_file(target, INCOMPLETE, json.dumps([*names]).encode())
    processes.gather("claimed", None)

    def check_shared() -> None:
        if not target.has_file(INCOMPLETE):
            raise ConfigError(f"{target.ref} is not the same folder as for process 0; give all processes one folder")

    processes.agree("shared target", check_shared, lambda _: {})
    return target


def complete_target(target: OutputFolder, processes: "ProcessGroup") -> None:
    """Remove the mark of a checkpoint that all processes have written."""
    if processes.process_index == 0:
        target.remove(INCOMPLETE)
    processes.gather("complete", None)


def write_file(target: OutputFolder, name: str, text: bytes) -> None:
    """Write a small file."""
    with target.create(name) as writer:
        writer.write(text)


def _marked_files(target: OutputFolder) -> list[str]:
    """Return the files and folders that an interrupted run was to write; none if the target is not marked."""
    if not target.has_file(INCOMPLETE):
        return []
    names: list[str] = json.loads(read_bytes(target.open_for_reading(), INCOMPLETE) or b"[]")
    return names
