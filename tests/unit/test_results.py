"""Windows predict every token once; measures equal hand calculations."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.errors import ConfigError
from shardplan.eval.loss.documents import Document, make_windows
from shardplan.eval.loss.results import summarize


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(2, 9), st.integers(1, 4))
def test_every_token_but_the_first_is_predicted_once(lengths, position, batch):
    documents = [Document(str(i), "x" * n) for i, n in enumerate(lengths)]
    streams = {"x" * n: [100 + k for k in range(n)] for n in lengths}
    if max(lengths) < 2:
        with pytest.raises(ConfigError, match="nothing can be predicted"):
            make_windows(documents, streams.__getitem__, position, batch)
        return
    windows = make_windows(documents, streams.__getitem__, position, batch)
    assert len(windows.tokens) % batch == 0
    for index, n in enumerate(lengths):
        rows, positions = np.nonzero(windows.predicted & (windows.document == index)[:, None])
        targets = windows.tokens[rows, positions + 1]
        assert sorted(targets) == [100 + k for k in range(1, n)]
        assert (windows.tokens[rows, positions] == targets - 1).all()
    assert not windows.predicted[windows.document == -1].any()


def test_measures():
    documents = [Document("a", "héllo"), Document("b", "xy"), Document("c", "z")]
    streams = {"héllo": [1, 2, 2], "xy": [1, 3], "z": [1]}
    windows = make_windows(documents, streams.__getitem__, position=4, batch=2)
    losses = np.where(windows.predicted, 0.5, 0.0)
    losses[1, 0] = 2.0
    summary = summarize(documents, windows, losses)
    first, second, third = summary["documents"]
    assert (third["tokens"], third["loss_per_token"], third["perplexity"]) == (0, None, None)
    assert (first["id"], first["tokens"], first["bytes"]) == ("a", 2, 6)
    assert first["loss_per_token"] == 0.5 and first["perplexity"] == math.exp(0.5)
    assert first["bits_per_byte"] == 1.0 / math.log(2) / 6
    assert second["loss_per_token"] == 2.0
    assert summary["total"]["loss_per_token"] == 1.0
    # the predicted tokens are 2, 2, 3
    entropy = -(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3))
    assert summary["total"]["unigram_loss_per_token"] == pytest.approx(entropy, rel=1e-12)


def test_a_loss_that_is_not_finite_is_valid_json():
    """Weights of NaN: `NaN` is no number of JSON, and strict readers would refuse the whole file."""
    documents = [Document(name, "abc") for name in ("a", "b")]
    windows = make_windows(documents, lambda text: [1, 2, 3], position=4, batch=2)
    losses = np.zeros(windows.tokens.shape, np.float32)
    losses[0, 0] = np.nan
    summary = summarize(documents, windows, losses)
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary
    assert summary["total"]["loss_per_token"] is None and summary["documents"][1]["loss_per_token"] == 0.0


def test_windows_with_text_are_counted():
    windows = make_windows([Document("a", "x")], lambda text: [*range(10)], position=4, batch=8)
    assert (windows.count, len(windows.tokens)) == (3, 8)
