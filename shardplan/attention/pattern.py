"""What a query may attend to, by positions: the part of a mask that is known while tracing. Pure arithmetic.

Works on numpy and on JAX arrays alike.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

PADDING = -1
"""The position of what only fills a shard up: attends to nothing, and nothing to it."""


@dataclass(frozen=True)
class Run:
    """Positions `start, start + step, ...`, `count` of them, of one document."""

    start: int
    count: int
    step: int = 1
    document: int = 0

    @property
    def last(self) -> int:
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

    def meets(self, queries: Run, keys: Run) -> bool:
        """Whether any query of a run may attend to any key of another."""
        if queries.document != keys.document:
            return False
        least, most = (0, self.window - 1) if self.window is not None else (None, None)
        if not self.causal:
            return _some_difference(queries, keys, least, most)
        earliest = -self.offset if least is None else max(least, -self.offset)
        if _some_difference(queries, keys, earliest, most):
            return True
        count = min(keys.count, -(-(self.prefix - keys.start) // keys.step))
        return count > 0 and _some_difference(queries, replace(keys, count=count), least, most)


def runs_of(positions: np.ndarray, documents: np.ndarray | None = None) -> list[Run]:
    """Positions int[n] of a shard as runs, without padding.

    Args:
        documents: int[position], the document of every position; default: all are of one.
    """
    kept = positions[positions != PADDING]
    labels = np.zeros_like(kept) if documents is None else documents[kept]
    steps = np.diff(kept)
    is_split = labels[1:] != labels[:-1]
    found: list[Run] = []
    start = 0
    while start < len(kept):
        step = 1 if start == len(steps) or is_split[start] else max(1, int(steps[start]))
        ends = np.flatnonzero(is_split[start:] | (steps[start:] != step))
        stop = start + 1 + (int(ends[0]) if len(ends) else len(kept) - 1 - start)
        found.append(Run(int(kept[start]), stop - start, step, int(labels[start])))
        start = stop
    return found


def _some_difference(queries: Run, keys: Run, least: int | None, most: int | None) -> bool:
    """Whether query minus key lies from `least` to `most`, for some pair."""
    low, high = queries.start - keys.last, queries.last - keys.start
    # with one step, which is that of both where both have several, every such difference occurs
    step = math.gcd(*(run.step for run in (queries, keys) if run.count > 1)) or 1
    first = low if least is None else low + -(-max(0, least - low) // step) * step
    return first <= (high if most is None else min(high, most))
