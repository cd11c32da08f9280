"""Differences between the losses of runs on the same windows, with standard errors.

For a text with the windows w = 1..m, of which w has n_w tokens and d_w is the loss of a run minus that of the first run
(nats):

    difference     = sum of d_w / sum of n_w                                                    (nats per token)
    standard error = sqrt(m / (m - 1) * sum of (d_w - difference * n_w)^2) / sum of n_w         (nats per token)

That is the error of a ratio of sums over independent windows, linearized. For all texts together the same formulas have
a text where they have a window here: tokens of a text depend on each other, and so do its windows, so that texts are
the clusters. One window, or one text, has no standard error.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from shardplan.errors import ConfigError
from shardplan.eval.run_results.finished_runs import (
    FinishedRun,
    MatchedTexts,
    check_protocol,
    labels_of,
    match_texts,
    other_tokenizers,
)
from shardplan.eval.run_results.folder import SUMMARY, read_windows

PROTOCOL = ("workload.position", "task.stride", "task.special_tokens")
"""Settings that determine the windows of a run."""
WINDOW = ("text", "start", "end", "tokens")
"""Columns that are equal for windows of the same tokens."""


@dataclass(frozen=True)
class LossDifference:
    """The loss of a run and its difference from the first run's, in nats per token; None if not finite."""

    loss_per_token: float | None
    difference: float | None = None
    standard_error: float | None = None
    """Standard error of the difference; None also for a single window or text."""


@dataclass(frozen=True)
class ComparedText:
    """The losses of one text, or of all texts together, in every run."""

    tokens: int
    windows: int
    runs: list[LossDifference]
    """The loss of each run; the first run has no difference."""


@dataclass(frozen=True)
class LossComparison:
    """Several runs side by side on the texts that all of them were run on."""

    labels: tuple[str, ...]
    """Distinct names of the runs."""
    texts: dict[str, ComparedText]
    total: ComparedText
    matched: MatchedTexts
    """Which texts can be compared."""

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "models": list(self.labels),
            "unit": "nats per token",
            "total": asdict(self.total),
            "texts": {id_: asdict(text) for id_, text in self.texts.items()},
            "left_out": list(self.matched.left_out),
        }


def ratio_with_error(differences: np.ndarray, tokens: np.ndarray) -> tuple[float, float | None]:
    """Return the difference per token and its standard error, which is None for a single element.

    Example:
        >>> ratio_with_error(np.array([1.0, 3.0]), np.array([10, 10]))
        (0.2, 0.1)

    Args:
        differences: float64[cluster], nats.
        tokens: int64[cluster].
    """
    count, total = len(tokens), float(tokens.sum())
    ratio = float(differences.sum()) / total
    if count < 2:
        return ratio, None
    residuals = differences - ratio * tokens
    return ratio, float(np.sqrt(count / (count - 1) * np.square(residuals).sum()) / total)


def compare_losses(runs: Sequence[FinishedRun]) -> LossComparison:
    """Compare the losses of several runs with the first run's, text by text.

    Raises:
        ConfigError: protocols or tokenizers differ, or the runs have no text in common.
    """
    labels = labels_of(runs)
    for other in runs[1:]:
        check_protocol(runs[0], other, *({name: run.run.get(name) for name in PROTOCOL} for run in (runs[0], other)))
    others = other_tokenizers(runs, labels)
    if others:
        raise ConfigError(
            f"tokenizers differ: {', '.join(others)} from {labels[0]}; losses per token of other tokens cannot be "
            f"compared, their bits per byte in {SUMMARY} can"
        )
    matched = match_texts(runs)
    tables = [_read_losses(run, matched.common) for run in runs]
    for run, table in zip(runs[1:], tables[1:], strict=True):
        if not table.select(WINDOW).equals(tables[0].select(WINDOW)):
            raise ConfigError(f"{run.ref} has other windows than {runs[0].ref}; run both evaluations again")
    tokens = tables[0]["tokens"].to_numpy()
    losses = np.stack([table["loss"].to_numpy() for table in tables])
    rows = _rows_of_texts(tables[0]["text"])
    texts = {}
    for id_ in matched.common:
        part = rows.get(id_, slice(0, 0))
        texts[id_] = _compare(losses[:, part], tokens[part])
    parts = list(rows.values())
    sums = np.stack([losses[:, part].sum(axis=1) for part in parts], 1) if parts else np.zeros((len(runs), 0))
    total = _compare(sums, np.array([tokens[part].sum() for part in parts], np.int64))
    return LossComparison(labels, texts, ComparedText(total.tokens, len(tokens), total.runs), matched)


def _compare(losses: np.ndarray, tokens: np.ndarray) -> ComparedText:
    """Compare runs by losses in nats, float64[run, cluster]; a cluster is a window or text of int64[cluster] tokens."""
    count = int(tokens.sum())
    if count == 0:
        return ComparedText(0, len(tokens), [LossDifference(None) for _ in losses])
    runs = []
    for run, values in enumerate(losses):
        per_token = float(values.sum()) / count
        loss = per_token if np.isfinite(per_token) else None
        if run == 0 or not np.isfinite(losses[[0, run]]).all():
            runs.append(LossDifference(loss))
        else:
            runs.append(LossDifference(loss, *ratio_with_error(values - losses[0], tokens)))
    return ComparedText(count, len(tokens), runs)


def _read_losses(run: FinishedRun, texts: Iterable[str]) -> pa.Table:
    """Return the windows of a run that predict tokens of given texts, ordered by text and position.

    The order in the file depends on how windows are packed, which may differ between runs.
    """
    table = pa.concat_tables(read_windows(run.ref, [*WINDOW, "loss"])).combine_chunks()
    table = table.filter(pc.is_in(table["text"], pa.array(list(texts), pa.string())))
    return table.sort_by([(name, "ascending") for name in WINDOW])


def _rows_of_texts(column: pa.ChunkedArray) -> dict[str, slice]:
    """Map each text to its rows in a column that is grouped by text."""
    names = column.to_pylist()
    starts = [i for i, name in enumerate(names) if i == 0 or names[i - 1] != name]
    ends = [*starts[1:], len(names)]
    return {names[start]: slice(start, end) for start, end in zip(starts, ends, strict=True)}
