"""The results folder of a run: a Parquet file per range of windows, either complete or absent.

| file | content |
|---|---|
| run.json | what determines the results; a run with other texts, tokenizer, task, weights or types is refused |
| parts/FIRST-LAST.parquet | the windows FIRST to LAST |
| experts/FIRST-LAST.json | how the tokens of these windows were routed, where statistics of experts were asked for |
| windows.parquet | all windows, once all parts are there |
| summary.json | totals |

After the run, run.json also has the statistics of experts, as `experts`; they determine nothing.

A file appears under its name when it is complete. Runs on other devices may divide the windows into other parts: parts
may overlap then, and each window is taken from the first one that has it.
"""

import io
import json
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from shardplan.errors import ConfigError
from shardplan.monitoring.run_folder import RUN, RunFolder
from shardplan.plan.serialization import json_bytes
from shardplan.storage import Folder, read_bytes
from shardplan.storage.stream import FileStream, Sink
from shardplan.storage.writing import OutputFolder

PARTS, WINDOWS, SUMMARY = "parts", "windows.parquet", "summary.json"
EXPERTS = "experts"
READ_BYTES = 2**20
"""Bytes that are read at a time from a file of results."""
PART, EXPERT_RECORD = re.compile(r"(\d{12})-(\d{12})\.parquet"), re.compile(r"(\d{12})-(\d{12})\.json")


class ResultsFolder(RunFolder):
    """The results folder of one run."""

    records = (EXPERTS,)

    def __init__(self, path: str, schema: pa.Schema):
        """Open the folder at `path` for results with the columns of `schema`."""
        super().__init__(path)
        self._schema = schema

    def finished(self, shards: Sequence[tuple[int, int]]) -> list[int]:
        """Return the shards whose windows have all been written, by this run or an earlier one.

        Args:
            shards: for each shard, its first window, and one past its last.
        """
        spans: list[tuple[int, int]] = []
        """(First, end) of finished windows, with adjacent and overlapping parts merged."""
        for first, end in self._ranges():
            if spans and first <= spans[-1][1]:
                first, end = spans[-1][0], max(spans.pop()[1], end)
            spans.append((first, end))
        starts = [first for first, _ in spans]

        def has(first: int, end: int) -> bool:
            at = bisect_right(starts, first) - 1
            return at >= 0 and end <= spans[at][1]

        return [shard for shard, windows in enumerate(shards) if has(*windows)]

    def write_part(self, first: int, last: int, tables: Iterable[pa.Table]) -> None:
        """Write the results of the windows from `first` to `last`.

        Raises:
            ConfigError: the file cannot be written.
        """
        if first < last:
            self._write_table(_part(first, last), tables)

    def write_experts(self, first: int, last: int, records: Mapping[str, Any]) -> None:
        """Write how the tokens of the windows from `first` to `last` were routed to experts."""
        self._write(f"{EXPERTS}/{first:012d}-{last:012d}.json", json_bytes(records))

    def read_experts(self) -> Iterator[tuple[int, int, dict[str, Any]]]:
        """Yield each record of experts with its range of windows: (first, one past the last, record).

        Runs on other devices write records with overlapping windows; the first of these records counts.
        """
        end, folder = 0, self._folder.open_for_reading()
        for first, last in self._ranges(EXPERTS, EXPERT_RECORD):
            if first >= end:
                end = last
                yield first, last, json.loads(read_bytes(folder, f"{EXPERTS}/{first:012d}-{last:012d}.json") or b"{}")

    def merge(self, total: int) -> None:
        """Write all parts into one file, in the order of the windows.

        Raises:
            ConfigError: some of the `total` windows are in no part.
        """
        needed = []
        """The parts that add windows to earlier parts: range of each part, and the first window that it adds."""
        end = 0
        # an empty part at the end, so that windows that are missing there are noticed as others are
        for first, last in [*self._ranges(), (total, total)]:
            if first > end:
                raise ConfigError(f"output {self.ref} lacks the windows {end} to {first}; start the same command again")
            if last > end:
                needed.append((first, last, end))
                end = last
        folder = self._folder.open_for_reading()

        def read(first: int, last: int, begin: int) -> pa.Table:
            table = _read_parquet(folder, _part(first, last)).read()
            return table if begin == first else table.filter(pc.field("window") >= begin)

        self._write_table(WINDOWS, (read(*each) for each in needed))

    def read_summary(self) -> dict[str, Any] | None:
        """Return the summary; None if it is not written yet."""
        data = read_bytes(self._folder.open_for_reading(), SUMMARY)
        return None if data is None else json.loads(data)

    def write_summary(self, summary: Mapping[str, Any]) -> None:
        """Write the summary."""
        self._write(SUMMARY, json_bytes(summary))

    def add_experts(self, section: Mapping[str, Any]) -> None:
        """Add the statistics of experts of the whole run to `run.json`."""
        self._write(RUN, json_bytes({**self._read_run(), EXPERTS: section}))

    def _ranges(self, subfolder: str = PARTS, pattern: re.Pattern[str] = PART) -> list[tuple[int, int]]:
        """Return (first window, one past the last) of each part, in order."""
        return sorted((int(m[1]), int(m[2])) for name in self._names(subfolder) if (m := pattern.fullmatch(name)))

    def _write_table(self, name: str, tables: Iterable[pa.Table]) -> None:
        """Write each table as one row group of a file."""
        with (
            self._folder.create(name) as file,
            pq.ParquetWriter(Sink(file), self._schema, compression="zstd") as writer,
        ):
            for table in tables:
                writer.write_table(table)


def read_windows(ref: str, columns: Sequence[str] | None = None) -> Iterator[pa.Table]:
    """Yield the merged results of a finished run, in the order of the windows.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as path:
    ...     results = ResultsFolder(path, pa.schema([("window", pa.int64())]))
    ...     results.write_part(0, 2, [pa.table({"window": [0, 1]})])
    ...     results.merge(total=2)
    ...     [table["window"].to_pylist() for table in read_windows(path)]
    [[0, 1]]

    Args:
        ref: the results folder.
        columns: columns to read; None for all.
    """
    file = _read_parquet(OutputFolder(ref).open_for_reading(), WINDOWS)
    for group in range(file.num_row_groups):
        yield file.read_row_group(group, columns)


def _read_parquet(folder: Folder, name: str) -> pq.ParquetFile:
    """Open a Parquet file of a folder on any storage."""
    file = folder.open(name)
    if file is None:
        raise ConfigError(f"{folder.ref} has no {name}")
    return pq.ParquetFile(io.BufferedReader(FileStream(file), READ_BYTES))


def _part(first: int, last: int) -> str:
    """Return the name of the file for a range of windows."""
    return f"{PARTS}/{first:012d}-{last:012d}.parquet"
