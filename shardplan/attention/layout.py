"""In which order a sequence is cut over the devices of a ring, and what of the ring its mask needs. Pure arithmetic.

| layout | the region of ring index r, of R |
|---|---|
| contiguous | the r-th part of the sequence |
| zigzag | of 2 R parts the r-th and the last but r: as much to do for each where the mask is causal |
| striped | every R-th position, from r on: the same, to within one block |
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from shardplan.attention.pattern import PADDING, Pattern, runs_of

KINDS = ("contiguous", "zigzag", "striped")


@dataclass(frozen=True)
class Layout:
    """The order of a sequence of `length` positions in an array that is cut into `ring` x `ulysses` shards."""

    length: int
    ring: int = 1
    ulysses: int = 1
    kind: str = "contiguous"

    @property
    def padded(self) -> int:
        """Length of the array: a multiple of the shards, and in a zigzag of its parts."""
        parts = self.ring * self.ulysses * (2 if self.kind == "zigzag" else 1)
        return -(-self.length // parts) * parts

    def order(self) -> np.ndarray:
        """int[padded]: the position of every element of the array; `PADDING` of what is none."""
        return _order(self)

    def regions(self) -> np.ndarray:
        """int[ring, padded / ring]: the positions of each ring index."""
        return self.order().reshape(self.ring, -1)


@cache
def _order(layout: Layout) -> np.ndarray:
    positions: np.ndarray = np.arange(layout.padded, dtype=np.int32)
    positions[layout.length :] = PADDING
    if layout.kind == "zigzag":
        parts = positions.reshape(2 * layout.ring, -1)
        positions = np.stack([parts[: layout.ring], parts[: layout.ring - 1 : -1]], axis=1)
    if layout.kind == "striped":
        positions = positions.reshape(-1, layout.ring).T
    found = positions.reshape(-1)
    found.flags.writeable = False
    return found


def hops(queries: Layout, keys: Layout, pattern: Pattern, documents: Sequence[int] | None = None) -> tuple[int, ...]:
    """Distances in the ring over which any device needs keys, the nearest first; 0, its own, is always among them.

    At distance d the queries of ring index r need the keys of r - d.

    Args:
        documents: lengths of the documents of a sequence, where they are known; all attend within themselves.
    """
    labels = None if documents is None else np.repeat(np.arange(len(documents)), documents)
    q_runs, k_runs = ([runs_of(region, labels) for region in layout.regions()] for layout in (queries, keys))
    size = queries.ring

    def meet(r: int, d: int) -> bool:
        pairs = itertools.product(q_runs[r], k_runs[(r - d) % size])
        return any(pattern.meets(query, key) for query, key in pairs)

    return (0, *(d for d in range(1, size) if any(meet(r, d) for r in range(size))))
