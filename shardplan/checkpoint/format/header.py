"""The header of a safetensors file, checked against the rules of the format before any tensor is read.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data without gaps). What
the safetensors library refuses is refused here too, so that a file means the same to both.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError, one_line
from shardplan.storage import File

MOST_HEADER_BYTES = 100_000_000
METADATA = "__metadata__"
"""Name of the entry that is no tensor: texts by name."""
COUNTS = 2**64
"""Numbers of the format are below this, and so are all products of a shape from its first dimension on."""
DTYPES: Mapping[str, np.dtype] = {
    name: np.dtype(kind)
    for name, kind in {
        "BOOL": np.bool_, "U8": np.uint8, "I8": np.int8, "I16": np.int16, "U16": np.uint16, "I32": np.int32,
        "U32": np.uint32, "I64": np.int64, "U64": np.uint64, "F16": np.float16, "BF16": ml_dtypes.bfloat16,
        "F32": np.float32, "F64": np.float64, "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2, "F8_E8M0": ml_dtypes.float8_e8m0fnu,
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


def read_header(file: File) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Raises:
        CheckpointError: the file breaks a rule of the format; which, and where.
    """
    if file.size < 8:
        raise CheckpointError(f"{file.name}: {file.size} bytes is no safetensors file; download it again")
    prefix = bytearray(8)
    file.read_into(0, memoryview(prefix))
    length = int.from_bytes(prefix, "little")
    if length > min(file.size - 8, MOST_HEADER_BYTES):
        raise CheckpointError(f"{file.name}: its header claims {length} bytes, the file has {file.size}")
    text = bytearray(length)
    file.read_into(8, memoryview(text))
    try:
        header = json.loads(text.decode(), object_pairs_hook=distinct, parse_constant=_no_number)
        _check_metadata(header.pop(METADATA, None))
        tensors = {name: _tensor(file, 8 + length, name, entry) for name, entry in header.items()}
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


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; of two entries with one name no reader can say which counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} is there twice")
    for name in found:
        name.encode()  # half of a surrogate pair is no text
    return found


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def _check_metadata(metadata: Any) -> None:
    if metadata is not None and not all(isinstance(text, str) for text in dict.values(metadata)):
        raise ValueError(f"{METADATA} must hold texts")


def _tensor(file: File, data_start: int, name: str, entry: Mapping[str, Any]) -> Tensor:
    begin, end = entry["data_offsets"]
    shape, dtype = tuple(entry["shape"]), DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{file.name}: {name} has type {entry['dtype']}, which is not supported")
    is_list = isinstance(entry["shape"], list) and isinstance(entry["data_offsets"], list)
    if not is_list or any(type(n) is not int or not 0 <= n < COUNTS for n in (begin, end, *shape)):
        raise CheckpointError(
            f"{file.name}: {name} has shape {list(shape)} and offsets {[begin, end]}; both must count"
        )
    if any(math.prod(shape[:i]) * dtype.itemsize >= COUNTS for i in range(len(shape) + 1)):
        raise CheckpointError(f"{file.name}: {name} has shape {list(shape)}, of more numbers than can be counted")
    if not 0 <= begin <= end <= file.size - data_start:
        raise CheckpointError(f"{file.name}: {name} lies outside the file; it is cut short, download it again")
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(f"{file.name}: {name} has {end - begin} bytes for shape {shape} of {entry['dtype']}")
    return Tensor(file, data_start + begin, shape, dtype)
