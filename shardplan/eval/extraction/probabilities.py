"""Computes extraction and coverage of a text from the probabilities of its suffixes. Pure.

Protocol and terms are those of https://arxiv.org/abs/2505.12546: p_z is the probability of a window's suffix given its
prefix.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shardplan.eval.extraction.character_runs import CharacterRuns, RunStream, range_maximum

THRESHOLDS = (0.001, 0.01, 0.1, 0.5, 0.75)
"""Probabilities at which the covered fraction of a text is reported."""
LOG_BINS = 500
"""Number of bins in the histogram of log p_z, each of one nat."""
STRIP_PARTS = 400
"""Maximum number of parts in a text's strip."""
CURVE_LOG_THRESHOLDS = np.linspace(np.log(1e-4), 0, 161)
"""Logarithms of the probabilities at which the coverage curve is computed: 40 per factor of ten."""


def suffix_log_probs(log_prob: np.ndarray) -> np.ndarray:
    """Return log p_z, float64[window], of float[window, suffix token] log-probabilities.

    >>> suffix_log_probs(np.log(np.array([[0.5, 0.5]], np.float32))).round(4).tolist()
    [-1.3863]
    """
    total: np.ndarray = log_prob.astype(np.float64).sum(axis=1)
    return total


def top_k_log_probs(log_prob: np.ndarray, rank: np.ndarray, top_log_prob: np.ndarray, top_k: int) -> np.ndarray:
    """Return log p_z, float64[window], under top-k sampling; minus infinity for suffixes with other tokens.

    >>> log_prob, rank = np.log([[0.5, 0.25]]), np.array([[0, 2]])
    >>> top_k_log_probs(log_prob, rank, np.log([[0.8, 0.75]]), top_k=2).tolist()
    [-inf]

    Args:
        log_prob, rank, top_log_prob: [window, suffix token], as `TokenScores`.
        top_k: the k for which `top_log_prob` was computed.
    """
    each = np.where(rank < top_k, log_prob.astype(np.float64) - top_log_prob, -np.inf)
    total: np.ndarray = each.sum(axis=1)
    return total


class Coverage:
    """Counts characters by the largest p_z of the windows that cover them, while windows are read in order."""

    def __init__(self, characters: int):
        """Start to count the characters of a text of `characters` characters."""
        self._characters, self._runs = characters, RunStream()
        self._counts, self._curve_counts = _Counts(np.log(THRESHOLDS)), _Counts(CURVE_LOG_THRESHOLDS)
        self.strip = np.full(min(STRIP_PARTS, max(characters, 1)), -np.inf)
        """float64[part]: the largest log p_z in each of equal parts of the text; minus infinity where no window is."""

    def add(self, starts: np.ndarray, ends: np.ndarray, log_p: np.ndarray, final: int | None = None) -> None:
        """Add windows.

        Args:
            starts, ends: int64[window], characters.
            final: a character before which no later window starts; default: the last start, as starts never decrease.
        """
        if len(starts):
            self._count(self._runs.add(starts, ends, log_p, int(starts[-1]) if final is None else final))

    def finish(self) -> dict[str, float]:
        """Return threshold -> fraction of the text's characters whose largest p_z is at least the threshold."""
        self._count(self._runs.finish(self._characters))
        covered = self._counts.at_least() / max(self._characters, 1)
        return {f"{t:g}": float(part) for t, part in zip(THRESHOLDS, covered, strict=True)}

    def curve_counts(self) -> np.ndarray:
        """Return, for each of `CURVE_LOG_THRESHOLDS`, the number of characters whose largest log p_z reaches it."""
        return self._curve_counts.at_least()

    def _count(self, runs: CharacterRuns) -> None:
        """Count the characters of runs that no later window changes."""
        lengths = np.diff(runs.bounds)
        self._counts.add(runs.values, lengths)
        self._curve_counts.add(runs.values, lengths)
        parts = len(self.strip)
        first, last = (each * parts // max(self._characters, 1) for each in (runs.bounds[:-1], runs.bounds[1:] - 1))
        np.maximum(self.strip, range_maximum(first, last + 1, runs.values, parts), out=self.strip)


class _Counts:
    """Counts, for each of several limits, the characters whose value is at least the limit."""

    def __init__(self, limits: np.ndarray):
        """Start with no characters; `limits` are float64[limit], in increasing order."""
        self._limits = limits
        self._counts = np.zeros(len(limits) + 1, np.int64)

    def add(self, values: np.ndarray, lengths: np.ndarray) -> None:
        """Add `lengths` characters, int64[run], with the values float64[run]."""
        np.add.at(self._counts, np.searchsorted(self._limits, values, side="right"), lengths)

    def at_least(self) -> np.ndarray:
        """Return, for each limit, the number of characters whose value is at least the limit, int64[limit]."""
        total: np.ndarray = self._counts[::-1].cumsum()[-2::-1]
        return total


class TextSummary:
    """Computes the summary of one text from the results of its windows, added in order."""

    def __init__(self, characters: int, top_k: int):
        """Start to summarize a text of `characters` characters.

        Args:
            top_k: the k of top-k scores; 0 if there are none.
        """
        self._characters, self._top_k = characters, top_k
        self._whole, self._suffix = Coverage(characters), Coverage(characters)
        self._windows, self._greedy, self._sum, self._max = 0, 0, 0.0, -np.inf
        self._at, self._top_at = np.zeros(len(THRESHOLDS), int), np.zeros(len(THRESHOLDS), int)
        self.histogram = np.zeros(LOG_BINS, np.int64)
        """Number of windows by log p_z: element i counts windows from -(i + 1) to -i nats, the last one all below."""

    @property
    def strip(self) -> np.ndarray:
        """Largest log p_z in each of equal parts of the text, float64[part]; minus infinity where no window is."""
        return self._whole.strip

    @property
    def curve_counts(self) -> tuple[np.ndarray, np.ndarray]:
        """Number of characters at least as probable as `CURVE_LOG_THRESHOLDS`, by windows and by suffixes."""
        return self._whole.curve_counts(), self._suffix.curve_counts()

    def add(self, table: pa.Table) -> None:
        """Add the results of more windows."""
        log_prob, rank, top = (read_matrix(table, name) for name in ("log_prob", "rank", "top_log_prob"))
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
        # windows that are encoded by themselves may have suffixes that start before that of the window before
        self._suffix.add(suffix_start, end, log_p, final=int(start[-1]))

    def finish(self) -> dict[str, Any]:
        """Return the summary, after all windows are added."""
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
    """Add up the summaries of texts; coverage counts every character once.

    >>> covered, empty = ({f"{t:g}": part for t in THRESHOLDS} for part in (0.5, 0.0))
    >>> one = {"characters": 100, "windows": 4, "greedy": 1, "mean_log_p": -2.0}
    >>> one |= {"coverage": covered, "suffix_coverage": covered}
    >>> other = {**one, "characters": 300, "coverage": empty}
    >>> total_of([one, other])["coverage"]["0.1"]
    0.125
    """
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


def read_matrix(table: pa.Table, name: str) -> np.ndarray:
    """Return a column whose lists have equal lengths as an array [row, element].

    >>> table = pa.table({"rank": pa.array([[0, 3], [1, 0]], pa.list_(pa.int32(), 2))})
    >>> read_matrix(table, "rank").tolist()
    [[0, 3], [1, 0]]
    """
    column = table[name].combine_chunks()
    values: np.ndarray = column.flatten().to_numpy().reshape(len(column), column.type.list_size)
    return values
