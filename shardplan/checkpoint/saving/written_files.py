"""The safetensors files of a written checkpoint: the tensors of each file, its header, and the final check.

The check reads back the header of every file, before the checkpoint counts as complete: what a store acknowledged is
not always what it has.
"""

import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import numpy as np

from shardplan.checkpoint.format.header import DTYPES, read_header
from shardplan.checkpoint.format.header_entries import METADATA
from shardplan.checkpoint.format.index import INDEX, SINGLE
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError
from shardplan.storage import Folder, read_bytes

MAX_FILE_BYTES = 5 * 10**9
"""Maximum bytes of tensors in a file, unless a single tensor has more; the size that transformers uses."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorKind(Protocol):
    """Shape and dtype of a tensor, for the header of its file."""

    @property
    def shape(self) -> Shape:
        """Shape of the tensor."""

    @property
    def dtype(self) -> np.dtype:
        """Type of its elements."""

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""


def assign_files(sizes: Mapping[str, int], processes: int, max_bytes: int | None = None) -> dict[str, list[str]]:
    """Assign tensors to files of about equal size, the same number of files for each process.

    >>> assign_files({"embed": 4, "mlp": 3, "norm": 1}, processes=2)
    {'model-00001-of-00002.safetensors': ['embed'], 'model-00002-of-00002.safetensors': ['mlp', 'norm']}

    Args:
        sizes: tensor name -> bytes.
        max_bytes: most bytes of a file that has more than one tensor; default: MAX_FILE_BYTES.

    Returns:
        File name -> its tensors in order.
    """
    max_bytes = max_bytes or MAX_FILE_BYTES
    total = max(1, sum(sizes.values()))
    count = -(-total // (max_bytes * processes)) * processes
    while True:
        files = _divide(sizes, total, count)
        is_small = all(len(names) == 1 or sum(sizes[name] for name in names) <= max_bytes for names in files)
        if is_small or count >= 2 * len(sizes) * processes:
            break
        count += processes
    if len(files) == 1:
        return {SINGLE: [*sizes]}
    return {f"model-{i + 1:05}-of-{len(files):05}.safetensors": names for i, names in enumerate(files)}


def _divide(sizes: Mapping[str, int], total: int, count: int) -> list[list[str]]:
    """Divide tensors among at most `count` files of about equal size, by the position of each tensor's middle byte."""
    files: defaultdict[int, list[str]] = defaultdict(list)
    for (name, size), stop in zip(sizes.items(), itertools.accumulate(sizes.values()), strict=True):
        files[(stop - size // 2) * count // (total + 1)].append(name)
    return [names for _, names in sorted(files.items())]


def encode_header(tensors: Mapping[str, TensorKind]) -> bytes:
    """Encode the header of a safetensors file with these tensors.

    >>> from types import SimpleNamespace
    >>> tensor = SimpleNamespace(shape=(8,), dtype=np.dtype(np.float16), nbytes=16)
    >>> header = encode_header({"norm": tensor})
    >>> int.from_bytes(header[:8], "little") == len(header[8:])
    True
    >>> header[8:].rstrip()
    b'{"__metadata__":{"format":"pt"},"norm":{"dtype":"F16","shape":[8],"data_offsets":[0,16]}}'
    """
    entries: dict[str, Any] = {METADATA: {"format": "pt"}}
    offset = 0
    for name, tensor in tensors.items():
        offsets = [offset, offset + tensor.nbytes]
        entries[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # aligns the tensors
    return len(text).to_bytes(8, "little") + text


def encode_index(files: Mapping[str, list[str]], tensors: Mapping[str, TensorKind]) -> dict[str, bytes]:
    """Return the index as file name -> content; empty if there is only one safetensors file.

    >>> from types import SimpleNamespace
    >>> files = {"one.safetensors": ["embed"], "two.safetensors": ["norm"]}
    >>> tensor = SimpleNamespace(nbytes=8)
    >>> list(encode_index(files, {"embed": tensor, "norm": tensor}))
    ['model.safetensors.index.json']
    >>> encode_index({"model.safetensors": ["embed", "norm"]}, {"embed": tensor, "norm": tensor})
    {}
    """
    if SINGLE in files:
        return {}
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": {name: file for file, names in files.items() for name in names},
    }
    return {INDEX: json.dumps(index, indent=2).encode()}


def check_files_written(folder: Folder, files: Mapping[str, Iterable[str]], tensors: Mapping[str, TensorKind]) -> None:
    """Read back the headers of `files`, and compare names, shapes and dtypes with `tensors`.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"norm": np.ones(4, np.float32)}, f"{folder}/{SINGLE}")
    ...     check_files_written(open_folder(folder), {SINGLE: ["norm"]}, {"norm": np.ones(8)})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.CheckpointError: .../model.safetensors is not what was written: norm is float32[4], not ...

    Raises:
        CheckpointError: a file is missing, damaged, or has other tensors.
    """
    for file_name, names in files.items():
        file = folder.open(file_name)
        if file is None:
            raise _other_content(folder, file_name, "it is missing")
        actual = read_header(file)
        for name in dict.fromkeys([*names, *actual]):
            stored, expected = _kind_text(actual.get(name)), _kind_text(tensors.get(name))
            if stored != expected:
                raise _other_content(folder, file_name, f"{name} is {stored}, not {expected}")


def _kind_text(tensor: TensorKind | None) -> str:
    """Return dtype and shape of a tensor, such as float32[2, 3]."""
    return "absent" if tensor is None else f"{tensor.dtype}{list(tensor.shape)}"


def check_small_files_written(folder: Folder, files: Mapping[str, bytes]) -> None:
    """Read back small files, such as config.json and the index.

    >>> from pathlib import Path
    >>> from tempfile import TemporaryDirectory
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     _ = Path(folder, "config.json").write_text("{}")
    ...     check_small_files_written(open_folder(folder), {"config.json": b"[]"})  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.CheckpointError: .../config.json is not what was written: its content differs; ...

    Raises:
        CheckpointError: a file is missing or has other content.
    """
    for name, content in files.items():
        if read_bytes(folder, name) != content:
            raise _other_content(folder, name, "its content differs")


def _other_content(folder: Folder, name: str, difference: str) -> CheckpointError:
    return CheckpointError(f"{folder.ref}/{name} is not what was written: {difference}; write the checkpoint again")
