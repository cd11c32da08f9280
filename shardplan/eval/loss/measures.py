"""Measures of the loss of texts: nats per token, perplexity, and bits per byte. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

COLUMNS = ("tokens", "bytes", "loss")


def summarize(ids: Sequence[str], results: Iterable[pa.Table]) -> dict[str, Any]:
    """Return the measures of all texts together (`total`), and of each text (`texts`).

    The measures are `tokens` (predicted tokens), `bytes` (UTF-8 bytes of these tokens' characters), `loss_per_token`
    (nats), `perplexity` and `bits_per_byte`. A measure is None if nothing is predicted, or if the loss is not finite.

    >>> table = {"text": ["a", "b"], "tokens": [3, 1], "bytes": [12, 4], "loss": [3.0, 2.0]}
    >>> result = summarize(["a", "b"], [pa.table(table)])
    >>> result["total"]["loss_per_token"], result["texts"]["b"]["loss_per_token"]
    (1.25, 2.0)

    Args:
        ids: id of every text.
        results: tables with the columns of `shardplan.eval.loss.windows.SCHEMA`.
    """
    index = {id_: i for i, id_ in enumerate(ids)}
    sums = {name: np.zeros(len(ids), np.float64 if name == "loss" else np.int64) for name in COLUMNS}
    for table in results:
        names = table["text"].dictionary_encode().combine_chunks()
        texts = np.array([index[name] for name in names.dictionary.to_pylist()])[names.indices.to_numpy()]
        for name, each in sums.items():
            np.add.at(each, texts, table[name].to_numpy())
    rows = (dict(zip(COLUMNS, values, strict=True)) for values in zip(*(sums[name] for name in COLUMNS), strict=True))
    return {
        "total": measures({name: values.sum() for name, values in sums.items()}),
        "texts": {id_: measures(row) for id_, row in zip(ids, rows, strict=True)},
    }


def measures(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Return the measures of a text with `tokens` tokens and `bytes` bytes, whose `loss` is in nats.

    >>> measures({"tokens": 4, "bytes": 16, "loss": 4 * math.log(2)})
    {'tokens': 4, 'bytes': 16, 'loss_per_token': 0.6931471805599453, 'perplexity': 2.0, 'bits_per_byte': 0.25}
    """
    tokens, text_bytes, nats = int(sums["tokens"]), int(sums["bytes"]), float(sums["loss"])
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
        "bits_per_byte": nats / math.log(2) / text_bytes if text_bytes else None,
    }
