"""What a query may attend to, by positions: the part of a mask that is known while tracing. Pure arithmetic.

Works on numpy and on JAX arrays alike.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

PADDING = -1
"""The position of what only fills a shard up: attends to nothing, and nothing to it."""


@dataclass(frozen=True)
class Run:
    """Positions `start, start + step, ...`, `count` of them, of one document; or several such, as arrays."""

    start: Any
    count: Any
    step: Any = 1
    document: Any = 0

    @property
    def last(self) -> Any:
        """The last position."""
        return self.start + (self.count - 1) * self.step


@dataclass(frozen=True)
class Pattern:
    """A mask of positions: the conjunction of its parts."""

    causal: bool = False
    offset: int = 0
    """With `causal` a query at i may attend to keys up to i + offset."""
    window: int | None = None
    """A query at i may attend to the keys i - window + 1 to i."""
    prefix: int = 0
    """With `causal` every query may attend to keys before this position too."""

    def allowed(self, queries: Any, keys: Any) -> Any:
        """bool[query, key] of positions int[query] and int[key]."""
        i, j = queries[:, None], keys[None, :]
        found = (i != PADDING) & (j != PADDING)
        if self.causal:
            found = found & ((j <= i + self.offset) | (j < self.prefix))
        if self.window is not None:
            found = found & (j <= i) & (j > i - self.window)
        return found

    def between(self, q_least: Any, q_most: Any, k_least: Any, k_most: Any) -> tuple[Any, Any]:
        """Of queries and keys that lie between two positions each: whether every pair is allowed, and whether any
        may be."""
        least, most = q_least - k_most, q_most - k_least  # of query minus key
        every, some = np.asarray(True), np.asarray(True)
        if self.causal:
            every = (least >= -self.offset) | (k_most < self.prefix)
            some = (most >= -self.offset) | (k_least < self.prefix)
        if self.window is not None:
            every = every & (least >= 0) & (most < self.window)
            some = some & (most >= 0) & (least < self.window)
        return every, some

    def density(self, length: int) -> float:
        """The part of the pairs of `length` queries and keys that it allows."""
        i = np.arange(length)
        last = np.full(length, length - 1)
        if self.causal:
            last = np.clip(np.maximum(i + self.offset, self.prefix - 1), -1, length - 1)
        first = np.zeros(length, int)
        if self.window is not None:
            first, last = np.maximum(0, i - self.window + 1), np.minimum(last, i)
        return float(np.maximum(0, last - first + 1).sum() / length**2)

    def meets(self, queries: Run, keys: Run) -> Any:
        """Whether any query of a run may attend to any key of another: bool, broadcast where runs are arrays."""
        least, most = (0, self.window - 1) if self.window is not None else (None, None)
        if not self.causal:
            found = _some_difference(queries, keys, least, most)
        else:
            earliest = -self.offset if least is None else max(least, -self.offset)
            found = _some_difference(queries, keys, earliest, most)
            count = np.minimum(keys.count, -(-(self.prefix - keys.start) // keys.step))
            found |= (count > 0) & _some_difference(queries, replace(keys, count=count), least, most)
        return found & (queries.document == keys.document) & (np.minimum(queries.count, keys.count) > 0)


CAUSAL = Pattern(causal=True)


def runs_of(positions: np.ndarray, documents: np.ndarray | None = None, step: int = 1) -> list[Run]:
    """Positions int[n] of a shard as runs, without padding.

    Args:
        documents: int[position], the document of every position; default: all are of one.
        step: of the runs.
    """
    kept = positions[positions != PADDING]
    labels = np.zeros_like(kept) if documents is None else documents[kept]
    ends = np.flatnonzero((labels[1:] != labels[:-1]) | (np.diff(kept) != step)) + 1
    places = [0, *ends.tolist(), len(kept)] if len(kept) else []
    return [Run(int(kept[start]), stop - start, step, int(labels[start])) for start, stop in itertools.pairwise(places)]


def _some_difference(queries: Run, keys: Run, least: int | None, most: int | None) -> Any:
    """Whether query minus key lies from `least` to `most`, for some pair."""
    low, high = queries.start - keys.last, queries.last - keys.start
    # with one step, which is that of both where both have several, every such difference occurs
    steps = (np.where(np.greater(run.count, 1), run.step, 0) for run in (queries, keys))
    step = np.maximum(np.gcd(*steps), 1)
    first = low if least is None else low + -(-np.maximum(0, least - low) // step) * step
    return first <= (high if most is None else np.minimum(high, most))
