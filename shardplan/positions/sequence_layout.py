"""In which order a sequence is cut over the devices of a ring, and what its mask makes of that. Pure arithmetic.

| layout | the region of ring index r, of R |
|---|---|
| contiguous | the r-th part of the sequence |
| zigzag | of 2 R parts the r-th and the last but r: as much to do for each where the mask is causal |
| striped | every R-th position, from r on: the same, in more blocks |
| documents | of every document what zigzag has of a sequence |
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from shardplan.errors import ConfigError, nearest
from shardplan.positions.pattern import PADDING, Pattern, Run, runs_of

KERNEL_BLOCK = 512
"""Side of the blocks of attention kernels, tokens. Some of Levanter's models ask for more than the memory of a v4 core
can hold."""
MOST_BLOCKS = 256
"""Blocks that a sequence is looked at in: longer ones in larger blocks."""
MOST_PAIRS = 2**20
"""Of runs that are looked at together: a hundred bytes each."""
CONTIGUOUS, ZIGZAG, *_ = KINDS = ("contiguous", "zigzag", "striped", "documents")


@dataclass(frozen=True)
class SequenceLayout:
    """The order of a sequence of `length` positions in an array that is cut into `ring` x `ulysses` shards."""

    length: int
    ring: int = 1
    ulysses: int = 1
    kind: str = "contiguous"
    documents: tuple[int, ...] | None = None
    """Lengths of the documents, where they are known; all together are `length`. The order `documents` is by them."""

    def __post_init__(self) -> None:
        """See that there is such an order.

        Raises:
            ConfigError: an unknown kind, no shards, or documents that are not all of the sequence.
        """
        if self.documents is not None:
            object.__setattr__(self, "documents", tuple(map(int, self.documents)))
        if self.kind not in KINDS:
            raise ConfigError(f"layout is {self.kind!r}; {nearest(self.kind, KINDS)}")
        if min(self.ring, self.ulysses) < 1:
            raise ConfigError(f"layout: ring {self.ring} x ulysses {self.ulysses}; each must be at least 1")
        if self.documents is not None and (sum(self.documents) != self.length or min(self.documents) < 1):
            raise ConfigError(
                f"layout: documents of {', '.join(map(str, self.documents[:8]))} positions are not the {self.length} "
                "of the sequence"
            )

    @property
    def described(self) -> str:
        """For messages."""
        documents = "" if self.documents is None else f" in {len(self.documents)} documents"
        return f"{self.length} positions{documents}, {self.kind} over ring {self.ring} x ulysses {self.ulysses}"

    @property
    def padded(self) -> int:
        """Length of the array: a multiple of the shards, and in a zigzag of its parts."""
        parts = self.ring * self.ulysses * (2 if self.kind == "zigzag" else 1)
        return -(-self.length // parts) * parts

    def order(self) -> np.ndarray:
        """int[padded]: the position of every element of the array; `PADDING` of what is none."""
        return _order(self)

    def places(self) -> np.ndarray:
        """int[length]: the element of the array that each position is at."""
        order = self.order()
        found = np.empty(self.length, np.int32)
        found[order[order != PADDING]] = np.flatnonzero(order != PADDING)
        return found

    def regions(self) -> np.ndarray:
        """int[ring, padded / ring]: the positions of each ring index."""
        return self.order().reshape(self.ring, -1)


@cache
def _order(layout: SequenceLayout) -> np.ndarray:
    positions: np.ndarray = np.arange(layout.padded, dtype=np.int32)
    positions[layout.length :] = PADDING
    if layout.kind == "zigzag":
        parts = positions.reshape(2 * layout.ring, -1)
        positions = np.stack([parts[: layout.ring], parts[: layout.ring - 1 : -1]], axis=1)
    if layout.kind == "striped":
        positions = positions.reshape(-1, layout.ring).T
    if layout.kind == "documents":
        positions = _by_document(positions, layout)
    found = positions.reshape(-1)
    found.flags.writeable = False
    return found


def _by_document(positions: np.ndarray, layout: SequenceLayout) -> np.ndarray:
    """[ring, ...]: of each document the parts that a zigzag has; of what is left over, to each who has least so far."""
    parts: list[list[np.ndarray]] = [[] for _ in range(layout.ring)]
    counts = np.zeros(layout.ring, int)
    start, rest = 0, []
    for n in layout.documents or (layout.length,):
        size = n // (2 * layout.ring)
        for r, part in enumerate(positions[start : start + 2 * layout.ring * size].reshape(2 * layout.ring, size)):
            parts[min(r, 2 * layout.ring - 1 - r)].append(part)
        rest.append(positions[start + 2 * layout.ring * size : start + n])
        start += n
    for position in np.concatenate([*rest, positions[layout.length :]]):
        r = int(counts.argmin())
        parts[r].append(position[None])
        counts[r] += 1
    regions = [np.concatenate(part) for part in parts]
    # in order, padding last
    return np.stack([region[np.argsort(np.where(region == PADDING, layout.padded, region))] for region in regions])


@cache
def hops(queries: SequenceLayout, keys: SequenceLayout, pattern: Pattern) -> tuple[int, ...]:
    """Distances in the ring over which any device needs keys, the nearest first; 0, its own, is always among them.

    At distance d the queries of ring index r need the keys of r - d. Documents attend within themselves.
    """
    needed = blocks(queries, keys, pattern, max(queries.padded, keys.padded)).sum(0)
    return (0, *(d for d in range(1, queries.ring) if needed[d]))


def blocks(queries: SequenceLayout, keys: SequenceLayout, pattern: Pattern, block: int) -> np.ndarray:
    """int[ring, distance]: blocks of `block` x `block` scores, not empty, that each ring index computes at each hop."""
    (q, q_blocks), (k, k_blocks) = _runs(queries, block), _runs(keys, block)
    # every run of queries with every run of keys of its document
    (*_, q_documents), (*_, k_documents) = q, k
    by_document = np.argsort(k_documents)
    first, end = (np.searchsorted(k_documents[by_document], q_documents, side) for side in ("left", "right"))
    i = np.repeat(np.arange(len(first)), end - first)
    j = by_document[np.arange(len(i)) - np.repeat(np.cumsum(end - first) - end, end - first)]
    size, rows, columns = queries.ring, *(-(-order.padded // order.ring // block) for order in (queries, keys))
    is_met = np.zeros((size * rows, size * columns), int)
    for some in np.array_split(np.stack([i, j]), 1 + len(i) // MOST_PAIRS, axis=1):
        met_i, met_j = some[:, pattern.meets(Run(*q[:, some[0]]), Run(*k[:, some[1]]))]
        is_met[q_blocks[met_i], k_blocks[met_j]] = 1
    counts = is_met.reshape(size, rows, size, columns).sum((1, 3))
    places = np.arange(size)
    return counts[places[:, None], (places[:, None] - places) % size]


@cache
def attended(layout: SequenceLayout, pattern: Pattern, gathers: bool) -> float:
    """Of the blocks of queries x keys of a device the part that a kernel computes, of the device with most of them.

    Args:
        gathers: all keys are there at once; else they go round, and every hop takes as long as its slowest device.
    """
    region = layout.padded // layout.ring
    block = max(min(KERNEL_BLOCK, region), -(-layout.padded // MOST_BLOCKS))
    counts = blocks(layout, layout, pattern, block)
    slowest = counts.sum(1).max() if gathers else counts.max(0).sum()
    return float(slowest / (layout.ring * (-(-region // block)) ** 2))


def _runs(layout: SequenceLayout, block: int) -> tuple[np.ndarray, np.ndarray]:
    """The runs of all blocks, int[start count step document, run], and the block of each."""
    labels, step = labels_of(layout), layout.ring if layout.kind == "striped" else 1
    starts = [(region, i) for region in layout.regions() for i in range(0, len(region), block)]
    by_block = [runs_of(region[i : i + block], labels, step) for region, i in starts]
    flat = [(run.start, run.count, run.step, run.document) for runs in by_block for run in runs]
    return np.array(flat).T, np.repeat(np.arange(len(by_block)), [*map(len, by_block)])


def labels_of(layout: SequenceLayout) -> np.ndarray | None:
    """int[position]: the document of every position; None where they are not known."""
    return None if layout.documents is None else np.repeat(np.arange(len(layout.documents)), layout.documents)
