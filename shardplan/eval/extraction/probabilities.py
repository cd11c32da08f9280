"""What the probabilities of suffixes say about a text: extraction, and coverage of its characters. Pure.

Protocol and terms are those of https://arxiv.org/abs/2505.12546: p_z is the probability of a window's suffix given its
prefix.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

THRESHOLDS = (0.001, 0.01, 0.1, 0.5, 0.75)
"""Probabilities for which the covered part of a text is reported."""
LOG_BINS = 500
"""Bins of one nat in the histogram of log p_z."""
BINS = 400
"""Parts of a text in its strip."""
FLUSHED_CHARACTERS = 2**20
"""Characters whose largest p_z is final that are kept before they are counted."""


def suffix_log_probs(log_prob: np.ndarray) -> np.ndarray:
    """Return log p_z, float64[window], of float[window, suffix token] log-probabilities."""
    total: np.ndarray = log_prob.astype(np.float64).sum(axis=1)
    return total


def top_k_log_probs(log_prob: np.ndarray, rank: np.ndarray, top_log_prob: np.ndarray, top_k: int) -> np.ndarray:
    """Return log p_z, float64[window], if only the top k tokens are sampled; minus infinity for other suffixes.

    Args:
        log_prob, rank, top_log_prob: [window, suffix token], as `TokenScores`.
        top_k: as `top_log_prob` was computed.
    """
    each = np.where(rank < top_k, log_prob.astype(np.float64) - top_log_prob, -np.inf)
    total: np.ndarray = each.sum(axis=1)
    return total


@dataclass
class Coverage:
    """The largest p_z of the windows that cover each character of a text, counted while windows are read in order."""

    characters: int

    def __post_init__(self) -> None:
        self._base, self._values = 0, np.full(0, -np.inf)
        self._counts = np.zeros(len(THRESHOLDS), np.int64)
        self.strip = np.full(BINS, -np.inf)
        """The largest log p_z in each of equal parts of the text."""

    def add(self, starts: np.ndarray, ends: np.ndarray, log_p: np.ndarray) -> None:
        """Add windows, whose starts never decrease, from one call to the next either."""
        for start, end, value in zip(starts.tolist(), ends.tolist(), log_p.tolist(), strict=True):
            if start - self._base > FLUSHED_CHARACTERS:
                self._flush(start - self._base)
            missing = end - self._base - len(self._values)
            if missing > 0:
                self._values = np.concatenate([self._values, np.full(missing + FLUSHED_CHARACTERS // 16, -np.inf)])
            part = self._values[start - self._base : end - self._base]
            np.maximum(part, value, out=part)

    def finish(self) -> dict[str, float]:
        """Return threshold -> the part of the text's characters whose largest p_z is at least the threshold."""
        self._flush(len(self._values))
        return {f"{t:g}": int(n) / max(self.characters, 1) for t, n in zip(THRESHOLDS, self._counts, strict=True)}

    def _flush(self, count: int) -> None:
        """Count the first characters, whose largest p_z no later window changes."""
        values = self._values[:count]
        limits = np.log(THRESHOLDS)
        self._counts += (values[:, None] >= limits).sum(axis=0)
        bins = np.minimum((self._base + np.arange(len(values))) * BINS // max(self.characters, 1), BINS - 1)
        np.maximum.at(self.strip, bins, values)
        self._base, self._values = self._base + count, self._values[count:]


class TextSummary:
    """The summary of one text, from the results of its windows in order."""

    def __init__(self, characters: int, top_k: int):
        """Summarize a text of `characters` characters.

        Args:
            top_k: tokens of the top k that the scores are for; 0 for none.
        """
        self._characters, self._top_k = characters, top_k
        self._whole, self._suffix = Coverage(characters), Coverage(characters)
        self._windows, self._greedy, self._sum, self._max = 0, 0, 0.0, -np.inf
        self._at, self._top_at = np.zeros(len(THRESHOLDS), int), np.zeros(len(THRESHOLDS), int)
        self.histogram = np.zeros(LOG_BINS, np.int64)
        """Windows by log p_z: element i counts those from -(i + 1) to -i nats, the last one all below."""

    @property
    def strip(self) -> np.ndarray:
        """float64[part]: the largest log p_z in each of equal parts of the text; minus infinity where no window is."""
        return self._whole.strip

    def add(self, table: pa.Table) -> None:
        """Add the results of further windows."""
        log_prob, rank, top = (_matrix(table, name) for name in ("log_prob", "rank", "top_log_prob"))
        start, suffix_start, end = (table[name].to_numpy() for name in ("start", "suffix_start", "end"))
        log_p = suffix_log_probs(log_prob)
        limits = np.log(THRESHOLDS)
        self._windows += len(log_p)
        self._greedy += int((rank == 0).all(axis=1).sum())
        self._sum, self._max = self._sum + float(log_p.sum()), max(self._max, float(log_p.max()))
        self._at += (log_p[:, None] >= limits).sum(axis=0)
        if self._top_k:
            self._top_at += (top_k_log_probs(log_prob, rank, top, self._top_k)[:, None] >= limits).sum(axis=0)
        bins = np.clip(-log_p, 0, LOG_BINS - 1).astype(int)
        self.histogram += np.bincount(bins, minlength=LOG_BINS)
        self._whole.add(start, end, log_p)
        self._suffix.add(suffix_start, end, log_p)

    def finish(self) -> dict[str, Any]:
        """Return the summary, once all windows are added."""
        names = [f"{t:g}" for t in THRESHOLDS]
        return {
            "characters": self._characters,
            "windows": self._windows,
            "greedy": self._greedy,
            "mean_log_p": self._sum / self._windows if self._windows else None,
            "max_log_p": self._max if self._windows else None,
            "windows_at": dict(zip(names, self._at.tolist(), strict=True)),
            "windows_at_top_k": dict(zip(names, self._top_at.tolist(), strict=True)) if self._top_k else None,
            "coverage": self._whole.finish(),
            "suffix_coverage": self._suffix.finish(),
        }


def total_of(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Add up the summaries of texts; coverage counts every character once."""
    characters = sum(each["characters"] for each in summaries)
    windows = sum(each["windows"] for each in summaries)

    def weighted(name: str) -> dict[str, float]:
        return {
            t: sum(each[name][t] * each["characters"] for each in summaries) / max(characters, 1)
            for t in map("{:g}".format, THRESHOLDS)
        }

    sums = [each["mean_log_p"] * each["windows"] for each in summaries if each["windows"]]
    return {
        "characters": characters,
        "windows": windows,
        "greedy": sum(each["greedy"] for each in summaries),
        "mean_log_p": sum(sums) / windows if windows else None,
        "coverage": weighted("coverage"),
        "suffix_coverage": weighted("suffix_coverage"),
    }


def _matrix(table: pa.Table, name: str) -> np.ndarray:
    """Return a column of lists of equal length as an array [row, element]."""
    column = table[name].combine_chunks()
    values: np.ndarray = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return values
