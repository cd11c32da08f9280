"""Parses the JSON text of a safetensors header: type, shape and location of each tensor.

A giant's checkpoint has a hundred thousand tensors: `msgspec` parses their entries and checks the types of what is in
them in C, in a tenth of the time that Python takes.
"""

import json
from typing import Annotated, Any

import msgspec

from shardplan.checkpoint.format.strict_json import parse_json

METADATA = "__metadata__"
"""Name of the header entry that is not a tensor: a mapping of names to strings."""
NonNegative = Annotated[int, msgspec.Meta(ge=0)]


class HeaderEntry(msgspec.Struct, frozen=True):
    """The header's entry of a tensor."""

    dtype: str
    """Name of the tensor's type in safetensors."""
    shape: tuple[NonNegative, ...]
    data_offsets: tuple[NonNegative, NonNegative]
    """Start and end of the tensor's data, in bytes after the end of the header."""


HEADER = msgspec.json.Decoder(dict[str, msgspec.Raw])
ENTRY = msgspec.json.Decoder(HeaderEntry)


def parse_header(text: bytes) -> dict[str, HeaderEntry]:
    """Parse a header: tensor name -> its entry.

    >>> parse_header(b'{"a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}')
    {'a': HeaderEntry(dtype='F32', shape=(2, 3), data_offsets=(0, 24))}

    Raises:
        ValueError: the header is not JSON, a key occurs twice, or an entry lacks a valid type, shape or offsets. The
            caller checks whether these fit each other and the file.
    """
    try:
        header = HEADER.decode(text)
    except msgspec.ValidationError:
        raise ValueError("it must map names of tensors to their types, shapes and offsets") from None
    metadata = _parse_metadata(header.pop(METADATA, msgspec.Raw(b"null")))
    keys = (1 + len(HeaderEntry.__struct_fields__)) * len(header) + (0 if metadata is None else 1 + len(metadata))
    # a colon follows each key, and others are in texts: where there are no more than keys, no key was there twice
    if b"\\u" in text or text.count(b":") > keys:
        parse_json(text.decode())
    return {name: _parse_entry(name, entry) for name, entry in header.items()}


def _parse_metadata(text: msgspec.Raw) -> dict[str, str] | None:
    try:
        return msgspec.json.decode(text, type=dict[str, str] | None)
    except msgspec.ValidationError:
        raise ValueError(f"{METADATA} must map names to strings") from None


def _parse_entry(name: str, text: msgspec.Raw) -> HeaderEntry:
    try:
        return ENTRY.decode(text)
    except msgspec.ValidationError:
        raise ValueError(f"{name} {_problem_of_entry(json.loads(bytes(text)))}") from None


def _problem_of_entry(entry: Any) -> str:
    """Describe what is wrong with a tensor's entry; the caller puts the tensor's name before the text."""
    missing = [key for key in HeaderEntry.__struct_fields__ if not isinstance(entry, dict) or key not in entry]
    if missing:
        return f"has no {' and no '.join(missing)}"
    if not isinstance(entry["dtype"], str):
        return f"has type {entry['dtype']}, which is not supported"
    return (
        f"has shape {entry['shape']} and offsets {entry['data_offsets']}; both must be lists of non-negative 64-bit "
        "integers, and offsets are two"
    )
