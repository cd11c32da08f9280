"""The summary of an extraction run: figures of each text from its windows, and the data of the pictures."""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from shardplan.eval.extraction.probabilities import CURVE_LOG_THRESHOLDS, LOG_BINS, TextSummary, total_of
from shardplan.eval.texts.store import Text

MAX_PICTURES = 100
"""Maximum number of texts with pictures: the first ones that have windows."""


def summarize(tables: Iterable[pa.Table], texts: Sequence[Text], top_k: int) -> dict[str, Any]:
    """Summarize the results of all windows; one text is in memory at a time.

    >>> from shardplan.eval.extraction.windows import result_schema
    >>> windows = {"window": [0], "text": ["a"], "start": [0], "suffix_start": [4], "end": [8]}
    >>> windows |= {"log_prob": [[-1.0, -2.0]], "rank": [[0, 3]], "top_log_prob": [[0.0, 0.0]]}
    >>> text = Text("a", characters=16, digest="", pieces=np.array([0, 16]))
    >>> total = summarize([pa.table(windows, result_schema(suffix=2))], [text], top_k=0)["total"]
    >>> total["mean_log_p"], total["coverage"]["0.01"], total["coverage"]["0.1"]
    (-3.0, 0.5, 0.0)

    Args:
        tables: the windows, in the order of the texts.
        top_k: the k of top-k scores; 0 if there are none.

    Returns:
        `total`, `texts` (by id) and `plots`. In `plots`, the total and at most `MAX_PICTURES` texts have a `histogram`
        (windows from -(i + 1) to -i nats), and a `curve` and a `suffix_curve` (the covered fraction of characters at
        each of `thresholds`); each of these texts also has a `strip` (the largest log p_z in each of its equal parts).
    """
    by_text = itertools.groupby(split_by_text(tables), key=lambda item: item[0])
    id_, parts = next(by_text, (None, iter(())))
    summaries: dict[str, Any] = {}
    plots: dict[str, Any] = {}
    histogram, curves = np.zeros(LOG_BINS, np.int64), np.zeros((2, len(CURVE_LOG_THRESHOLDS)), np.int64)
    for text in texts:
        each = TextSummary(text.characters, top_k)
        if text.id == id_:
            for _, part in parts:
                each.add(part)
            id_, parts = next(by_text, (None, iter(())))
        summaries[text.id] = each.finish()
        counts = np.stack(each.curve_counts)
        if summaries[text.id]["windows"] and len(plots) < MAX_PICTURES:
            plots[text.id] = {**_plots(each.histogram, counts, text.characters), "strip": _finite(each.strip)}
        histogram, curves = histogram + each.histogram, curves + counts
    total = total_of(list(summaries.values()))
    return {
        "total": total,
        "texts": summaries,
        "plots": {
            "thresholds": np.exp(CURVE_LOG_THRESHOLDS).tolist(),
            "total": _plots(histogram, curves, total["characters"]),
            "texts": plots,
        },
    }


def split_by_text(tables: Iterable[pa.Table]) -> Iterator[tuple[str, pa.Table]]:
    """Yield the id of a text and consecutive windows of it.

    >>> table = pa.table({"text": ["a", "a", "b"], "window": [0, 1, 2]})
    >>> [(text, part["window"].to_pylist()) for text, part in split_by_text([table])]
    [('a', [0, 1]), ('b', [2])]
    """
    for table in tables:
        if table.num_rows == 0:
            continue
        names = table["text"].combine_chunks()
        is_first = np.flatnonzero(np.asarray(names[1:].to_numpy(False) != names[:-1].to_numpy(False))) + 1
        for start, end in itertools.pairwise([0, *is_first.tolist(), table.num_rows]):
            yield names[start].as_py(), table.slice(start, end - start)


def _plots(histogram: np.ndarray, curves: np.ndarray, characters: int) -> dict[str, list[float]]:
    """Return a histogram, and curves of the covered fraction of characters."""
    whole, suffix = (curves / max(characters, 1)).tolist()
    return {"histogram": histogram.tolist(), "curve": whole, "suffix_curve": suffix}


def _finite(values: np.ndarray) -> list[float | None]:
    return [float(value) if np.isfinite(value) else None for value in values]
