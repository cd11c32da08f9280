"""Compares extraction runs by the part of each text that is covered at each threshold."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.eval.extraction.probabilities import THRESHOLDS, total_of
from shardplan.eval.run_results.finished_runs import (
    FinishedRun,
    MatchedTexts,
    check_protocol,
    labels_of,
    match_texts,
    other_tokenizers,
)


@dataclass(frozen=True)
class Comparison:
    """Several models side by side on the texts that all of them were run on."""

    labels: tuple[str, ...]
    """Distinct names of the runs."""
    texts: dict[str, list[dict[str, Any]]]
    """Text -> the text's summary in each run."""
    total: list[dict[str, Any]]
    """Summary of all compared texts together, in each run."""
    matched: MatchedTexts
    """Which texts can be compared."""
    thresholds: list[float]
    curves: list[list[float]]
    """Covered fraction of all characters at each of `thresholds`, for each run."""
    other_tokenizers: tuple[str, ...]
    """Labels of the runs whose tokenizer differs from the first run's, so that their windows cover other parts."""

    def to_json(self) -> dict[str, Any]:
        """Return the comparison as JSON values."""
        return {
            "models": list(self.labels),
            "total": self.total,
            "texts": self.texts,
            "left_out": list(self.matched.left_out),
            "thresholds": self.thresholds,
            "curves": self.curves,
            "one_tokenizer": not self.other_tokenizers,
        }


def compare(runs: Sequence[FinishedRun]) -> Comparison:
    """Compare two or more extraction runs.

    Raises:
        ConfigError: protocols differ, or the runs have no text in common.
    """
    for other in runs[1:]:
        check_protocol(runs[0], other, _protocol(runs[0]), _protocol(other))
    matched, labels = match_texts(runs), labels_of(runs)
    texts = {id_: [each.summary["texts"][id_] for each in runs] for id_ in matched.common}
    total = [total_of([values[i] for values in texts.values()]) for i in range(len(runs))]
    thresholds, curves = _curves(runs, matched.common, total)
    return Comparison(labels, texts, total, matched, thresholds, curves, other_tokenizers(runs, labels))


def _protocol(run: FinishedRun) -> dict[str, Any]:
    """Return the settings that determine a run's windows and what is measured in them."""
    return {**run.run["protocol"], "temperature": run.run.get("temperature", 1.0)}


def _curves(
    runs: Sequence[FinishedRun], common: Sequence[str], total: Sequence[Mapping[str, Any]]
) -> tuple[list[float], list[list[float]]]:
    """Return thresholds, and for each run the coverage of the common texts at the thresholds.

    Runs with many texts store curves only for the first texts. If a common text has no curve, the result has only
    `THRESHOLDS`, for which the coverage of all texts is stored.
    """
    thresholds: list[float] = runs[0].summary["plots"]["thresholds"]
    curves = []
    for each in runs:
        plots, texts = each.summary["plots"], each.summary["texts"]
        if len(common) == len(texts):
            curves.append(plots["total"]["curve"])
            continue
        covered, characters = np.zeros(len(thresholds)), 0
        for id_ in common:
            if texts[id_]["windows"] and id_ not in plots["texts"]:
                return list(THRESHOLDS), [list(one["coverage"].values()) for one in total]
            curve = plots["texts"][id_]["curve"] if texts[id_]["windows"] else 0.0
            covered += np.array(curve) * texts[id_]["characters"]
            characters += texts[id_]["characters"]
        curves.append((covered / max(characters, 1)).tolist())
    return thresholds, curves
