"""Compares the values of two stored tensors, in chunks, up to the first difference."""

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from shardplan.checkpoint.format.header import Tensor

CHUNK_ELEMENTS = 2**20
"""Elements of each tensor that are read at once."""
CONCURRENT_CHUNKS = 8
"""Number of chunks that are read at the same time: some 64 MiB of both tensors in float32."""


def hold_the_same(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Return whether the two tensors of every pair have equal shapes and values; types may differ.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.numpy import save_file
    >>> from shardplan.checkpoint.format.index import read_index
    >>> from shardplan.storage import open_folder
    >>> with TemporaryDirectory() as folder:
    ...     arrays = {"head": np.ones(4, np.float32), "embed": np.ones(4, np.float16), "norm": np.zeros(4, np.float32)}
    ...     save_file(arrays, f"{folder}/model.safetensors")
    ...     stored = read_index(open_folder(folder))
    >>> hold_the_same([(stored["head"], stored["embed"])]), hold_the_same([(stored["head"], stored["norm"])])
    (True, False)

    Raises:
        CheckpointError: a file cannot be read.
    """
    return all(first.shape == second.shape and _compare_chunks(first, second) for first, second in pairs)


def _compare_chunks(first: Tensor, second: Tensor) -> bool:
    """Compare two tensors of one shape."""
    count = first.nbytes // first.dtype.itemsize

    def is_same(start: int) -> bool:
        stop = min(start + CHUNK_ELEMENTS, count)
        return _equal(_read(first, start, stop), _read(second, start, stop))

    # most tensors that differ do so at once
    if count and not is_same(0):
        return False
    pool = ThreadPoolExecutor(CONCURRENT_CHUNKS)
    try:
        return all(pool.map(is_same, range(CHUNK_ELEMENTS, count, CHUNK_ELEMENTS)))
    finally:
        pool.shutdown(cancel_futures=True)


def _read(tensor: Tensor, start: int, stop: int) -> np.ndarray:
    """Read the elements `[start, stop)` of a tensor, in row-major order."""
    size = tensor.dtype.itemsize
    data = bytearray((stop - start) * size)
    tensor.file.read_into(tensor.offset + start * size, memoryview(data))
    return np.frombuffer(data, tensor.dtype)


def _equal(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether all values are equal; NaN equals NaN."""
    if first.dtype == second.dtype and first.tobytes() == second.tobytes():
        return True
    if not all(np.can_cast(values.dtype, np.float64, "safe") or values.dtype.kind == "V" for values in (first, second)):
        return bool(np.array_equal(first, second))
    return bool(np.array_equal(first.astype(np.float64), second.astype(np.float64), equal_nan=True))
