"""The header of a safetensors file, checked against the rules of the format before any tensor is read.

Format: https://huggingface.co/docs/safetensors (8 bytes of header length, a JSON header, the data without gaps). What
the safetensors library refuses is refused here too, so that a file means the same to both.
"""

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import ml_dtypes
import numpy as np
from msgspec import Struct

from shardplan.checkpoint.format.header_entries import HeaderEntry, parse_header
from shardplan.checkpoint.mapping.views import Shape
from shardplan.errors import CheckpointError, one_line
from shardplan.storage import File
from shardplan.storage.contents import describe_contents

MAX_HEADER_BYTES = 100_000_000
FIRST_READ_BYTES = 256 * 1024
"""Bytes that are read first from a file, to get its header: nearly every header is shorter."""
INTEGER_LIMIT = 2**64
"""Upper bound (exclusive) of a dimension, and of the bytes of any leading dimensions of a shape."""
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
"""Types of four bits, two elements to a byte, low half first; files store them in tensors of other types."""


class Tensor(Struct, frozen=True, gc=False):  # made in a tenth of a dataclass's time, a hundred thousand times
    """A tensor of a checkpoint, and its location."""

    file: File
    offset: int
    """Byte of the file where the tensor's data starts."""
    shape: Shape
    dtype: np.dtype
    path: str = ""
    """Path of the tensor's file in the checkpoint's folder; if empty, the last part of the file's name."""
    is_listed: bool = True
    """Whether the index lists the tensor in this file, or there is no index."""

    @property
    def file_name(self) -> str:
        """Path of the tensor's file relative to the checkpoint, whether the file is cached or streamed."""
        return self.path or self.file.name.rpartition("/")[2]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor's data."""
        return bytes_of(math.prod(self.shape) * self.bits)

    @property
    def all_bytes(self) -> int:
        """Bytes of the tensor, including scales and other parts that its values need."""
        return self.nbytes

    @property
    def bits(self) -> int:
        """Stored bits per element."""
        return 4 if self.dtype in HALF_BYTES else 8 * self.dtype.itemsize

    @property
    def value_dtype(self) -> np.dtype:
        """Type of the tensor's values."""
        return self.dtype


class ArrayType(NamedTuple):
    """Shape, dtype and bytes of a tensor; tensors with equal ones share one object."""

    shape: Shape
    dtype: np.dtype
    nbytes: int


def bytes_of(bits: int) -> int:
    """Return the number of bytes that hold a number of bits.

    >>> bytes_of(12)
    2
    """
    return -(-bits // 8)


def header_end(start: bytes | bytearray | memoryview) -> int:
    """Return the byte at which the header of a file ends, given at least the first 8 bytes of the file.

    >>> header_end((512).to_bytes(8, "little") + b"{")
    520
    """
    return 8 + int.from_bytes(start[:8], "little")


def read_header(file: File, path: str = "") -> dict[str, Tensor]:
    """Read the header of a safetensors file: tensor name -> tensor.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     save_file({"norm": np.ones(4, np.float32)}, f"{folder}/model.safetensors")
    ...     norm = read_header(open_folder(folder).open("model.safetensors"))["norm"]
    >>> norm.shape, norm.dtype, norm.nbytes
    ((4,), dtype('float32'), 16)

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
        entries = parse_header(bytes(text))
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file.name}: damaged header: {one_line(error)}; download it again") from error
    tensors = {name: _find_tensor(file, path, end, name, entry) for name, entry in entries.items()}
    position = end
    for first, last, name in sorted((*entry.data_offsets, name) for name, entry in entries.items()):
        if end + first != position:
            raise CheckpointError(
                f"{file.name}: {name} starts at byte {end + first}, the preceding data ends at byte {position}"
            )
        position = end + last
    if position != file.size:
        raise CheckpointError(f"{file.name}: {file.size - position} bytes after the last tensor")
    return tensors


@lru_cache(1024)  # layers and experts are alike
def _array_type(type_name: str, shape: Shape) -> ArrayType:
    """Return shape, dtype and bytes of a tensor from its entry in the header.

    Raises:
        ValueError: the type is not supported, or the shape is too large; the caller puts the name before the text.
    """
    dtype = DTYPES.get(type_name)
    if dtype is None:
        raise ValueError(f"has type {type_name}, which is not supported")
    nbytes = dtype.itemsize
    for dimension in shape:
        nbytes *= dimension
        if max(dimension, nbytes) >= INTEGER_LIMIT:
            raise ValueError(f"has shape {shape}, whose size in bytes exceeds 64 bits")
    return ArrayType(shape, dtype, nbytes)


def _find_tensor(file: File, path: str, data_start: int, name: str, entry: HeaderEntry) -> Tensor:
    """Make the tensor that a header entry describes.

    Args:
        data_start: byte of the file where the data of all tensors starts.

    Raises:
        CheckpointError: the type is not supported, the shape is too large, or the data is outside of the file or has
            another size.
    """
    try:
        array = _array_type(entry.dtype, entry.shape)
    except ValueError as error:
        raise CheckpointError(f"{file.name}: {name} {error}") from None
    begin, end = entry.data_offsets
    if not begin <= end <= file.size - data_start:
        raise CheckpointError(f"{file.name}: {name} lies outside the file; it is truncated, download it again")
    if end - begin != array.nbytes:
        raise CheckpointError(f"{file.name}: {name} has {end - begin} bytes for shape {array.shape} of {entry.dtype}")
    return Tensor(file, data_start + begin, array.shape, array.dtype, path)
