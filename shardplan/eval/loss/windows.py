"""Overlapping windows of texts for the loss; each window predicts the tokens that no earlier window predicts.

Imports no JAX, because worker processes use it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from shardplan.errors import ConfigError
from shardplan.eval.packing import pack
from shardplan.eval.texts.reader import SpecialTokens, TextReader
from shardplan.eval.windows import Rows
from shardplan.monitoring.step_statistics import Count

SCHEMA = pa.schema(
    [
        ("window", pa.int64()),
        ("text", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("tokens", pa.int64()),
        ("bytes", pa.int64()),
        ("loss", pa.float64()),
    ]
)
"""Columns of the results: the characters that each window predicts, their tokens, bytes, and loss in nats."""


@dataclass(frozen=True)
class WindowArrays:
    """Windows in order, all arrays int64[window]; positions count the tokens of a text, special tokens included."""

    text: np.ndarray
    """Index of the window's text."""
    start: np.ndarray
    """Position of the window's first token."""
    end: np.ndarray
    """Position after the window's last token."""
    predicted: np.ndarray
    """Position of the first predicted token; earlier tokens are context."""
    sequence: np.ndarray
    """Index of the sequence into which the window is packed."""
    offset: np.ndarray
    """Index in the sequence at which the window begins."""

    def select(self, index: np.ndarray | slice) -> "WindowArrays":
        """Return the windows at the given indices."""
        return WindowArrays(*(getattr(self, name)[index] for name in self.__dataclass_fields__))


@dataclass(frozen=True)
class LossWindows:
    """The windows of all texts, in the order of the sequences that they are packed into."""

    position: int
    """Tokens of a sequence."""
    is_packed: bool
    """Whether sequences may hold several windows."""
    special: SpecialTokens
    ids: tuple[str, ...]
    """Id of each text."""
    before: tuple[np.ndarray, ...]
    """Number of tokens before each piece and in all, int64[piece + 1] for each text, special tokens excluded."""
    characters: tuple[int, ...]
    """Number of characters of each text."""
    windows: WindowArrays
    first_window: np.ndarray
    """Index of each sequence's first window, and finally the number of all windows, int64[sequence + 1]."""
    first_token: np.ndarray
    """Number of tokens predicted before each sequence, and finally by all, int64[sequence + 1]."""

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return len(self.first_window) - 1

    def count(self, sequences: int) -> Count:
        """Count the windows and tokens in the first `sequences` sequences."""
        return Count(int(self.first_window[sequences]), int(self.first_token[sequences]))

    def job(self, first: int, last: int) -> "LossJob":
        """Return the job that makes the sequences from `first` to `last`."""
        begin, end = (min(each, self.sequences) for each in (first, last))
        windows = self.windows.select(slice(int(self.first_window[begin]), int(self.first_window[end])))
        texts = np.unique(windows.text).tolist()
        return LossJob(
            self.position, self.is_packed, self.special, first, last - first, windows,
            {text: self.before[text] for text in texts}, {text: self.characters[text] for text in texts},
        )  # fmt: skip

    def table(self, first: int, rows: Rows, scores: Mapping[str, np.ndarray]) -> pa.Table:
        """Return the results of some sequences, one row per window; see `shardplan.eval.windows.Windows`."""
        windows = rows.windows
        # the loss of a token is that of the position before it; the last element ends the last range
        losses = np.append(scores["loss"].astype(np.float64), 0.0)
        ranges = np.stack([windows["index"], windows["index"] + windows["tokens"]], 1).reshape(-1)
        columns = {
            "window": pa.array(first + np.arange(len(windows["text"]))),
            "text": pa.array([self.ids[i] for i in windows["text"]], pa.string()),
            **{name: pa.array(windows[name]) for name in ("start", "end", "tokens", "bytes")},
            "loss": pa.array(np.add.reduceat(losses, ranges)[::2] if len(ranges) else np.zeros(0)),
        }
        return pa.table(columns, SCHEMA)

    def find_tokens(self, rows: Rows) -> np.ndarray:
        """Return which elements of sequences are tokens; a sequence's windows leave no gap before its padding."""
        first, ends = rows.windows["index"], rows.windows["index"] + rows.windows["tokens"] + 1
        row = first // self.position
        lengths = np.zeros(len(rows.inputs[0]), np.int64)
        np.maximum.at(lengths, row, ends - row * self.position)
        is_token: np.ndarray = np.arange(self.position) < lengths[:, None]
        return is_token


@dataclass(frozen=True)
class LossJob:
    """Makes the windows of some sequences."""

    position: int
    is_packed: bool
    special: SpecialTokens
    first: int
    """Index of the first sequence."""
    sequences: int
    windows: WindowArrays
    before: Mapping[int, np.ndarray]
    """Text -> number of tokens before each piece, and of all tokens, int64[piece + 1]."""
    characters: Mapping[int, int]
    """Text -> number of characters in it."""

    def make(self, texts: TextReader) -> Rows:
        """Make the tokens, a mask of tokens that predict the next one, and window starts if windows are packed."""
        shape, w = (self.sequences, self.position), self.windows
        tokens, starts, predicts = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool)
        spans = np.zeros((len(w.text), 3), np.int64)
        rows = w.sequence - self.first
        for i in np.argsort(w.text, kind="stable").tolist():
            row, offset, size = int(rows[i]), int(w.offset[i]), int(w.end[i] - w.start[i])
            part = slice(offset, offset + size)
            tokens[row, part], spans[i] = self._make_window(texts, i)
            starts[row, part] = offset
            predicts[row, offset + int(w.predicted[i] - w.start[i]) - 1 : offset + size - 1] = True
        windows = {
            "text": w.text, "start": spans[:, 0], "end": spans[:, 1], "bytes": spans[:, 2],
            "tokens": w.end - w.predicted, "index": rows * self.position + w.offset + w.predicted - w.start - 1,
        }  # fmt: skip
        return Rows((tokens, predicts, starts) if self.is_packed else (tokens, predicts), windows)

    def _make_window(self, texts: TextReader, i: int) -> tuple[np.ndarray, tuple[int, int, int]]:
        """Return a window's tokens, and the span that it predicts: first character, end character and bytes."""
        text = int(self.windows.text[i])
        start, end, predicted = (int(getattr(self.windows, name)[i]) for name in ("start", "end", "predicted"))
        shift, before = len(self.special.before), self.before[text]
        size = int(before[-1])
        first = max(start - shift, 0)
        # with the token after the window, which tells where the characters of the window end
        read = texts.tokens(text, before, first, min(end - shift + 1, size))

        def character(position: int) -> int:
            """Return the character of the text at which the token at a position begins."""
            token = position - shift
            if token <= 0:
                return 0
            return int(read.starts[token - first]) if token < size else self.characters[text]

        all_ids = (self.special.before[start:], read.ids[: max(end - shift - first, 0)], self.special.after)
        ids = np.concatenate([np.array(each, np.int32) for each in all_ids])[: end - start]
        span = character(predicted), character(end)
        return ids, (*span, len(texts.characters(text, *span).encode()))


def divide_texts(
    ids: Sequence[str],
    pieces: Sequence[np.ndarray],
    characters: Sequence[int],
    special: SpecialTokens,
    position: int,
    stride: int,
    may_pack: bool,
) -> LossWindows:
    """Divide texts into windows of at most `position` tokens that start every `stride` tokens.

    The first window of a text predicts all of its tokens but the first. Each later window predicts the tokens that the
    window before does not contain, as in https://huggingface.co/docs/transformers/perplexity. The last window ends with
    the text.

    >>> special = SpecialTokens(before=(), after=())
    >>> windows = divide_texts(["a"], [np.array([10])], [40], special, position=4, stride=3, may_pack=False).windows
    >>> windows.start.tolist(), windows.predicted.tolist(), windows.end.tolist()
    ([0, 3, 6], [1, 4, 7], [4, 7, 10])

    Args:
        pieces: for each text int64[piece], the number of tokens of its pieces.
        stride: tokens between the starts of windows; less than `position`, so that every predicted token has a token
            before it in its window.
        may_pack: whether to pack several windows into a sequence if that gives fewer sequences.

    Raises:
        ConfigError: no text has a token to predict.
    """
    before = tuple(np.concatenate([[0], np.cumsum(each)]).astype(np.int64) for each in pieces)
    sizes = np.array([each[-1] for each in before], np.int64) + len(special.before) + len(special.after)
    counts = np.where(sizes < 2, 0, 1 + np.maximum(0, -(-(sizes - position) // stride)))
    if counts.sum() == 0:
        raise ConfigError("data.path holds no text of two tokens or more: nothing can be predicted")
    text = np.repeat(np.arange(len(sizes)), counts)
    number = np.arange(len(text)) - np.repeat(np.cumsum(counts) - counts, counts)
    start = number * stride
    end = np.minimum(start + position, sizes[text])
    predicted = np.where(number == 0, 1, start - stride + position)
    alone: tuple[np.ndarray, np.ndarray] = np.arange(len(text)), np.zeros(len(text), np.int64)
    sequence, offset = pack(end - start, position) if may_pack else alone
    is_packed = int(sequence.max()) + 1 < len(text)
    if not is_packed:  # also if that saves none
        sequence, offset = alone
    order = np.lexsort((offset, sequence))
    windows = WindowArrays(text, start, end, predicted, sequence, offset).select(order)
    first_window = np.searchsorted(windows.sequence, np.arange(int(sequence.max()) + 2))
    tokens = np.concatenate([[0], np.cumsum(windows.end - windows.predicted)])
    return LossWindows(
        position, is_packed, special, tuple(ids), before, tuple(characters), windows, first_window, tokens[first_window]
    )
