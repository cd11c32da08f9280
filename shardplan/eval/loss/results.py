"""The results of an evaluation, per document and in total, from the losses of its windows. Pure arithmetic."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from shardplan.eval.loss.documents import Document, Windows


def summarize(documents: Sequence[Document], windows: Windows, losses: np.ndarray) -> dict[str, Any]:
    """Summarize loss per token (nats), perplexity and bits per UTF-8 byte, per document and in total.

    `unigram_loss_per_token` is the entropy of the predicted tokens: the loss of the best model without context, fitted
    to the same text.

    Args:
        losses: float[window, position], as `EvalRun.losses`; at least one token must be predicted.
    """
    rows = []
    for index, document in enumerate(documents):
        own = windows.document == index
        rows.append({"id": document.id, **_measures(losses[own], int(windows.predicted[own].sum()), document.bytes)})
    total = _measures(losses, int(windows.predicted.sum()), sum(document.bytes for document in documents))
    targets = windows.tokens[:, 1:][windows.predicted[:, :-1]]
    counts = np.bincount(targets)
    frequencies = counts[counts > 0] / counts.sum()
    return {
        "total": {**total, "unigram_loss_per_token": float(-(frequencies * np.log(frequencies)).sum())},
        "documents": rows,
    }


def _measures(losses: np.ndarray, tokens: int, text_bytes: int) -> dict[str, Any]:
    """Return the measures of one text; None for those that it does not have."""
    nats = float(losses.sum(dtype=np.float64))
    # of a text of one token nothing is predicted, and JSON has no number for a loss that is not finite
    if tokens == 0 or not math.isfinite(nats):
        missing = dict.fromkeys(("loss_per_token", "perplexity", "bits_per_byte"))
        return {"tokens": tokens, "bytes": text_bytes, **missing}
    per_token = nats / tokens
    return {
        "tokens": tokens,
        "bytes": text_bytes,
        "loss_per_token": per_token,
        "perplexity": math.exp(min(per_token, 700.0)),  # exp(709) is the largest a float holds
        "bits_per_byte": nats / math.log(2) / text_bytes,
    }
