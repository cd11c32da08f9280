"""Read a checkpoint straight into sharded arrays: every local shard is filled in host memory, tensor by tensor, and put
on its device once. Nothing is assembled, no array exists whole unless its sharding says so.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from shardplan.checkpoint.header import Tensor
from shardplan.checkpoint.views import Piece, Shape, View, row_major_strides
from shardplan.runtime.progress import progress_bar

CHUNK_BYTES = 16 * 2**20
"""Most bytes read at once by one thread, and so the size of its staging memory."""
THREADS = 2 * (os.cpu_count() or 1) + 2
"""Reads in flight: a few more than cores, to keep the medium busy while others copy."""
ALIGNMENT = 64
"""Bytes; XLA adopts host memory aligned like this as a CPU device's buffer without a copy."""


@dataclass(frozen=True)
class Shard:
    """The part of an array that some local devices hold."""

    start: Shape
    buffer: np.ndarray
    devices: tuple[jax.Device, ...]

    @property
    def stop(self) -> Shape:
        """One past the last index, per dimension."""
        return tuple(s + n for s, n in zip(self.start, self.buffer.shape, strict=True))


@dataclass(frozen=True)
class Read:
    """Some elements of one tensor, read together, and the shards that take from them."""

    tensor: Tensor
    pieces: tuple[tuple[Shard, Piece], ...]

    @property
    def span(self) -> tuple[int, int]:
        """First element of the tensor that is read, and one past the last."""
        spans = [piece.span for _, piece in self.pieces]
        return min(low for low, _ in spans), max(high for _, high in spans)

    @property
    def nbytes(self) -> int:
        """Bytes read from the file."""
        low, high = self.span
        return (high - low) * self.tensor.dtype.itemsize


def stream_arrays(
    views: Mapping[str, View],
    tensors: Mapping[str, Tensor],
    sharding: Callable[[str], Sharding],
    dtype: Callable[[str], np.dtype],
) -> dict[str, jax.Array]:
    """The arrays that `views` describe, read from `tensors`, sharded and cast.

    Args:
        views: array path -> the tensor elements it is made of.
        tensors: tensor name -> where it lies.
        sharding: the sharding of the array at a path.
        dtype: the type of the array at a path.

    Raises:
        CheckpointError: a file is cut short or cannot be read.
    """
    total = sum(
        read.nbytes for path, view in views.items() for read in _reads(view, tensors, _shards(view, sharding(path)))
    )
    arrays = {}
    with ThreadPoolExecutor(THREADS) as pool, progress_bar(total, "loading", "B") as bar:
        for path, view in views.items():
            shards = _shards(view, sharding(path), dtype(path))
            chunks = (chunk for read in _reads(view, tensors, shards) for chunk in _chunked(read))
            for count in pool.map(_fill, chunks):
                bar.update(count)
            parts = [jax.device_put(shard.buffer, device) for shard in shards for device in shard.devices]
            arrays[path] = jax.make_array_from_single_device_arrays(view.shape, sharding(path), parts)
    return arrays


def _shards(view: View, sharding: Sharding, dtype: np.dtype | None = None) -> list[Shard]:
    """The distinct local shards of an array; without `dtype` their buffers hold no memory."""
    boxes: dict[tuple[Shape, Shape], list[jax.Device]] = {}
    for device, index in sharding.addressable_devices_indices_map(view.shape).items():
        bounds = [part.indices(n) for part, n in zip(index or (), view.shape, strict=True)]
        start, shape = tuple(b[0] for b in bounds), tuple(b[1] - b[0] for b in bounds)
        boxes.setdefault((start, shape), []).append(device)
    return [
        Shard(start, np.broadcast_to(np.uint8(0), shape) if dtype is None else _aligned(shape, dtype), tuple(devices))
        for (start, shape), devices in boxes.items()
    ]


def _aligned(shape: Shape, dtype: np.dtype) -> np.ndarray:
    """Uninitialised memory that JAX can adopt for a CPU device without copying."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)


def _reads(view: View, tensors: Mapping[str, Tensor], shards: list[Shard]) -> Iterator[Read]:
    """What to read for one array.

    A shard whose part of a tensor is contiguous on disk is read by itself. Where parts interleave (a tensor cut along
    an inner dimension), the tensor is read once for all local shards.
    """
    for piece in view.pieces:
        tensor = tensors[piece.tensor]
        parts = [(shard, part) for shard in shards if (part := piece.intersect(shard.start, shard.stop))]
        if all(_is_contiguous(part) for _, part in parts):
            yield from (Read(tensor, (part,)) for part in parts)
        elif parts:
            yield Read(tensor, tuple(parts))


def _is_contiguous(piece: Piece) -> bool:
    low, high = piece.span
    return high - low == piece.size


def _chunked(read: Read) -> Iterator[Read]:
    """`read` in disjoint parts of at most CHUNK_BYTES, cut along the outermost dimension of its pieces together."""
    pieces = [piece for _, piece in read.pieces]
    lows = [min(starts) for starts in zip(*(piece.start for piece in pieces), strict=True)]
    highs = [max(stops) for stops in zip(*(piece.stop for piece in pieces), strict=True)]
    extended = [d for d, (low, high) in enumerate(zip(lows, highs, strict=True)) if high - low > 1]
    if read.nbytes <= CHUNK_BYTES or not extended:
        yield read
        return
    outer = max(extended, key=lambda d: max(piece.strides[d] for piece in pieces))
    low, high = lows[outer], highs[outer]
    count = max(1, (high - low) * CHUNK_BYTES // read.nbytes)
    for start in range(low, high, count):
        parts = tuple(
            (shard, part) for shard, piece in read.pieces if (part := _rows(piece, outer, start, start + count))
        )
        if parts and count > 1:
            yield replace(read, pieces=parts)
        elif parts:
            yield from _chunked(replace(read, pieces=parts))


def _rows(piece: Piece, dimension: int, start: int, stop: int) -> Piece | None:
    low, high = list(piece.start), list(piece.stop)
    low[dimension], high[dimension] = start, stop
    return piece.intersect(tuple(low), tuple(high))


def _fill(read: Read) -> int:
    """Read, and copy into the shards; returns the bytes read."""
    low, high = read.span
    tensor = read.tensor
    itemsize = tensor.dtype.itemsize
    offset = tensor.offset + low * itemsize
    if len(read.pieces) == 1:
        shard, piece = read.pieces[0]
        target = _destination(shard, piece)
        if target.dtype == tensor.dtype and target.flags.c_contiguous and _is_row_major(piece) and piece.scale == 1:
            tensor.file.read_into(offset, target.reshape(-1).view(np.uint8).data)
            return read.nbytes
    staging = np.empty(high - low, tensor.dtype)
    tensor.file.read_into(offset, staging.view(np.uint8).data)
    for shard, piece in read.pieces:
        strides = tuple(k * itemsize for k in piece.strides)
        source: Any = np.lib.stride_tricks.as_strided(staging[piece.offset - low :], piece.shape, strides)
        if piece.scale != 1:
            source = source.astype(np.float32) * np.float32(piece.scale)
        np.copyto(_destination(shard, piece), source, casting="unsafe")
    return read.nbytes


def _destination(shard: Shard, piece: Piece) -> np.ndarray:
    box = (slice(s - o, s - o + n) for s, o, n in zip(piece.start, shard.start, piece.shape, strict=True))
    index: tuple[Any, ...] = (..., *box)  # with the ellipsis a 0-d array too gives a view, not a scalar
    return shard.buffer[index]


def _is_row_major(piece: Piece) -> bool:
    expected = row_major_strides(piece.shape)
    return all(k == e for n, k, e in zip(piece.shape, piece.strides, expected, strict=True) if n > 1)
