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
import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from shardplan.errors import ConfigError, one_line
from shardplan.storage.writing import PARTIAL_SUFFIX, OutputFolder

RUN, PARTS, WINDOWS, SUMMARY = "run.json", "parts", "windows.parquet", "summary.json"
PART = re.compile(r"(\d{12})-(\d{12})\.parquet")


class ResultsFolder:
    """The results folder of one run."""

    def __init__(self, path: str, schema: pa.Schema):
        """Open the folder at `path` for results with the columns of `schema`."""
        self._folder = OutputFolder(path)
        self.path = Path(self._folder.ref)
        self._schema = schema

    def claim(self, determinants: Mapping[str, Any]) -> None:
        """Make the folder that of a run, or check that it is, and remove what was being written when a run ended.

        Args:
            determinants: what determines the results, by name.

        Raises:
            ConfigError: the folder holds something else, or cannot be written to.
        """
        file = self.path / RUN
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if not file.exists():
                others = sorted(path.name for path in self.path.iterdir() if path.name != file.name + PARTIAL_SUFFIX)
                if others:
                    raise ConfigError(f"output {self.path} holds {others[0]}, which is no run; name another folder")
                self._write(RUN, json.dumps(determinants, indent=1).encode() + b"\n")
            (self.path / PARTS).mkdir(exist_ok=True)
            known = json.loads(file.read_text())
            for partial in self.path.rglob(f"*{PARTIAL_SUFFIX}"):
                partial.unlink()
        except (OSError, ValueError) as error:
            raise ConfigError(f"output {self.path} cannot be used: {one_line(error)}") from error
        wanted = json.loads(json.dumps(determinants))
        for name in wanted:
            if known.get(name) != wanted[name]:
                raise ConfigError(
                    f"output {self.path} holds the results of another run: its {name} is {_short(known.get(name))}, "
                    f"this run's is {_short(wanted[name])}; name another folder, or remove it"
                )

    def finished(self, shards: Sequence[tuple[int, int]]) -> list[int]:
        """Return the shards whose windows are all in files, and remove the files of the others.

        A run with other devices may have divided the windows differently.

        Args:
            shards: of each shard its first window, and the one after its last.
        """
        ranges = sorted((int(m[1]), int(m[2])) for p in self._parts() if (m := PART.fullmatch(p.name)))
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
            self._part(*each).unlink(missing_ok=True)
        return done

    def write_part(self, first: int, last: int, table: pa.Table) -> None:
        """Write the results of the windows from `first` to `last`.

        Raises:
            ConfigError: the file cannot be written.
        """
        if first < last:
            self._write_table(f"{PARTS}/{self._part(first, last).name}", [table])

    def merge(self) -> None:
        """Write all parts into one file, in the order of the windows."""
        tables = (pq.read_table(part) for part in sorted(self._parts()))
        self._write_table(WINDOWS, tables)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary."""
        self._write(SUMMARY, json.dumps(summary, indent=1, allow_nan=False).encode() + b"\n")

    def _parts(self) -> list[Path]:
        return [path for path in (self.path / PARTS).iterdir() if PART.fullmatch(path.name)]

    def _part(self, first: int, last: int) -> Path:
        return self.path / PARTS / f"{first:012d}-{last:012d}.parquet"

    def _write_table(self, name: str, tables: Iterable[pa.Table]) -> None:
        """Write tables as the row groups of a file."""
        with self._folder.create(name) as file, pq.ParquetWriter(file, self._schema, compression="zstd") as writer:
            for table in tables:
                writer.write_table(table)

    def _write(self, name: str, data: bytes) -> None:
        with self._folder.create(name) as file:
            file.write(data)


def read_windows(path: str | Path, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the merged results of a finished run, in the order of the windows.

    Args:
        path: the results folder.
        columns: those to read; None for all.
    """
    file = pq.ParquetFile(Path(path) / WINDOWS)
    for group in range(file.num_row_groups):
        yield file.read_row_group(group, columns)


def digest_of(data: bytes) -> str:
    """Return the SHA-256 of some bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
