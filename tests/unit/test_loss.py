"""Windows predict every token once, wherever they are packed; measures equal hand calculations."""

import json
import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardplan.errors import ConfigError
from shardplan.eval.loss.measures import measures, summarize
from shardplan.eval.loss.windows import SCHEMA, divide_texts
from shardplan.eval.texts.encoding import Tokens
from shardplan.eval.texts.reader import SpecialTokens

ALPHABET = "aé漢🙂"


class Characters:
    """Texts whose tokens are their characters."""

    def __init__(self, texts):
        self.texts = texts

    def characters(self, text, start, end):
        return self.texts[text][start:end]

    def tokens(self, text, before, start, end):
        ids = [100 + ALPHABET.index(c) for c in self.texts[text][start:end]]
        return Tokens(np.array(ids, np.int32), np.arange(start, end), np.arange(start, end) + 1)


def recipe(size, position, stride):
    """(start, end, first predicted) of the windows of a text of `size` tokens, as transformers' guide has them."""
    windows, previous_end = [], 0
    for start in range(0, size, stride):
        end = min(start + position, size)
        windows.append((start, end, max(previous_end, 1)))
        previous_end = end
        if end == size:
            break
    return windows


@pytest.mark.slow
@settings(max_examples=150)
@given(st.data())
def test_windows_are_those_of_the_recipe(data):
    """Every token but a text's first is predicted once, from those before it in its window."""
    texts = data.draw(st.lists(st.text(ALPHABET, max_size=30), min_size=1, max_size=5))
    position = data.draw(st.integers(2, 9))
    stride = data.draw(st.integers(1, position - 1))
    special = SpecialTokens(*(tuple(data.draw(st.lists(st.just(t), max_size=1))) for t in (1, 2)))
    streams = [[*special.before, *(100 + ALPHABET.index(c) for c in text), *special.after] for text in texts]
    expected = [
        (i, *window) for i, stream in enumerate(streams) for window in recipe(len(stream), position, stride)
        if len(stream) > 1
    ]  # fmt: skip
    pieces = [np.array([len(text)]) for text in texts]
    ids, characters = [str(i) for i in range(len(texts))], [len(text) for text in texts]
    may_pack = data.draw(st.booleans())
    if not expected:
        with pytest.raises(ConfigError, match="nothing can be predicted"):
            divide_texts(ids, pieces, characters, special, position, stride, may_pack)
        return
    windows = divide_texts(ids, pieces, characters, special, position, stride, may_pack)
    w = windows.windows
    made = {(int(t), int(a), int(b), int(p)) for t, a, b, p in zip(w.text, w.start, w.end, w.predicted, strict=True)}
    assert made == {*expected} and len(w.text) == len(expected)
    assert windows.is_packed == (windows.sequences < len(expected)) and (may_pack or not windows.is_packed)

    middle = data.draw(st.integers(0, windows.sequences))
    predicted, sums = {}, {}
    for first, last in ((0, middle), (middle, windows.sequences + 1)):
        rows = windows.job(first, last).make(Characters(texts))
        tokens, predicts, *starts = rows.inputs
        # the loss of a token: its position in the text, which no other has
        losses = np.zeros(tokens.shape)
        for row, index in zip(*np.nonzero(predicts), strict=True):
            start = int(starts[0][row, index]) if starts else 0
            number = next(i for i in range(len(w.text)) if w.sequence[i] == first + row and w.offset[i] == start)
            at = int(w.start[number]) + index + 1 - start
            stream = streams[w.text[number]]
            assert tokens[row, index + 1] == stream[at] and tokens[row, index] == stream[at - 1]
            key = (int(w.text[number]), at)
            assert key not in predicted
            predicted[key] = losses[row, index] = 2.0 ** -(at % 30)
        table = windows.table(windows.count(min(first, windows.sequences)).windows, rows, {"loss": losses})
        assert table.schema == SCHEMA
        for row in table.to_pylist():
            own = sums.setdefault(row["text"], [0, 0, 0.0])
            own[0] += row["tokens"]
            own[1] += len(texts[int(row["text"])][row["start"] : row["end"]].encode())
            own[2] += row["loss"]
            assert row["bytes"] == len(texts[int(row["text"])][row["start"] : row["end"]].encode())
    assert {*predicted} == {(i, at) for i, stream in enumerate(streams) for at in range(1, len(stream))}
    for i, (text, stream) in enumerate(zip(texts, streams, strict=True)):
        if len(stream) > 1:
            # without a token before it, the first character is not predicted
            own_bytes = len((text if special.before else text[1:]).encode())
            assert sums[str(i)][:2] == [len(stream) - 1, own_bytes]
            assert sums[str(i)][2] == pytest.approx(sum(2.0 ** -(at % 30) for at in range(1, len(stream))), rel=1e-12)


def test_measures():
    rows = {
        "window": [0, 1, 2], "text": ["a", "b", "a"], "start": [0] * 3, "end": [0] * 3, "tokens": [1, 1, 1],
        "bytes": [2, 2, 4], "loss": [0.25, 2.0, 0.75],
    }  # fmt: skip
    summary = summarize(["a", "b", "c"], [pa.table(rows, SCHEMA)])
    first, second, third = summary["texts"].values()
    assert (third["tokens"], third["loss_per_token"], third["perplexity"]) == (0, None, None)
    assert (first["tokens"], first["bytes"]) == (2, 6)
    assert first["loss_per_token"] == 0.5 and first["perplexity"] == math.exp(0.5)
    assert first["bits_per_byte"] == 1.0 / math.log(2) / 6
    assert second["loss_per_token"] == 2.0
    assert summary["total"]["loss_per_token"] == 1.0


def test_a_loss_that_is_not_finite_is_valid_json():
    """Weights of NaN: `NaN` is no number of JSON, and strict readers would refuse the whole file."""
    result = measures({"tokens": 3, "bytes": 9, "loss": float("nan")})
    assert json.loads(json.dumps(result, allow_nan=False)) == result and result["loss_per_token"] is None
