"""Attention masks as functions of positions: the part of a mask that is known while tracing. Pure arithmetic.

Works on numpy and on JAX arrays alike.
"""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

PADDING = -1
"""Position of a padding element: it attends to nothing, and nothing attends to it."""


@dataclass(frozen=True)
class PositionRun:
    """`count` positions `start, start + step, ...` of one document; array fields hold several runs."""

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
    """A mask over pairs of positions: the conjunction of its fields."""

    causal: bool = False
    causal_offset: int = 0
    """If `causal`, a query at i may attend to keys up to i + causal_offset."""
    window: int | None = None
    """A query at i may attend to the keys i - window + 1 to i."""
    prefix: int = 0
    """If `causal`, every query may also attend to keys before this position."""

    def mask(self, queries: Any, keys: Any) -> Any:
        """Return bool[query, key] for positions int[query] and int[key]: whether the query may attend to the key."""
        i, j = queries[:, None], keys[None, :]
        allowed = (i != PADDING) & (j != PADDING)
        if self.causal:
            allowed = allowed & ((j <= i + self.causal_offset) | (j < self.prefix))
        if self.window is not None:
            allowed = allowed & (j <= i) & (j > i - self.window)
        return allowed

    def allows_block(self, q_min: Any, q_max: Any, k_min: Any, k_max: Any) -> tuple[Any, Any]:
        """Return whether all pairs, and whether any pairs, of queries and keys in two ranges of positions are allowed.

        Args:
            q_min, q_max: first and last position of the queries.
            k_min, k_max: first and last position of the keys.
        """
        min_difference, max_difference = q_min - k_max, q_max - k_min  # of query minus key
        all_allowed, any_allowed = np.asarray(True), np.asarray(True)
        if self.causal:
            all_allowed = (min_difference >= -self.causal_offset) | (k_max < self.prefix)
            any_allowed = (max_difference >= -self.causal_offset) | (k_min < self.prefix)
        if self.window is not None:
            all_allowed = all_allowed & (min_difference >= 0) & (max_difference < self.window)
            any_allowed = any_allowed & (max_difference >= 0) & (min_difference < self.window)
        return all_allowed, any_allowed

    def allows_any(self, queries: PositionRun, keys: PositionRun) -> Any:
        """Return whether any query of one run may attend to any key of another: bool, broadcast over arrays of runs."""
        low, high = (0, self.window - 1) if self.window is not None else (None, None)
        if not self.causal:
            result = _has_difference(queries, keys, low, high)
        else:
            causal_low = -self.causal_offset if low is None else max(low, -self.causal_offset)
            result = _has_difference(queries, keys, causal_low, high)
            count = np.minimum(keys.count, -(-(self.prefix - keys.start) // keys.step))
            result |= (count > 0) & _has_difference(queries, replace(keys, count=count), low, high)
        return result & (queries.document == keys.document) & (np.minimum(queries.count, keys.count) > 0)

    def density(self, length: int) -> float:
        """Return the fraction of the pairs of `length` queries and `length` keys that is allowed."""
        i = np.arange(length)
        last = np.full(length, length - 1)
        if self.causal:
            last = np.clip(np.maximum(i + self.causal_offset, self.prefix - 1), -1, length - 1)
        first = np.zeros(length, int)
        if self.window is not None:
            first, last = np.maximum(0, i - self.window + 1), np.minimum(last, i)
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


def _has_difference(queries: PositionRun, keys: PositionRun, low: int | None, high: int | None) -> Any:
    """Return whether query minus key lies in [low, high] for any pair of two runs."""
    min_difference, max_difference = queries.start - keys.last, queries.last - keys.start
    # if both runs have several positions, their steps are equal and every multiple in between occurs
    steps = (np.where(np.greater(run.count, 1), run.step, 0) for run in (queries, keys))
    step = np.maximum(np.gcd(*steps), 1)
    first = min_difference if low is None else min_difference + -(-np.maximum(0, low - min_difference) // step) * step
    return first <= (max_difference if high is None else np.minimum(max_difference, high))
