"""The folder for a checkpoint: refused if it holds another checkpoint, and marked until the new one is complete.

The mark is a file with the id of the run and the names of all that it writes. A run that is interrupted leaves it
behind; the next run removes those files, and writes its own. A run that ends and sees the mark of another one fails,
for the files of both are mixed then.
"""

import json
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardplan.checkpoint.format.index import INDEX, SINGLE
from shardplan.config.command_flags import Format
from shardplan.errors import ConfigError, names_text
from shardplan.storage import read_bytes
from shardplan.storage.writing import OutputFolder

if TYPE_CHECKING:
    from shardplan.runtime.processes.group import ProcessGroup

CONFIG = "config.json"
LEVANTER_METADATA = "metadata.json"
"""The file that Levanter writes last and that identifies a checkpoint."""
ORBAX_STEP = "0"
"""Folder of the only step of an Orbax checkpoint."""
PLAN = "plan.json"
"""Name of the Plan file beside an Orbax checkpoint."""
OWN_STORES: Mapping[Format, tuple[str, ...]] = {Format.LEVANTER: ("gs", "s3"), Format.ORBAX: ("gs",)}
"""Format -> object stores that its library supports for writing: JAX for Levanter's format, Orbax for its own."""
COMPLETE_FILES: Mapping[Format, tuple[str, ...]] = {
    Format.HF: (CONFIG, INDEX, SINGLE, LEVANTER_METADATA),
    Format.LEVANTER: (CONFIG, INDEX, SINGLE, LEVANTER_METADATA),
    # object stores have no folders, but every step has this file
    Format.ORBAX: (CONFIG, INDEX, SINGLE, LEVANTER_METADATA, PLAN, ORBAX_STEP, f"{ORBAX_STEP}/_CHECKPOINT_METADATA"),
}
"""Format to write -> files and folders of other checkpoints; a folder that has one is refused."""
INCOMPLETE = "shardplan.incomplete"
"""Name of the mark: JSON with the run's id and its files (folders end with `/`), written first and removed last."""


@dataclass(frozen=True)
class Claim:
    """A folder that this run has marked as its own and writes to."""

    folder: OutputFolder
    mark: bytes
    """Content of the mark; only process 0 writes and compares it."""


def open_target(ref: str, file_format: Format = Format.HF, replace: bool = False) -> OutputFolder:
    """Open the folder that `ref` names to write a checkpoint to.

    >>> open_target("az://bucket/model", Format.ORBAX)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: az://bucket/model: checkpoints in the format orbax are written to local ...

    Args:
        file_format: the format of the checkpoint.
        replace: whether the folder may hold a complete checkpoint.

    Raises:
        ConfigError: the folder holds a complete checkpoint already, or cannot be written to.
    """
    scheme, separator, _ = ref.partition("://")
    stores = OWN_STORES.get(file_format)
    if stores is not None and separator and scheme not in stores:
        places = names_text(("local folders", *(f"{store}://" for store in stores)))
        raise ConfigError(
            f"{ref}: checkpoints in the format {file_format} are written to {places}, not {scheme}://; name a folder "
            "there, and copy it"
        )
    target = OutputFolder(ref)
    if replace:
        return target
    marked = _marked_files(target) if target.has_file(INCOMPLETE) else []
    for name in COMPLETE_FILES[file_format]:
        # what is another program's is not removed because an interrupted run has left its mark beside it
        if not _is_within(name, marked) and target.has_file(name):
            raise ConfigError(f"{target.ref} holds {name} already; name another folder, or remove it")
    return target


def claim_target(
    ref: str,
    names: Iterable[str],
    processes: "ProcessGroup",
    file_format: Format = Format.HF,
    replace: bool = False,
) -> Claim:
    """Open a target, mark it as incomplete, and check that all processes see the mark.

    Each process may have a disk of its own on which a folder of that name exists.

    >>> from tempfile import TemporaryDirectory
    >>> from shardplan.runtime.processes.group import open_process_group
    >>> with TemporaryDirectory() as folder, open_process_group() as processes:
    ...     claim = claim_target(folder, [CONFIG, SINGLE], processes)
    ...     json.loads(claim.mark)["files"], claim.folder.has_file(INCOMPLETE)
    (['config.json', 'model.safetensors'], True)

    Args:
        names: the files and folders (with `/` at the end) that all processes together are going to write.
        file_format: the format of the checkpoint.
        replace: whether to remove a complete checkpoint in the folder; otherwise it is refused.
    """
    folder = processes.agree("target", lambda: open_target(ref, file_format, replace), lambda _: {})
    mark = b""
    if processes.process_index == 0:
        old = _marked_files(folder) if folder.has_file(INCOMPLETE) else list_checkpoint_files(folder) if replace else []
        # marked before they are removed: a run that is interrupted here leaves no checkpoint that seems complete
        mark = json.dumps({"run": uuid.uuid4().hex, "files": [*dict.fromkeys([*names, *old])]}).encode()
        write_file(folder, INCOMPLETE, mark)
        for name in old:
            folder.remove(name)
    processes.wait_for_all("claimed")

    def check_shared() -> None:
        if not folder.has_file(INCOMPLETE):
            raise ConfigError(f"{folder.ref} is not the same folder as for process 0; give all processes one folder")

    processes.agree("shared target", check_shared, lambda _: {})
    return Claim(folder, mark)


def complete_target(claim: Claim, processes: "ProcessGroup") -> None:
    """Remove the mark of a checkpoint that all processes have written.

    >>> from tempfile import TemporaryDirectory
    >>> from shardplan.runtime.processes.group import open_process_group
    >>> with TemporaryDirectory() as folder, open_process_group() as processes:
    ...     claim = claim_target(folder, [CONFIG, SINGLE], processes)
    ...     complete_target(claim, processes)
    ...     claim.folder.has_file(INCOMPLETE)
    False

    Raises:
        ConfigError: another run has claimed the folder meanwhile.
    """

    def remove_mark() -> None:
        if processes.process_index != 0:
            return
        if read_bytes(claim.folder.open_for_reading(), INCOMPLETE) != claim.mark:
            raise ConfigError(
                f"another run has written to {claim.folder.ref} meanwhile, and the files of both are mixed; remove the "
                "folder, and write again"
            )
        claim.folder.remove(INCOMPLETE)

    processes.agree("complete", remove_mark, lambda _: {})


def write_file(target: OutputFolder, name: str, text: bytes) -> None:
    """Write a small file.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     write_file(OutputFolder(folder), CONFIG, b"{}")
    ...     read_bytes(OutputFolder(folder).open_for_reading(), CONFIG)
    b'{}'
    """
    with target.create(name) as writer:
        writer.write(text)


def _marked_files(folder: OutputFolder) -> list[str]:
    """Return the files and folders that an interrupted run intended to write.

    Raises:
        ConfigError: the content of the mark is not valid.
    """
    try:
        names = json.loads(read_bytes(folder.open_for_reading(), INCOMPLETE) or b"")["files"]
        if _are_inside(names):
            return list(names)
    except (ValueError, KeyError, TypeError):
        pass
    raise ConfigError(f"{folder.ref} holds a damaged {INCOMPLETE}; look at the folder, and remove that file")


def list_checkpoint_files(folder: OutputFolder) -> list[str]:
    """Return the files of the Hugging Face checkpoint in a folder: config.json, index and weights.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as folder:
    ...     for name in (CONFIG, SINGLE, "tokenizer.json"):
    ...         write_file(OutputFolder(folder), name, b"")
    ...     list_checkpoint_files(OutputFolder(folder))
    ['config.json', 'model.safetensors']
    """
    names = [name for name in (CONFIG, SINGLE, INDEX) if folder.has_file(name)]
    if INDEX not in names:
        return names
    try:
        shards = set(json.loads(read_bytes(folder.open_for_reading(), INDEX) or b"")["weight_map"].values())
        return [*names, *sorted(shards)] if _are_inside(shards) else names
    except (ValueError, KeyError, TypeError, AttributeError):
        return names  # no index that names files


def _is_within(name: str, marked: Iterable[str]) -> bool:
    """Return whether a file or folder is one of `marked`, or lies inside one of them."""
    return any(f"{name}/".startswith(f"{entry.rstrip('/')}/") for entry in marked)


def _are_inside(names: Iterable[object]) -> bool:
    """Return whether all names are relative paths that stay inside the folder."""
    return all(isinstance(name, str) and ".." not in name and not name.startswith("/") for name in names)
