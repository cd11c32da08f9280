"""The results folder of a run: a Parquet file for every range of windows, which is whole or not there.

| file | content |
|---|---|
| run.json | what determines the results; a run with other texts, tokenizer, task, weights or types is refused |
| parts/FIRST-LAST.parquet | the windows FIRST to LAST |
| windows.parquet | all windows, once all parts are there |
| summary.json | totals |

A file appears under its name when it is complete.
"""

import hashlib
import io
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardplan.errors import ConfigError, ShardplanError, one_line
from shardplan.storage import Folder, read_bytes
from shardplan.storage.listing import list_files
from shardplan.storage.stream import FileStream, Sink
from shardplan.storage.writing import PARTIAL_SUFFIX, OutputFolder

RUN, PARTS, WINDOWS, SUMMARY = "run.json", "parts", "windows.parquet", "summary.json"
READ_BYTES = 2**20
"""Bytes that are read from a file of results at a time."""
PART = re.compile(r"(\d{12})-(\d{12})\.parquet")


class ResultsFolder:
    """The results folder of one run."""

    def __init__(self, path: str, schema: pa.Schema):
        """Open the folder at `path` for results with the columns of `schema`."""
        self._folder = OutputFolder(path)
        self.ref = self._folder.ref
        """Absolute path, or URL."""
        self._schema = schema

    def claim(self, determinants: Mapping[str, Any]) -> None:
        """Make the folder that of a run, or check that it is, and remove what was being written when a run ended.

        Args:
            determinants: what determines the results, by name.

        Raises:
            ConfigError: the folder holds something else, or cannot be written to.
        """
        try:
            if not self._folder.has_file(RUN):
                others = [name for name in self._names() if name != RUN + PARTIAL_SUFFIX]
                if others:
                    raise ConfigError(f"output {self.ref} holds {others[0]}, which is no run; name another folder")
                self._write(RUN, json.dumps(determinants, indent=1).encode() + b"\n")
            known = json.loads(read_bytes(self._folder.open_for_reading(), RUN) or b"")
        except (ShardplanError, ValueError) as error:
            raise ConfigError(f"output {self.ref} cannot be used: {one_line(error)}") from error
        self._folder.remove_partial_files()
        wanted = json.loads(json.dumps(determinants))
        for name in wanted:
            if known.get(name) != wanted[name]:
                raise ConfigError(
                    f"output {self.ref} holds the results of another run: its {name} is {_short(known.get(name))}, "
                    f"this run's is {_short(wanted[name])}; name another folder, or remove it"
                )

    def finished(self, shards: Sequence[tuple[int, int]]) -> list[int]:
        """Return the shards whose windows are all in files, and remove the files of the others.

        A run with other devices may have divided the windows differently.

        Args:
            shards: of each shard its first window, and the one after its last.
        """
        ranges = self._ranges()
        done, used = [], set[tuple[int, int]]()
        for shard, (first, end) in enumerate(shards):
            begin = bisect_left(ranges, (first, 0))
            own, at = [each for each in ranges[begin : bisect_left(ranges, (end, 0))] if each[1] <= end], first
            for each in own:
                at = each[1] if each[0] == at else at
            if at == end:
                done.append(shard)
                used.update(own)
        for each in {*ranges} - used:
            self._folder.remove(_part(*each))
        return done

    def write_part(self, first: int, last: int, table: pa.Table) -> None:
        """Write the results of the windows from `first` to `last`.

        Raises:
            ConfigError: the file cannot be written.
        """
        if first < last:
            self._write_table(_part(first, last), [table])

    def merge(self, total: int) -> None:
        """Write all parts into one file, in the order of the windows.

        Raises:
            ConfigError: some of the `total` windows are in no part.
        """
        end = 0
        for first, last in [*self._ranges(), (total, total)]:
            if first != end:
                raise ConfigError(
                    f"output {self.ref} lacks the windows {end} to {first}; all processes must see the same folder"
                )
            end = last
        folder = self._folder.open_for_reading()
        self._write_table(WINDOWS, (read_parquet(folder, _part(*each)).read() for each in self._ranges()))

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary."""
        self._write(SUMMARY, json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n")

    def _ranges(self) -> list[tuple[int, int]]:
        """Return the first window of each part, and the one after its last, in order."""
        return sorted((int(m[1]), int(m[2])) for name in self._names(PARTS) if (m := PART.fullmatch(name)))

    def _names(self, subfolder: str = "") -> list[str]:
        """Return the names of the files in the folder or a subfolder; none if it does not exist."""
        ref = f"{self.ref}/{subfolder}".rstrip("/")
        return list_files(ref) if "://" in ref or Path(ref).is_dir() else []

    def _write_table(self, name: str, tables: Iterable[pa.Table]) -> None:
        """Write tables as the row groups of a file."""
        with (
            self._folder.create(name) as file,
            pq.ParquetWriter(Sink(file), self._schema, compression="zstd") as writer,
        ):
            for table in tables:
                writer.write_table(table)

    def _write(self, name: str, data: bytes) -> None:
        with self._folder.create(name) as file:
            file.write(data)


def read_windows(ref: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the merged results of a finished run, in the order of the windows.

    Args:
        ref: the results folder.
        columns: those to read; None for all.
    """
    file = read_parquet(OutputFolder(ref).open_for_reading(), WINDOWS)
    for group in range(file.num_row_groups):
        yield file.read_row_group(group, columns)


def read_parquet(folder: Folder, name: str) -> pq.ParquetFile:
    """Open a Parquet file of a folder on any storage."""
    file = folder.open(name)
    if file is None:
        raise ConfigError(f"{folder.ref} has no {name}")
    return pq.ParquetFile(io.BufferedReader(FileStream(file), READ_BYTES))


def _part(first: int, last: int) -> str:
    """Return the name of the file of some windows."""
    return f"{PARTS}/{first:012d}-{last:012d}.parquet"


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
