"""Attention masks as functions of positions: the part of a mask that is known while tracing. Pure arithmetic.

Works on numpy and on JAX arrays alike.
"""

import itertools
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

PADDING = -1
"""Position of a padding element: it attends to nothing, and nothing attends to it."""


@dataclass(frozen=True)
class PositionRun:
    """`count` positions `start, start + step, ...` of one document and one chunk; array fields hold several runs."""

    start: Any
    count: Any
    step: Any = 1
    document: Any = 0
    """Index of the document; with chunked attention, of the chunk of a document."""

    @property
    def last(self) -> Any:
        """The last position of the run."""
        return self.start + (self.count - 1) * self.step


@dataclass(frozen=True)
class Pattern:
    """A mask over pairs of positions: the conjunction of its fields."""

    causal: bool = False
    causal_offset: int = 0
    """If `causal`, a query at i may attend to keys up to i + causal_offset."""
    window: int | None = None
    """A query at i may attend to the keys i - window + 1 to i."""
    prefix: int = 0
    """If `causal`, every query may also attend to keys before this position."""
    radius: int | None = None
    """A query at i may attend to the keys i - radius to i + radius: a window to both sides."""
    chunk: int | None = None
    """A query at i may attend to a key at j if i // chunk is j // chunk."""

    @property
    def name(self) -> str:
        """The mask in words, such as `causal, window 1024`."""
        parts = ["causal" if self.causal else "not causal"]
        named = {"offset": self.causal_offset, "window": self.window, "radius": self.radius, "chunk": self.chunk}
        for text, value in named.items():
            if value:
                parts.append(f"{text} {value}")
        if self.prefix:
            parts.append(f"prefix {self.prefix}")
        return ", ".join(parts)

    @property
    def difference_bounds(self) -> tuple[int | None, int | None]:
        """Smallest and largest (query position - key position) that windows and chunks allow; None for no bound."""
        radius = self._radius
        if radius is None:
            return (None, None) if self.window is None else (0, self.window - 1)
        if self.window is None:
            return -radius, radius
        return max(0, -radius), min(self.window - 1, radius)

    @property
    def _radius(self) -> int | None:
        """Largest distance between query and key that the two-sided window or the chunk allows; None for no bound."""
        if self.chunk is None:
            return self.radius
        return self.chunk - 1 if self.radius is None else min(self.radius, self.chunk - 1)

    def without_chunks(self) -> "Pattern":
        """Return a pattern without chunks that allows at least the pairs that this one allows, wherever chunks begin.

        If a sequence has several documents, chunks are counted from the beginning of each document, so that they are
        not a function of positions. In their place the pattern has a window to both sides, and segment ids separate the
        chunks.
        """
        return replace(self, radius=self._radius, chunk=None)

    def mask(self, queries: Any, keys: Any) -> Any:
        """Return bool[query, key] for positions int[query] and int[key]: whether the query may attend to the key."""
        i, j = queries[:, None], keys[None, :]
        allowed = (i != PADDING) & (j != PADDING)
        if self.causal:
            allowed = allowed & ((j <= i + self.causal_offset) | (j < self.prefix))
        low, high = self.difference_bounds
        if low is not None and high is not None:
            allowed = allowed & (j <= i - low) & (j >= i - high)
        if self.chunk is not None:
            allowed = allowed & (i // self.chunk == j // self.chunk)
        return allowed

    def allows_block(self, q_min: Any, q_max: Any, k_min: Any, k_max: Any) -> tuple[Any, Any]:
        """Return (all pairs are allowed, any pair is allowed) for queries and keys in two ranges of positions.

        If a range spans several chunks, the second result may be true although no pair is allowed.

        Args:
            q_min, q_max: first and last position of the queries.
            k_min, k_max: first and last position of the keys.
        """
        every, some = self._allows_differences(q_min, q_max, k_min, k_max)
        if self.chunk is None:
            return every, some
        q_first, q_last, k_first, k_last = (each // self.chunk for each in (q_min, q_max, k_min, k_max))
        is_one = (q_first == q_last) & (k_first == k_last) & (q_first == k_first)
        return every & is_one, some & (q_first <= k_last) & (k_first <= q_last)

    def _allows_differences(self, q_min: Any, q_max: Any, k_min: Any, k_max: Any) -> tuple[Any, Any]:
        """Return the result of `allows_block`, considering only the differences of positions."""
        low, high = self.difference_bounds
        if not self.causal:
            return _compare_differences(q_min, q_max, k_min, k_max, low, high)
        causal_low = -self.causal_offset if low is None else max(low, -self.causal_offset)
        all_causal, any_causal = _compare_differences(q_min, q_max, k_min, k_max, causal_low, high)
        last = np.minimum(k_max, self.prefix - 1)
        all_prefix, any_prefix = _compare_differences(q_min, q_max, k_min, last, low, high)
        return all_causal | (all_prefix & (k_max < self.prefix)), any_causal | (any_prefix & (k_min < self.prefix))

    def allows_any(self, queries: PositionRun, keys: PositionRun) -> Any:
        """Return whether any query of one run may attend to any key of another: bool, broadcast over arrays of runs."""
        low, high = self.difference_bounds
        if not self.causal:
            result = _has_difference(queries, keys, low, high)
        else:
            causal_low = -self.causal_offset if low is None else max(low, -self.causal_offset)
            result = _has_difference(queries, keys, causal_low, high)
            count = np.minimum(keys.count, -(-(self.prefix - keys.start) // keys.step))
            result |= (count > 0) & _has_difference(queries, replace(keys, count=count), low, high)
        return result & (queries.document == keys.document) & (np.minimum(queries.count, keys.count) > 0)

    @lru_cache(maxsize=256)  # noqa: B019 - patterns are values, and a model has a few
    def density(self, length: int) -> float:
        """Return the fraction of the pairs of `length` queries and `length` keys that is allowed."""
        i = np.arange(length)
        last = np.full(length, length - 1)
        if self.causal:
            last = np.clip(np.maximum(i + self.causal_offset, self.prefix - 1), -1, length - 1)
        first = np.zeros(length, int)
        low, high = self.difference_bounds
        if low is not None and high is not None:
            first, last = np.maximum(0, i - high), np.minimum(last, i - low)
        if self.chunk is not None:
            begin = i // self.chunk * self.chunk
            first, last = np.maximum(first, begin), np.minimum(last, begin + self.chunk - 1)
        return float(np.maximum(0, last - first + 1).sum() / length**2)


CAUSAL = Pattern(causal=True)


def position_runs(positions: np.ndarray, documents: np.ndarray | None = None, step: int = 1) -> list[PositionRun]:
    """Split the positions int[n] of a shard into runs; padding is dropped.

    Args:
        documents: int[position], the document id of every position; default: one document.
        step: distance between neighbouring positions of a run.
    """
    kept = positions[positions != PADDING]
    ids = np.zeros_like(kept) if documents is None else documents[kept]
    ends = np.flatnonzero((ids[1:] != ids[:-1]) | (np.diff(kept) != step)) + 1
    bounds = [0, *ends.tolist(), len(kept)] if len(kept) else []
    return [
        PositionRun(int(kept[start]), stop - start, step, int(ids[start])) for start, stop in itertools.pairwise(bounds)
    ]


def _compare_differences(q_min: Any, q_max: Any, k_min: Any, k_max: Any, low: Any, high: Any) -> tuple[Any, Any]:
    """Return (all, any): whether differences between two ranges of positions lie in [low, high]; None is no bound."""
    min_difference, max_difference = q_min - k_max, q_max - k_min  # of query minus key
    first = min_difference if low is None else np.maximum(min_difference, low)
    last = max_difference if high is None else np.minimum(max_difference, high)
    return (first == min_difference) & (last == max_difference), np.asarray(first <= last)


def _has_difference(queries: PositionRun, keys: PositionRun, low: int | None, high: int | None) -> Any:
    """Return whether any query position minus any key position of two runs lies in [low, high]."""
    min_difference, max_difference = queries.start - keys.last, queries.last - keys.start
    # if both runs have several positions, their steps are equal and every multiple in between occurs
    steps = (np.where(np.greater(run.count, 1), run.step, 0) for run in (queries, keys))
    step = np.maximum(np.gcd(*steps), 1)
    first = min_difference if low is None else min_difference + -(-np.maximum(0, low - min_difference) // step) * step
    return first <= (max_difference if high is None else np.minimum(max_difference, high))
