"""The header of a safetensors file, checked against the rules of the format before any tensor is read.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data without gaps). What
the safetensors library refuses is refused here too, so that a file means the same to both.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import ml_dtypes
import numpy as np

from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError, one_line
from shardplan.storage import File
from shardplan.storage.contents import describe_contents

MAX_HEADER_BYTES = 100_000_000
FIRST_READ_BYTES = 256 * 1024
"""Bytes of a file that are read at once to have its header: nearly every header is shorter."""
METADATA = "__metadata__"
"""Name of the header entry that is not a tensor: a mapping of names to strings."""
OFFSETS = "data_offsets"
ENTRY_KEYS = ("dtype", "shape", OFFSETS)
"""Keys of the header entry of a tensor."""
ENTRY_VALUES = itemgetter(*ENTRY_KEYS)
INTEGER_LIMIT = 2**64
"""Upper bound (exclusive) of dimensions and offsets, and of the bytes of every leading part of a shape."""
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
UINT4, E2M1 = np.dtype(ml_dtypes.uint4), np.dtype(ml_dtypes.float4_e2m1fn)
HALF_BYTES = frozenset((UINT4, E2M1))
"""Types of four bits. Files have them within tensors of other types; of two in a byte, the first is in the low half."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of a checkpoint, and its location."""

    file: File
    offset: int
    """Byte of the file where its data starts."""
    shape: Shape
    dtype: np.dtype
    path: str = ""
    """Path of its file in the folder of the checkpoint, if that is not the last part of the file's name."""
    is_listed: bool = True
    """Whether the index lists it in this file, or there is no index."""

    @property
    def file_name(self) -> str:
        """Path of its file in the checkpoint's folder: one host may read from its cache what another streams."""
        return self.path or self.file.name.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        """Length of its data."""
        return bytes_of(math.prod(self.shape) * self.bits)

    @property
    def all_bytes(self) -> int:
        """Length of its data, and of scales and other parts that its numbers need."""
        return self.nbytes

    @property
    def bits(self) -> int:
        """Bits of an element, as it is stored."""
        return 4 if self.dtype in HALF_BYTES else 8 * self.dtype.itemsize

    @property
    def value_dtype(self) -> np.dtype:
        """Type of its numbers."""
        return self.dtype


def bytes_of(bits: int) -> int:
    """Return the bytes that hold a number of bits.

    >>> bytes_of(12)
    2
    """
    return -(-bits // 8)


def header_end(start: bytes | bytearray | memoryview) -> int:
    """Return the byte at which the header of a file ends, from the first 8 or more bytes of the file."""
    return 8 + int.from_bytes(start[:8], "little")


def read_header(file: File, path: str = "") -> dict[str, Tensor]:
    """Read the header of a safetensors file: tensor name -> tensor.

    Args:
        path: path of the file in the folder of the checkpoint; default: the last part of its name.

    Raises:
        CheckpointError: the file breaks a rule of the format; the message says which, and where.
    """
    start = bytearray(min(file.size, FIRST_READ_BYTES))
    if file.size:  # some stores take a request for nothing
        file.read_into(0, memoryview(start))
    other_kind = describe_contents(start) if start[8:9] != b"{" else None
    if other_kind:
        raise CheckpointError(f"{file.name}: {other_kind}")
    if file.size < 8:
        raise CheckpointError(f"{file.name}: {file.size} bytes is too short for a safetensors file; download it again")
    end = header_end(start)
    length = end - 8
    if length > min(file.size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(f"{file.name}: its header claims {length} bytes, the file has {file.size}")
    rest = bytearray(max(0, end - len(start)))
    if rest:
        file.read_into(len(start), memoryview(rest))
    text = (start + rest)[8:end]
    try:
        header = parse_json(text.decode(), _reject_constant)
        if not isinstance(header, dict):
            raise ValueError("it must map names of tensors to their types, shapes and offsets")
        _check_metadata(header.pop(METADATA, None))
        tensors = {name: _parse_tensor(file, path, end, name, entry) for name, entry in header.items()}
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name}: damaged header: {one_line(error)}") from error
    position = end
    for first, last, name in sorted((*entry[OFFSETS], name) for name, entry in header.items()):
        if end + first != position:
            raise CheckpointError(
                f"{file.name}: {name} starts at byte {end + first}, the preceding data ends at byte {position}"
            )
        position = end + last
    if position != file.size:
        raise CheckpointError(f"{file.name}: {file.size - position} bytes after the last tensor")
    return tensors


def parse_json(text: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Parse JSON, and refuse keys that occur twice in an object.

    Args:
        parse_constant: as `json.loads` has it.

    Raises:
        ValueError: it is not JSON, or a key occurs twice or is not valid Unicode.
    """
    if "\\u" not in text:  # only escapes make half of a surrogate pair
        parsed = json.loads(text, parse_constant=parse_constant)
        # a colon follows each key, and others are in texts: where there are no more than keys, no key was there twice
        if text.count(":") == _count_keys(parsed):
            return parsed
    return json.loads(text, object_pairs_hook=_reject_duplicate_keys, parse_constant=parse_constant)


def _count_keys(value: Any) -> int:
    """Return the number of keys of an object, and of the objects that are its values; headers have no others."""
    if not isinstance(value, dict):
        return 0
    return len(value) + sum(len(each) for each in value.values() if type(each) is dict)


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object, as `object_pairs_hook`; ValueError for a key that occurs twice or is not valid Unicode."""
    entries = dict(pairs)
    if len(entries) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        raise ValueError(f"duplicate key {next(name for name, count in counts.items() if count > 1)!r}")
    "".join(entries).encode()  # raises for half of a surrogate pair
    return entries


def _reject_constant(text: str) -> None:
    raise ValueError(f"{text} is not valid JSON")


def _check_metadata(metadata: Any) -> None:
    if metadata is None:
        return
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise ValueError(f"{METADATA} must map names to strings")


def _parse_tensor(file: File, path: str, data_start: int, name: str, entry: Any) -> Tensor:
    """Parse the header entry of one tensor.

    Args:
        data_start: byte of the file where the data of all tensors starts.

    Raises:
        ValueError: the entry has no type, shape or offsets.
        CheckpointError: an unsupported type, invalid shape or offsets, or data outside of the file.
    """
    try:
        type_name, shape, offsets = ENTRY_VALUES(entry)
    except (KeyError, TypeError):
        missing = [key for key in ENTRY_KEYS if not isinstance(entry, dict) or key not in entry]
        raise ValueError(f"{name} has no {' and no '.join(missing)}") from None
    dtype = DTYPES.get(type_name) if isinstance(type_name, str) else None
    if dtype is None:
        raise CheckpointError(f"{file.name}: {name} has type {type_name}, which is not supported")
    if not _is_sizes(shape) or not _is_sizes(offsets) or len(offsets) != 2:
        raise CheckpointError(
            f"{file.name}: {name} has shape {shape} and offsets {offsets}; both must be lists of non-negative 64-bit "
            "integers, and offsets are two"
        )
    begin, end = offsets
    size = dtype.itemsize
    for dimension in shape:
        size *= dimension
        if size >= INTEGER_LIMIT:
            raise CheckpointError(f"{file.name}: {name} has shape {shape}, whose size in bytes exceeds 64 bits")
    if not 0 <= begin <= end <= file.size - data_start:
        raise CheckpointError(f"{file.name}: {name} lies outside the file; it is truncated, download it again")
    if end - begin != size:
        raise CheckpointError(f"{file.name}: {name} has {end - begin} bytes for shape {tuple(shape)} of {type_name}")
    return Tensor(file, data_start + begin, tuple(shape), dtype, path)


def _is_sizes(value: Any) -> bool:
    """Whether `value` is a list of non-negative 64-bit integers."""
    if not isinstance(value, list):
        return False
    # a header has tens of thousands of short lists, for which `all` of a generator takes twice as long
    for number in value:  # noqa: SIM110
        if type(number) is not int or not 0 <= number < INTEGER_LIMIT:
            return False
    return True
