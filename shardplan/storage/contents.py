"""Identifies a file or folder that is no checkpoint, such as a web page or an unfinished download."""

import json
from collections.abc import Iterable, Sequence
from fnmatch import fnmatch
from pathlib import Path

from shardplan.errors import ShardplanError
from shardplan.storage.folder import Folder, read_bytes
from shardplan.storage.listing import list_names

WEB_PAGE = "a web page (HTML), not the file itself: a login or an error was saved in its place; download it again"
BEGINNINGS = (
    (b"<!doctype", WEB_PAGE),
    (b"<html", WEB_PAGE),
    (b"<?xml", "an XML message of a store, not the file itself; download it again"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself; run `git lfs pull` in its folder"),
    (b"pk\x03\x04", "a PyTorch file (or another zip archive); save the model as safetensors with transformers"),
    (b"\x80\x02", "a PyTorch file (a pickle); save the model as safetensors with transformers"),
    (b"gguf", "a GGUF file, which llama.cpp reads; use the safetensors checkpoint that it was made of"),
    (b"\x1f\x8b", "compressed with gzip; unpack it"),
    (bytes(64), "filled with zeros, as an unfinished download leaves it; download it again"),
)  # fmt: skip
"""Beginning of a file of another kind, in lower case without leading white space -> name of the kind."""

UNFINISHED = ("*.incomplete", "*.part", "*.crdownload", "*.aria2", "*.download")
"""Patterns for the names of files that a download has not finished."""
DOWNLOAD_FOLDERS = (".cache/huggingface/download", "../../blobs")
"""Folders in which huggingface_hub keeps unfinished files: of downloads to a local folder, and of its cache."""
ADAPTER = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
"""Names of an adapter's files, as PEFT saves them."""
OTHER_FORMATS: tuple[tuple[tuple[str, ...], str], ...] = (
    (("*.bin", "*.pt", "*.pth"), "its weights are PyTorch files ({}); save them as safetensors: "
     "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(new_folder)"),
    (("consolidated*.safetensors",), "its weights ({}) have the names of Mistral's own format; use the files of the "
     "same repository that transformers reads"),
    (("*.gguf",), "its weights ({}) are for llama.cpp; use the safetensors checkpoint that they were made of"),
    (("tf_model.h5", "flax_model.msgpack"), "its weights ({}) are for TensorFlow or Flax; use the safetensors files"),
    (("*.distcp", "pytorch_model_fsdp*", "global_step*", "zero_pp_rank*"), "it is a distributed training checkpoint "
     "of PyTorch ({}); merge it into a Hugging Face checkpoint first"),
    (("manifest.ocdbt", "_CHECKPOINT_METADATA", "_METADATA", "0/"), "it is a checkpoint of Orbax or Levanter ({}); "
     "convert it to Hugging Face safetensors first"),
    (("*.tar", "*.tar.gz", "*.tgz", "*.zip"), "it holds an archive ({}); unpack it"),
    (("checkpoint-*/", "step-*/", "epoch-*/"), "its checkpoints are in subfolders ({}); name one of them"),
    (("*.safetensors",), "it holds other files ({}); name the folder of the checkpoint"),
)  # fmt: skip
"""Pattern of file names (with a final slash for folders) -> name of the kind of a folder that has such files."""


def describe_contents(start: bytes | bytearray) -> str | None:
    """Identify a file by its first bytes; None if it may be JSON or safetensors.

    >>> describe_contents(b"<!DOCTYPE html><html>")
    'a web page (HTML), not the file itself: a login or an error was saved in its place; download it again'
    >>> describe_contents(b'{"model_type": "llama"}')
    """
    if not start:
        return "empty, as an unfinished download leaves it; download it again"
    text = bytes(start[:256]).lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return next((kind for beginning, kind in BEGINNINGS if text.startswith(beginning)), None)


def describe_folder(ref: str, folder: Folder) -> str | None:
    """Identify a folder without checkpoint files, and suggest what to use instead; None if it is unknown.

    Args:
        ref: the folder, as the user named it or with its revision.
    """
    names = list_names(ref)
    if names is None:
        return None
    snapshot = _describe_cache(Path(ref), names) if "://" not in ref else None
    if snapshot:
        return snapshot
    adapter = _matching(names, ADAPTER)
    if adapter and not _matching(names, ("model*.safetensors", "pytorch_model*.bin")):
        base = adapter_base(folder)
        return (
            f"it is an adapter ({adapter[0]}){f' of {base}' if base else ''}, not a model; name its base model as "
            "model.ref, and this folder as model.adapter"
        )
    unfinished = find_unfinished(ref, names)
    if unfinished:
        return f"its download is not finished ({_shown(unfinished)}); download it again"
    for patterns, sentence in OTHER_FORMATS:
        found = _matching(names, patterns)
        if found:
            return sentence.format(_shown(found))
    return None if names else "the folder is empty"


def find_unfinished(ref: str, names: Iterable[str] | None = None) -> list[str]:
    """Return the names of unfinished downloads in a folder or in its download cache."""
    found = _matching(list_names(ref) or () if names is None else names, UNFINISHED)
    if "://" not in ref:
        for place in DOWNLOAD_FOLDERS:
            folder = Path(ref).resolve() / place
            if place.startswith("..") and Path(ref).resolve().parent.name != "snapshots":
                continue
            found += (str(path.relative_to(folder)) for path in sorted(folder.glob("**/*.incomplete")))
    return found


def find_adapter(folder: Folder) -> str | None:
    """Return the adapter's file in a folder, or below it if it is local; None if there is none."""
    if folder.open(ADAPTER[0]) is not None:
        return ADAPTER[0]
    if "://" in folder.ref or not Path(folder.ref).is_dir():
        return None
    return next((str(path.relative_to(folder.ref)) for path in sorted(Path(folder.ref).glob(f"*/{ADAPTER[0]}"))), None)


def adapter_base(folder: Folder) -> str | None:
    """Return the base model that a folder's adapter_config.json names, if any."""
    try:
        values = json.loads(read_bytes(folder, ADAPTER[0]) or b"{}")
    except (ValueError, ShardplanError):
        return None
    base = values.get("base_model_name_or_path") if isinstance(values, dict) else None
    return base if isinstance(base, str) else None


def _describe_cache(path: Path, names: Sequence[str]) -> str | None:
    """Suggest a snapshot if a local folder is in the cache of huggingface_hub."""
    repositories = [name.rstrip("/") for name in names if name.startswith("models--")]
    if repositories and not path.name.startswith("models--"):
        return f"it is the cache of huggingface_hub; name a repository in it, such as {_repository(repositories[0])}"
    if path.name == "snapshots":
        path, names = path.parent, [f"{path.name}/"]
    if "snapshots/" not in names:
        return None
    snapshots = sorted((path / "snapshots").iterdir())
    main = path / "refs" / "main"
    current = path / "snapshots" / main.read_text().strip() if main.is_file() else None
    if current not in snapshots:
        current = snapshots[-1] if snapshots else None
    repository = _repository(path.resolve().name)
    if current is None:
        return f"it is a folder of the cache of huggingface_hub without a snapshot; download {repository} again"
    return f"it is a folder of the cache of huggingface_hub; name its snapshot, {current}, or {repository}"


def _repository(folder_name: str) -> str:
    """Return the name of a repository, given its folder's name in the cache.

    >>> _repository("models--org--name")
    'org/name'
    """
    return folder_name.removeprefix("models--").replace("--", "/")


def _matching(names: Iterable[str], patterns: Sequence[str]) -> list[str]:
    return [name for name in names if any(fnmatch(name, pattern) for pattern in patterns)]


def _shown(names: Sequence[str]) -> str:
    return f"{names[0]}, and {len(names) - 1} more" if len(names) > 1 else names[0]
