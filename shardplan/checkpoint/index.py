"""Which tensors a Hugging Face checkpoint holds, and where: its index and the headers of its safetensors files.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data).
"""

import json
import math
from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.views import Shape
from shardplan.errors import CheckpointError, one_line
from shardplan.storage import File, Folder, read_bytes

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "I32": np.int32,
        "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2,
    }.items()
}  # fmt: skip
"""safetensors type name -> numpy type."""


@dataclass(frozen=True)
class Tensor:
    """One tensor of a checkpoint."""

    file: File
    offset: int
    """Byte of the file where its data starts."""
    shape: Shape
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        """Length of its data."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_index(folder: Folder) -> dict[str, Tensor]:
    """Every tensor of the checkpoint in `folder`: name -> where it is.

    Raises:
        CheckpointError: no safetensors file, a shard that is missing or lacks a tensor the index promises, or a damaged
            header.
    """
    index = read_bytes(folder, INDEX)
    if index is None:
        file = folder.open(SINGLE)
        if file is None:
            raise CheckpointError(f"{folder.ref} holds neither {INDEX} nor {SINGLE}; is it a safetensors checkpoint?")
        return _read_header(file)
    try:
        weight_map: dict[str, str] = json.loads(index)["weight_map"]
        shards = sorted(set(weight_map.values()))
        if any("/" in shard or shard.startswith(".") for shard in shards):
            raise ValueError("a shard is the name of a file beside the index")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder.ref}/{INDEX} is damaged: {one_line(error)}") from error
    files = {shard: folder.open(shard) for shard in shards}
    missing = [shard for shard, file in files.items() if file is None]
    if missing:
        raise CheckpointError(
            f"{folder.ref}: {len(missing)} of {len(shards)} shards missing: {', '.join(missing)}; download them again"
        )
    headers = {shard: _read_header(file) for shard, file in files.items() if file is not None}
    absent = [name for name, shard in weight_map.items() if name not in headers[shard]]
    if absent:
        raise CheckpointError(f"{folder.ref}: {INDEX} promises {absent[0]} in {weight_map[absent[0]]}, which lacks it")
    return {name: headers[shard][name] for name, shard in weight_map.items()}


def _read_header(file: File) -> dict[str, Tensor]:
    if file.size < 8:
        raise CheckpointError(f"{file.name}: {file.size} bytes is no safetensors file; download it again")
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > file.size - 8:
        raise CheckpointError(f"{file.name}: its header claims {length} bytes, the file has {file.size}")
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    try:
        header = json.loads(bytes(text))
        tensors = {
            name: _tensor(file, 8 + length, name, entry) for name, entry in header.items() if name != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{file.name}: damaged header: {one_line(error)}") from error
    position = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].offset, item[1].nbytes)):
        if tensor.offset != position:
            raise CheckpointError(
                f"{file.name}: {name} starts at byte {tensor.offset}, what precedes ends at {position}"
            )
        position += tensor.nbytes
    if position != file.size:
        raise CheckpointError(f"{file.name}: {file.size - position} bytes after the last tensor")
    return tensors


def _tensor(file: File, data_start: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{file.name}: {name} has type {entry['dtype']}, which is not supported")
    if any(type(n) is not int or n < 0 for n in (begin, end, *shape)):
        raise CheckpointError(
            f"{file.name}: {name} has shape {list(shape)} and offsets {[begin, end]}; both must count"
        )
    if not 0 <= begin <= end <= file.size - data_start:
        raise CheckpointError(f"{file.name}: {name} lies outside the file; it is cut short, download it again")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file.name}: {name} has {end - begin} bytes for shape {shape} of {entry['dtype']}")
    return Tensor(file, data_start + begin, shape, dtype)


def check_tensors(
    found: Mapping[str, Tensor], expected: Mapping[str, Shape], where: str, ignored: Set[str] = frozenset()
) -> None:
    """Compare names and shapes with what the model needs, all differences at once.

    Args:
        ignored: tensors that may be there and are not needed.

    Raises:
        CheckpointError: tensors that are missing, that have another shape, or that the model has no place for.
    """
    missing = sorted(expected.keys() - found.keys())
    unexpected = sorted(name for name in found.keys() - expected.keys() - ignored if not _is_buffer(name))
    mismatched = sorted(name for name in expected.keys() & found.keys() if found[name].shape != expected[name])
    problems = []
    for label, names in (("missing", missing), ("unexpected", unexpected)):
        if names:
            problems.append(f"{len(names)} {label} ({_some(names)})")
    if mismatched:
        shapes = [f"{name} is {found[name].shape}, the model has {expected[name]}" for name in mismatched]
        problems.append(f"{len(mismatched)} of another shape ({_some(shapes)})")
    if problems:
        raise CheckpointError(f"{where} does not hold the model of its config.json: tensors {'; '.join(problems)}")


def _is_buffer(name: str) -> bool:
    """Constants that older transformers versions saved and every implementation recomputes."""
    return name.endswith((".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias"))


def _some(names: list[str], limit: int = 3) -> str:
    more = f", and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
