"""Reads the texts of an evaluation from files of several kinds, and keeps them in one temporary file.

| ending | texts |
|---|---|
| .txt | the file, as UTF-8 |
| .jsonl, .jsonl.gz, .jsonl.zst | one per line: an object with `text`, and optionally `id` |
| .parquet | one per row: the column `text`, or the only column of strings; optionally `id` |

A path may name such a file or a folder of them, on disk or in an object store (`shardplan.storage`). However large the
texts are, only a part of one is in memory at a time: all are copied to a temporary file, in pieces of `PIECE`
characters whose places are known.
"""

import codecs
import gzip
import hashlib
import io
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shardplan.errors import CheckpointError, ConfigError, one_line
from shardplan.plan.serialization import value_kind
from shardplan.storage.stream import FileStream
from shardplan.storage.text_files import PARQUET, PLAIN_TEXT, open_text_files

PIECE = 2**16
"""Number of characters in a piece of a text."""
SHOWN = 40
"""Maximum number of characters of a wrong value that a message shows."""
READ_BYTES = 2**24
"""Bytes that are read at a time from a file."""


@dataclass(frozen=True)
class Text:
    """One text in a `TextStore`."""

    id: str
    characters: int
    digest: str
    """SHA-256 of the text in UTF-8, hexadecimal."""
    pieces: np.ndarray
    """Byte of the store at which each piece of `PIECE` characters begins, and the last ends, int64[piece + 1]."""


@dataclass(frozen=True)
class TextStore:
    """The texts of a run, in a temporary file that is removed with this object."""

    texts: tuple[Text, ...]
    file: Any

    @property
    def path(self) -> str:
        """Path of the temporary file, for other processes of this machine."""
        return str(self.file.name)


def read_characters(path: str, pieces: np.ndarray, start: int, end: int) -> str:
    """Return the characters from `start` to `end` of a text in a store.

    >>> with tempfile.NamedTemporaryFile() as file:
    ...     _ = file.write("één twee".encode()), file.flush()
    ...     read_characters(file.name, np.array([0, 10]), start=4, end=8)
    'twee'

    Args:
        path: path of the `TextStore`.
        pieces: pieces of the `Text`.
    """
    if start >= end:
        return ""
    first, last = start // PIECE, -(-end // PIECE)
    with open(path, "rb") as file:
        file.seek(pieces[first])
        data = file.read(int(pieces[last] - pieces[first]))
    return data.decode()[start - first * PIECE : end - first * PIECE]


def open_texts(path: str, limit: int | None = None) -> TextStore:
    """Read all texts of a file or folder into a store.

    >>> with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
    ...     _ = file.write('{"text": "Call me Ishmael."}'), file.flush()
    ...     store = open_texts(file.name)
    >>> [(text.id, text.characters) for text in store.texts]
    [('1', 16)]

    Args:
        path: a file with an ending that the module's table lists, or a folder of such files, which are read in the
            order of their names; on a local disk, in an object store or on a web server.
        limit: most texts to read; None for all.

    Raises:
        ConfigError: the file or folder does not exist, the content of a file does not fit its ending, there is no text,
            or two texts have the same id.
    """
    store = tempfile.NamedTemporaryFile(prefix="shardplan-texts-")  # noqa: SIM115 - it lives as long as the TextStore
    texts: dict[str, Text] = {}
    places: dict[str, str] = {}
    try:
        for id_, place, parts in _texts(path):
            if len(texts) == limit:
                break
            if id_ in texts:
                raise ConfigError(
                    f"data.path {place}: id {id_!r} is that of {places[id_]} already; the results need a different id "
                    "for each text"
                )
            places[id_] = place
            texts[id_] = _append(store, id_, parts)
    except CheckpointError as error:  # of the storage, which mostly reads checkpoints
        raise ConfigError(f"data.path {path} cannot be read: {error}") from error
    if not any(text.characters for text in texts.values()):
        raise ConfigError(f"data.path {path} holds no text")
    store.flush()
    return TextStore(tuple(texts.values()), store)


def _append(store: Any, id_: str, parts: Iterator[str]) -> Text:
    """Append a text to the store's file, piece by piece."""
    places, digest, characters, rest = [store.tell()], hashlib.sha256(), 0, ""

    def write(piece: str) -> None:
        nonlocal characters
        data = piece.encode()
        store.write(data)
        digest.update(data)
        places.append(store.tell())
        characters += len(piece)

    for part in parts:
        rest += part
        count = len(rest) // PIECE
        for i in range(count):
            write(rest[i * PIECE : (i + 1) * PIECE])
        rest = rest[count * PIECE :]
    if rest:
        write(rest)
    return Text(id_, characters, digest.hexdigest(), np.array(places))


def _texts(path: str) -> Iterator[tuple[str, str, Iterator[str]]]:
    """Yield id, location and parts of every text in a file or folder."""
    files = open_text_files(path)
    for name, file in files:
        stream = io.BufferedReader(FileStream(file), READ_BYTES)
        prefix = f"{name}:" if len(files) > 1 else ""
        lower = name.lower()
        if lower.endswith(PLAIN_TEXT):
            _refuse_json_lines(file.name, stream)
            yield name, file.name, _decode(file.name, stream)
        elif lower.endswith(PARQUET):
            yield from _read_parquet(file.name, stream, prefix)
        else:
            yield from _read_lines(file.name, _decompress(lower, stream), prefix)


def _decode(name: str, stream: Any) -> Iterator[str]:
    """Yield the decoded parts of a UTF-8 file, without the byte order mark."""
    decoder = codecs.getincrementaldecoder("utf-8-sig")()
    try:
        while data := stream.read(READ_BYTES):
            yield decoder.decode(data)
        yield decoder.decode(b"", final=True)
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.path {name} is not UTF-8: {one_line(error)}") from error


def _refuse_json_lines(name: str, stream: Any) -> None:
    """Refuse a .txt file of JSON lines, which would be evaluated as plain text."""
    line = stream.readline(READ_BYTES)
    stream.seek(0)
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return
    if isinstance(row, dict) and isinstance(row.get("text"), str):
        raise ConfigError(f"data.path {name} holds JSON lines; rename it to .jsonl")


def _decompress(name: str, stream: Any) -> Any:
    """Return the stream of a file's content, decompressed if it is a .gz or .zst file."""
    if name.endswith(".gz"):
        return gzip.GzipFile(fileobj=stream)
    if name.endswith(".zst"):
        return io.BufferedReader(pa.CompressedInputStream(pa.PythonFile(stream, "r"), "zstd"), READ_BYTES)
    return stream


def _read_lines(name: str, stream: Any, prefix: str) -> Iterator[tuple[str, str, Iterator[str]]]:
    """Yield the texts of JSON lines; the line number is the id of a text without one."""
    lines = enumerate(stream, start=1)
    while True:
        try:
            number, line = next(lines)
        except StopIteration:
            return
        except (OSError, EOFError, pa.ArrowInvalid) as error:
            raise ConfigError(f"data.path {name} is damaged: {one_line(error)}") from error
        if not line.strip():
            continue
        place = f"data.path {name}, line {number}"
        try:
            row = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{place} is not JSON: {one_line(error)}") from error
        _check_row(place, row)
        id_ = str(row["id"]) if row.get("id") is not None else f"{prefix}{number}"
        yield id_, f"{name}, line {number}", iter([row["text"]])


def _check_row(place: str, row: Any) -> None:
    """Check that a row of JSON lines has a text.

    Raises:
        ConfigError: the row is not an object, or its text is missing, not a string, or not valid Unicode.
    """
    if not isinstance(row, dict):
        raise ConfigError(f"{place} is {value_kind(row)}; it must be an object with the key text, which is a string")
    if "text" not in row:
        keys = ", ".join(row)
        raise ConfigError(
            f"{place} has no key text; it has {keys or 'none'}" + ("; rename the one with the text" if keys else "")
        )
    text = row["text"]
    if not isinstance(text, str):
        shown = "null" if text is None else f"{value_kind(text)}, {json.dumps(text)[:SHOWN]}"
        raise ConfigError(f"{place}: text is {shown}; it must be a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        raise ConfigError(f"{place}: text is no Unicode: {one_line(error)}") from error


def _read_parquet(name: str, stream: Any, prefix: str) -> Iterator[tuple[str, str, Iterator[str]]]:
    """Yield the texts of a Parquet file; the row number is the id of a text without one."""
    try:
        file = pq.ParquetFile(stream)
        schema = file.schema_arrow
        strings = [f.name for f in schema if pa.types.is_string(f.type) or pa.types.is_large_string(f.type)]
        column = "text" if "text" in strings else next(iter({*strings} - {"id"}), None)
        if column is None or (column != "text" and len({*strings} - {"id"}) > 1):
            raise ConfigError(
                f"data.path {name} has the columns {', '.join(schema.names)}; the texts must be in a column of strings "
                "called text"
            )
        columns = [column, *(["id"] if "id" in schema.names else [])]
        number = 0
        for batch in file.iter_batches(batch_size=16, columns=columns):
            for row in batch.to_pylist():
                number += 1
                if row[column] is None:
                    raise ConfigError(f"data.path {name}, row {number}: the text is missing")
                id_ = str(row["id"]) if row.get("id") is not None else f"{prefix}{number}"
                yield id_, f"{name}, row {number}", iter([row[column]])
    except (pa.ArrowException, OSError) as error:
        raise ConfigError(f"data.path {name} is damaged: {one_line(error)}") from error
