"""The order in which positions are sharded over a ring of devices, and each device's unmasked work. Pure arithmetic.

| order | positions of ring index r, of R |
|---|---|
| contiguous | the r-th of R parts of the sequence |
| zigzag | of 2 R parts the r-th and the r-th from the end: balances causal masks |
| striped | every R-th position, from r on: balances causal masks too, with more blocks |
| documents | the zigzag parts of every document |
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

import numpy as np

from shardplan.errors import ConfigError, nearest
from shardplan.positions.pattern import PADDING, Pattern, PositionRun, position_runs
from shardplan.positions.sequence_order import SequenceOrder

KERNEL_BLOCK = 512
"""Side of the blocks of attention kernels, in tokens; larger ones, as some models request, overflow a v4 core."""
MAX_SEQUENCE_BLOCKS = 256
"""Maximum number of blocks into which a sequence is divided to count its work; longer sequences get larger blocks."""
CACHED_LAYOUTS, CACHED_RESULTS = 64, 4096
"""Maximum numbers of cached positions of layouts and of small results; each packing of documents is a new layout."""
MAX_RUN_PAIRS = 2**20
"""Maximum number of pairs of runs that are compared at once; each pair takes about a hundred bytes."""


@dataclass(frozen=True)
class SequenceLayout:
    """The arrangement of a sequence of `length` positions in an array with `ring` x `ulysses` shards."""

    length: int
    ring: int = 1
    ulysses: int = 1
    kind: SequenceOrder = SequenceOrder.CONTIGUOUS
    documents: tuple[int, ...] | None = None
    """Lengths of the documents, if known, with the sum `length`; the order `documents` depends on them."""

    def __post_init__(self) -> None:
        """Check the order, the number of shards and the documents.

        Raises:
            ConfigError: the order is unknown, there is less than one shard, or documents do not add up to the sequence.
        """
        if self.documents is not None:
            object.__setattr__(self, "documents", tuple(map(int, self.documents)))
        if self.kind not in list(SequenceOrder):
            raise ConfigError(f"layout is {self.kind!r}; {nearest(self.kind, SequenceOrder)}")
        object.__setattr__(self, "kind", SequenceOrder(self.kind))
        if min(self.ring, self.ulysses) < 1:
            raise ConfigError(f"layout: ring {self.ring} x ulysses {self.ulysses}; each must be at least 1")
        if self.documents is not None and (sum(self.documents) != self.length or min(self.documents) < 1):
            raise ConfigError(
                f"layout: documents of {', '.join(map(str, self.documents[:8]))} positions do not add up to the "
                f"{self.length} of the sequence; give the length of every document, each at least 1"
            )

    @property
    def description(self) -> str:
        """The layout in words, for messages."""
        documents = "" if self.documents is None else f" in {len(self.documents)} documents"
        return f"{self.length} positions{documents}, {self.kind} over ring {self.ring} x ulysses {self.ulysses}"

    @property
    def padded_length(self) -> int:
        """Length of the array: a multiple of the number of shards, and for zigzag of the number of parts."""
        parts = self.ring * self.ulysses * (2 if self.kind == SequenceOrder.ZIGZAG else 1)
        return -(-self.length // parts) * parts

    def positions(self) -> np.ndarray:
        """Return int[padded_length]: the position of every array element, `PADDING` for padding."""
        return _positions(self)

    def array_indices(self) -> np.ndarray:
        """Return int[length]: the array index of every position."""
        positions = self.positions()
        indices = np.empty(self.length, np.int32)
        indices[positions[positions != PADDING]] = np.flatnonzero(positions != PADDING)
        return indices

    def positions_by_ring_index(self) -> np.ndarray:
        """Return int[ring, padded_length / ring]: the positions of each ring index."""
        return self.positions().reshape(self.ring, -1)


@lru_cache(maxsize=CACHED_LAYOUTS)
def _positions(layout: SequenceLayout) -> np.ndarray:
    """Return the cached, read-only result of `SequenceLayout.positions`."""
    positions: np.ndarray = np.arange(layout.padded_length, dtype=np.int32)
    positions[layout.length :] = PADDING
    match layout.kind:
        case SequenceOrder.CONTIGUOUS:
            pass
        case SequenceOrder.ZIGZAG:
            parts = positions.reshape(2 * layout.ring, -1)
            positions = np.stack([parts[: layout.ring], parts[: layout.ring - 1 : -1]], axis=1)
        case SequenceOrder.STRIPED:
            positions = positions.reshape(-1, layout.ring).T
        case SequenceOrder.DOCUMENTS:
            positions = _order_by_document(positions, layout)
        case _:
            assert_never(layout.kind)
    positions = positions.reshape(-1)
    positions.flags.writeable = False
    return positions


def _order_by_document(positions: np.ndarray, layout: SequenceLayout) -> np.ndarray:
    """Return int[ring, n]: zigzag parts of each document; other positions go to the ring index with the fewest."""
    parts: list[list[np.ndarray]] = [[] for _ in range(layout.ring)]
    counts = np.zeros(layout.ring, int)
    start, remainders = 0, []
    for n in layout.documents or (layout.length,):
        size = n // (2 * layout.ring)
        for r, part in enumerate(positions[start : start + 2 * layout.ring * size].reshape(2 * layout.ring, size)):
            parts[min(r, 2 * layout.ring - 1 - r)].append(part)
        remainders.append(positions[start + 2 * layout.ring * size : start + n])
        start += n
    for position in np.concatenate([*remainders, positions[layout.length :]]):
        r = int(np.argmin(counts))
        parts[r].append(position[None])
        counts[r] += 1
    shards = [np.concatenate(part) for part in parts]
    # ascending, padding last
    return np.stack([shard[np.argsort(np.where(shard == PADDING, layout.padded_length, shard))] for shard in shards])


def document_ids(layout: SequenceLayout, chunk: int | None = None) -> np.ndarray | None:
    """Return int[position]: the document id of every position; None if the documents are not known.

    Args:
        chunk: number of positions that share an id, counted within each document, or within the sequence if the
            documents are not known.
    """
    if layout.documents is None and chunk is None:
        return None
    lengths = layout.documents or (layout.length,)
    if chunk is not None:
        lengths = tuple(min(chunk, length - start) for length in lengths for start in range(0, length, chunk))
    return np.repeat(np.arange(len(lengths)), lengths)


@lru_cache(maxsize=CACHED_RESULTS)
def ring_distances(queries: SequenceLayout, keys: SequenceLayout, pattern: Pattern) -> tuple[int, ...]:
    """Return the ring distances over which any device needs keys, ascending; 0, for its own keys, is always included.

    At distance d the queries of ring index r need the keys of index r - d. Documents attend only to themselves.
    """
    counts = count_blocks(queries, keys, pattern, max(queries.padded_length, keys.padded_length)).sum(0)
    return (0, *(d for d in range(1, queries.ring) if counts[d]))


def count_blocks(queries: SequenceLayout, keys: SequenceLayout, pattern: Pattern, block: int) -> np.ndarray:
    """Return int[ring, distance]: the number of `block` x `block` tiles of scores with an unmasked pair."""
    (q, q_blocks), (k, k_blocks) = (_runs_by_block(each, block, pattern.chunk) for each in (queries, keys))
    # pair every run of queries with every run of keys of the same document, or of the same chunk of it
    (*_, q_documents), (*_, k_documents) = q, k
    by_document = np.argsort(k_documents)
    first, end = (np.searchsorted(k_documents[by_document], q_documents, side) for side in ("left", "right"))
    i = np.repeat(np.arange(len(first)), end - first)
    j = by_document[np.arange(len(i)) - np.repeat(np.cumsum(end - first) - end, end - first)]
    size, rows, columns = queries.ring, *(-(-each.padded_length // each.ring // block) for each in (queries, keys))
    is_used = np.zeros((size * rows, size * columns), int)
    for pairs in np.array_split(np.stack([i, j]), 1 + len(i) // MAX_RUN_PAIRS, axis=1):
        used_i, used_j = pairs[:, pattern.allows_any(PositionRun(*q[:, pairs[0]]), PositionRun(*k[:, pairs[1]]))]
        is_used[q_blocks[used_i], k_blocks[used_j]] = 1
    counts = is_used.reshape(size, rows, size, columns).sum((1, 3))
    ring = np.arange(size)
    return counts[ring[:, None], (ring[:, None] - ring) % size]


@lru_cache(maxsize=CACHED_RESULTS)
def attended_fraction(layout: SequenceLayout, pattern: Pattern, gathers: bool) -> float:
    """Return the fraction of query x key blocks that a kernel computes, on the device where it is largest.

    Args:
        gathers: whether each device holds all keys at once; otherwise the keys pass around the ring, and every hop
            takes as long as its slowest device.
    """
    shard = layout.padded_length // layout.ring
    block = max(min(KERNEL_BLOCK, shard), -(-layout.padded_length // MAX_SEQUENCE_BLOCKS))
    counts = count_blocks(layout, layout, pattern, block)
    slowest = counts.sum(1).max() if gathers else counts.max(0).sum()
    return float(slowest / (layout.ring * (-(-shard // block)) ** 2))


def _runs_by_block(layout: SequenceLayout, block: int, chunk: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Return the runs of all blocks, int[start count step document, run], and the block index of each run.

    Args:
        chunk: positions of a chunk; every run lies in one chunk.
    """
    ids, step = document_ids(layout, chunk), layout.ring if layout.kind == SequenceOrder.STRIPED else 1
    starts = [(shard, i) for shard in layout.positions_by_ring_index() for i in range(0, len(shard), block)]
    by_block = [position_runs(shard[i : i + block], ids, step) for shard, i in starts]
    flat = [(run.start, run.count, run.step, run.document) for runs in by_block for run in runs]
    return np.array(flat).T, np.repeat(np.arange(len(by_block)), [*map(len, by_block)])
