"""Computes the largest value of the windows that cover each character of a text, as runs of characters. Pure.

A run is a range of characters with one value. Memory is in proportion to the windows that are added together, and does
not depend on the text or on the distance between windows.
"""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class CharacterRuns:
    """Consecutive runs of characters; neighbours have different values."""

    bounds: np.ndarray
    """First character of each run, and one past the last character, int64[run + 1]."""
    values: np.ndarray
    """Value of each run, float64[run]; minus infinity if no window covers it."""


def range_maximum(first: np.ndarray, last: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
    """Return, for each of `size` positions, the largest value of the ranges that cover it.

    Each range is the union of two overlapping blocks whose length is a power of two; every block passes its maximum on
    to its halves.

    >>> range_maximum(np.array([0, 1]), np.array([2, 4]), np.array([-1.0, -3.0]), size=5)
    array([ -1.,  -1.,  -3.,  -3., -inf])

    Args:
        first, last: int64[range]: the first position of each range, and the one after its last.
        values: float64[range].

    Returns:
        float64[size]; minus infinity for positions that no range covers.
    """
    largest = np.full(size, -np.inf)
    level = np.frexp(last - first)[1] - 1  # of the longest block within the range; -1 if the range is empty
    for k in range(int(level.max(initial=-1)), -1, -1):
        own = level == k
        np.maximum.at(largest, first[own], values[own])
        np.maximum.at(largest, last[own] - 2**k, values[own])
        if k:
            half = 2 ** (k - 1)
            largest[half:] = np.maximum(largest[half:], largest[:-half])
    return largest


class RunStream:
    """Converts windows, added one after another, to runs of characters of a text, in order and without gaps."""

    def __init__(self) -> None:
        self._at = 0
        self._starts, self._ends, self._values = np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0)

    def add(self, starts: np.ndarray, ends: np.ndarray, values: np.ndarray, end: int) -> CharacterRuns:
        """Add windows, and return the runs of the characters before `end`.

        Args:
            starts, ends: int64[window], characters.
            values: float64[window].
            end: a character before which no later window starts; it never decreases from one call to the next.
        """
        return self._advance(starts, ends, values, end)

    def finish(self, characters: int) -> CharacterRuns:
        """Return the remaining runs of a text of `characters` characters."""
        return self._advance(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0), characters)

    def _advance(self, starts: np.ndarray, ends: np.ndarray, values: np.ndarray, end: int) -> CharacterRuns:
        """Add windows, and return the runs of characters before `end`; later windows wait for the next call."""
        starts, ends = np.concatenate([self._starts, starts]), np.concatenate([self._ends, ends])
        values = np.concatenate([self._values, values])
        points = np.unique(np.concatenate([[self._at, end], starts, ends]))
        largest = range_maximum(
            np.searchsorted(points, starts), np.searchsorted(points, ends), values, max(len(points) - 1, 0)
        )
        is_first = np.concatenate([[True], largest[1:] != largest[:-1]])[: len(largest)]
        split = int(np.searchsorted(points, end))
        done = np.flatnonzero(is_first[:split])
        runs = CharacterRuns(np.append(points[:split][done], end), largest[:split][done])
        kept = np.flatnonzero(largest[split:] > -np.inf) + split
        self._at, self._starts, self._ends, self._values = end, points[kept], points[kept + 1], largest[kept]
        return runs
