"""Compares scores of the same windows in bfloat16 and in float32. Pure."""

from collections.abc import Iterable
from typing import Any

import numpy as np
import pyarrow as pa

from shardplan.eval.extraction.probabilities import THRESHOLDS, read_matrix, suffix_log_probs

TYPES = ("bfloat16", "float32")
"""Types that are compared; differences are the first type's scores minus the second's."""
QUANTILES = (0.5, 0.95, 1.0)


def compare_precision(low: Iterable[pa.Table], high: Iterable[pa.Table]) -> dict[str, Any]:
    """Compare the scores of the same windows, computed in two dtypes.

    >>> rank = pa.array([[0, 3]], pa.list_(pa.int32(), 2))
    >>> low, high = (pa.array([each], pa.list_(pa.float32(), 2)) for each in ([-1.0, -2.0], [-1.0, -2.5]))
    >>> tables = [[pa.table({"log_prob": each, "rank": rank})] for each in (low, high)]
    >>> compare_precision(*tables)["log_p"]["mean"]
    0.5

    Returns:
        `windows` (their number). `log_p` and `token`: differences of log p_z and of tokens' log-probabilities, in nats,
        with their `mean`, and with `mean_absolute`, `q50`, `q95` and `q100` of their absolute values. `ranks_differ`:
        fraction of tokens with different ranks. `greedy` and `thresholds`: numbers of windows that are extracted in the
        first dtype, in the second dtype, and in only one of them.
    """
    tables = [pa.concat_tables(each) for each in (low, high)]  # a study has as few windows as fit in memory
    log_low, log_high = (read_matrix(table, "log_prob") for table in tables)
    rank_low, rank_high = (read_matrix(table, "rank") for table in tables)
    p_low, p_high = suffix_log_probs(log_low), suffix_log_probs(log_high)
    return {
        "windows": len(p_low),
        "log_p": _differences(p_low - p_high),
        "token": _differences((log_low.astype(np.float64) - log_high).reshape(-1)),
        "ranks_differ": float((rank_low != rank_high).mean()),
        "greedy": _agreement((rank_low == 0).all(axis=1), (rank_high == 0).all(axis=1)),
        "thresholds": {f"{t:g}": _agreement(p_low >= np.log(t), p_high >= np.log(t)) for t in THRESHOLDS},
    }


def _differences(values: np.ndarray) -> dict[str, float]:
    quantiles = np.quantile(np.abs(values), QUANTILES)
    return {
        "mean": float(values.mean()),
        "mean_absolute": float(np.abs(values).mean()),
        **{f"q{q * 100:g}": float(value) for q, value in zip(QUANTILES, quantiles, strict=True)},
    }


def _agreement(low: np.ndarray, high: np.ndarray) -> dict[str, int]:
    return {TYPES[0]: int(low.sum()), TYPES[1]: int(high.sum()), "just_one": int((low != high).sum())}
