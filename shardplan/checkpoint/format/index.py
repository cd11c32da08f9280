"""The tensors of a Hugging Face checkpoint and their locations, from its index and its safetensors files together.

Which file a tensor is read from:

1. the file that the index lists it in, if that file holds it;
2. otherwise the only file that holds it, among those that the index names, and then `model.safetensors`;
3. without an index, or if none of the files that it names exist, `model.safetensors`.

Whether two files hold the same is only asked where it matters: see `shardplan.checkpoint.match`.
"""

import json
import posixpath
from collections.abc import Collection, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache

from msgspec.structs import replace

from shardplan.checkpoint.format.header import Tensor, read_header
from shardplan.checkpoint.format.strict_json import parse_json
from shardplan.checkpoint.mapping.unneeded import classify_unexpected
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError, one_line
from shardplan.runtime.garbage import without_garbage_collection
from shardplan.storage import Folder, read_bytes
from shardplan.storage.contents import describe_contents, describe_folder, find_unfinished


@dataclass(frozen=True)
class WeightFiles:
    """Names of the weight files in a folder."""

    single: str
    """The file that has all tensors."""
    index: str
    """The index, which lists the file of each tensor."""


SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
MODEL_FILES = WeightFiles(SINGLE, INDEX)
WITHOUT_HEAD = (
    "it was saved from the base model, without the output head: save it from the class for causal language models, or "
    'set "tie_word_embeddings": true in its config.json if the embedding is the head'
)
"""Advice for a checkpoint that lacks only the output head."""
SHOWN = 3
"""Maximum number of tensors that a message names."""
CONCURRENT_FILES = 64
"""Number of files that are opened at the same time; each takes two requests to a remote store, for size and header."""


@dataclass(frozen=True)
class TensorIndex:
    """The tensors of a checkpoint, and the differences between its index and its files."""

    tensors: Mapping[str, Tensor]
    """Tensor name -> tensor."""
    single: Mapping[str, Tensor] = field(default_factory=dict)
    """Tensors of `model.safetensors` if the index does not name it; `tensors` includes those that no other file has."""
    missing_files: tuple[str, ...] = ()
    """Files that the index names and the folder lacks."""
    absent: tuple[str, ...] = ()
    """Tensors that the index lists and no file holds."""
    is_stale: bool = False
    """Whether no file of the index exists, so that all tensors are from `model.safetensors`."""
    rivals: tuple[tuple[str, Tensor], ...] = ()
    """Name and tensor of each further copy of a tensor, if several files hold it and the index lists none of them."""


def read_index(folder: Folder, files: WeightFiles = MODEL_FILES) -> dict[str, Tensor]:
    """Read the index and all headers of the checkpoint in `folder`: tensor name -> tensor.

    >>> import numpy as np
    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"norm": np.ones(4, np.float32)}, f"{folder}/model.safetensors")
    ...     {name: tensor.shape for name, tensor in read_index(open_folder(folder)).items()}
    {'norm': (4,)}

    Raises:
        CheckpointError: see `read_tensor_index`; or a file that the index names is missing.
    """
    index = read_tensor_index(folder, files)
    if index.missing_files:
        raise CheckpointError(missing_files_text(index, folder.ref))
    return dict(index.tensors)


@without_garbage_collection()
def read_tensor_index(folder: Folder, files: WeightFiles = MODEL_FILES) -> TensorIndex:
    """Read the index and all headers of the checkpoint in `folder`.

    >>> import numpy as np
    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"norm": np.ones(4, np.float32)}, f"{folder}/one.safetensors")
    ...     index = {"weight_map": {"norm": "one.safetensors", "embed": "two.safetensors"}}
    ...     _ = Path(folder, INDEX).write_text(json.dumps(index))
    ...     index = read_tensor_index(open_folder(folder))
    >>> list(index.tensors), index.absent, index.missing_files
    (['norm'], ('embed',), ('two.safetensors',))

    Raises:
        CheckpointError: there is no safetensors file, no file that the index names exists, or the index or a header is
            damaged.
    """
    text = read_bytes(folder, files.index)
    file = folder.open(files.single)
    if text is None:
        if file is None:
            raise CheckpointError(_no_weights_text(folder, files))
        return TensorIndex(read_header(file, files.single))
    try:
        weight_map = _parse_weight_map(text)
    except (ValueError, RecursionError) as error:
        problem = describe_contents(text) or f"{one_line(error)}; correct it, or download it again"
        raise CheckpointError(f"{folder.ref}/{files.index} is damaged: {problem}") from error
    paths = sorted(set(weight_map.values()) - {files.single})
    with ThreadPoolExecutor(CONCURRENT_FILES) as pool:
        opened = dict(zip(paths, pool.map(folder.open, paths), strict=True))
        shards = {path: shard for path, shard in opened.items() if shard is not None}
        headers = dict(zip(shards, pool.map(read_header, shards.values(), shards), strict=True))
    missing = [path for path in paths if path not in shards]
    if file is None and not headers:
        raise CheckpointError(missing_files_text(TensorIndex({}, missing_files=tuple(missing)), folder.ref))
    single = read_header(file, files.single) if file is not None else {}
    if single and missing and (not headers or weight_map.keys() <= single.keys()):
        return TensorIndex(single, is_stale=True)
    if single:
        headers[files.single] = single
    is_apart = files.single not in weight_map.values()
    tensors, rivals = _choose_tensors(weight_map, headers, files.single)
    absent = tuple(name for name in weight_map if name not in tensors)
    return TensorIndex(tensors, single if is_apart else {}, tuple(missing), absent, rivals=rivals)


def _choose_tensors(
    weight_map: Mapping[str, str], headers: Mapping[str, Mapping[str, Tensor]], single: str
) -> tuple[dict[str, Tensor], tuple[tuple[str, Tensor], ...]]:
    """Choose the file to read each tensor from: the one in the index, or else the first that holds the tensor.

    Args:
        headers: path of each file -> its tensors; `single` last, unless the index names it.
        single: the file that has all tensors.

    Returns:
        Tensor name -> the tensor that is read, and the `rivals` of `TensorIndex`.
    """
    chosen = {name: headers[path][name] for name, path in weight_map.items() if name in headers.get(path, ())}
    if len(chosen) == sum(map(len, headers.values())):
        return chosen, ()
    unlisted: dict[str, Tensor] = {}
    rivals: list[tuple[str, Tensor]] = []
    for path, header in headers.items():
        for name, tensor in header.items():
            if name in chosen:
                continue
            if name not in unlisted:
                unlisted[name] = replace(tensor, is_listed=False)
            elif path != single:
                rivals.append((name, tensor))
    return {**chosen, **unlisted}, tuple(rivals)


def missing_files_text(index: TensorIndex, where: str) -> str:
    """Return the message for files that are in the index but do not exist.

    >>> from types import SimpleNamespace
    >>> stored = {"embed": SimpleNamespace(file_name="model-00001-of-00002.safetensors")}
    >>> index = TensorIndex(stored, missing_files=("model-00002-of-00002.safetensors",))
    >>> missing_files_text(index, "https://example.org/gpt2")
    'https://example.org/gpt2: 1 of 2 shards missing: model-00002-of-00002.safetensors; download it again'
    """
    missing = index.missing_files
    count = len({tensor.file_name for tensor in index.tensors.values()} | {*missing})
    unfinished = find_unfinished(where)
    begun = f" ({unfinished[0]} is an unfinished download)" if unfinished else ""
    remedy = f"download {'it' if len(missing) == 1 else 'them'} again"
    return f"{where}: {len(missing)} of {count} shards missing: {', '.join(missing)}; {remedy}{begun}"


def _no_weights_text(folder: Folder, files: WeightFiles) -> str:
    """Return the message for a folder without safetensors files of known names."""
    kind = describe_folder(folder.ref, folder)
    text = f"{folder.ref} has neither {files.index} nor {files.single}"
    return f"{text}: {kind}" if kind else f"{text}; is it a safetensors checkpoint?"


def _parse_weight_map(index: bytes) -> dict[str, str]:
    """Parse the content of an index: tensor name -> path of its file in the folder, without `./`.

    Raises:
        ValueError: the index is not JSON, has no valid `weight_map`, or names a file outside of the folder.
    """
    content = parse_json(index.decode(json.detect_encoding(index)))
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if weight_map is None:
        raise ValueError("it has no 'weight_map'")
    if not isinstance(weight_map, dict) or not all(isinstance(path, str) for path in weight_map.values()):
        raise ValueError("its 'weight_map' must map the name of each tensor to the name of its file")
    return {name: _path_in_folder(path) for name, path in weight_map.items()}


@cache  # an index names each of a few files ten thousand times
def _path_in_folder(path: str) -> str:
    """Return the normal form of a path that an index names.

    >>> _path_in_folder("./weights//a.safetensors")
    'weights/a.safetensors'

    Raises:
        ValueError: the path leads out of the folder.
    """
    normal = posixpath.normpath(path)
    if not path or "://" in path or "\\" in path or normal.startswith(("/", "..")) or normal == ".":
        raise ValueError(f"{path!r} must be the name of a file in the folder of the index, or below it")
    return normal


def check_tensors(
    tensors: Mapping[str, Tensor],
    expected: Mapping[str, Shape],
    where: str,
    ignored: Set[str] = frozenset(),
    modules: Set[str] = frozenset(),
    dispensable: Collection[str] = (),
) -> tuple[str, ...]:
    """Compare the names and shapes of stored tensors with the expected ones, and report all differences at once.

    >>> from types import SimpleNamespace
    >>> stored = {"model.norm.weight": SimpleNamespace(shape=(8,))}
    >>> check_tensors(stored, {"model.norm.weight": (8,)}, "here")
    ()

    Args:
        tensors: stored tensors by name.
        expected: shapes that the model needs, by tensor name.
        where: name of the checkpoint for the message.
        ignored: tensors that the model does not need but that may be stored.
        modules: modules without expected parameters; if the checkpoint stores parameters for them, the result would
            change.
        dispensable: parts of names of tensors in the model's blocks that the model does not need.

    Returns:
        The tensors that the model has no use for.

    Raises:
        CheckpointError: tensors are missing, have another shape, or belong to another model.
    """
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = classify_unexpected(tensors.keys() - expected.keys() - ignored, expected, modules, dispensable)
    mismatched = sorted(name for name in expected.keys() & tensors.keys() if tensors[name].shape != expected[name])
    shapes = [f"{name} has {tensors[name].shape}, the model {expected[name]}" for name in mismatched]
    is_headless = bool(missing) and {name.rpartition(".")[0] for name in missing} <= modules
    is_headless = is_headless and not mismatched and not unexpected.foreign
    # where tensors are missing, those of other names show why
    unneeded = unexpected.unneeded if (missing or mismatched) and not is_headless else ()
    unknown = sorted([*unexpected.foreign, *unneeded])
    problems = [
        f"{len(names)} {'tensor' if len(names) == 1 else 'tensors'} {problem} ({_abbreviate(names)})"
        for problem, names in (
            ("missing", missing), ("that the model does not have", unknown), ("with a different shape", shapes),
        )
        if names
    ]  # fmt: skip
    if problems:
        advice = WITHOUT_HEAD if is_headless else unexpected.advice
        advice = f"; {advice}" if advice else ""
        raise CheckpointError(f"{where} does not match the model of its config.json: {'; '.join(problems)}{advice}")
    return unexpected.unneeded


def _abbreviate(names: list[str]) -> str:
    more = f", and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more
