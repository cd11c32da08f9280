"""Measures the speed of reading a few MiB of some files, in the way that loads and evaluations read them."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from shardplan.hardware import Slice
from shardplan.runtime.progress import rate_text, size_text
from shardplan.storage import File

SAMPLE_BYTES, READS = 2**20, 16
"""Bytes of a read, and the number of reads, which are spread over the files."""


def measure_reads(files: Sequence[File], hardware: Slice | None) -> str:
    """Read a sample of files; describe the measured speed, and the speed that forecasts assume.

    Raises:
        CheckpointError: a file cannot be read.
    """
    ranges = [(file, offset) for file in files for offset in _offsets(file, -(-READS // len(files)))][:READS]
    started = time.perf_counter()
    with ThreadPoolExecutor(len(ranges) or 1) as pool:
        total = sum(pool.map(_read, *zip(*ranges, strict=True))) if ranges else 0
    seconds = time.perf_counter() - started
    text = f"{size_text(total)} read at {rate_text(total / seconds)}"
    if hardware is not None:
        text += f" ({rate_text(hardware.host_network_bandwidth)} assumed by forecasts)"
    return text


def _offsets(file: File, count: int) -> list[int]:
    """Return the byte offsets of the samples, spread over a file."""
    last = max(0, file.size - SAMPLE_BYTES)
    return sorted({last * i // max(1, count - 1) for i in range(count)}) if file.size else []


def _read(file: File, offset: int) -> int:
    buffer = bytearray(min(SAMPLE_BYTES, file.size - offset))
    file.read_into(offset, memoryview(buffer))
    return len(buffer)
