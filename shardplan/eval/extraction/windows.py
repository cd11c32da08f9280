"""Windows of an extraction run: their positions in the texts, and their tokens. Imports no JAX."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa

from shardplan.config.sections import StrideUnit
from shardplan.errors import ConfigError
from shardplan.eval.texts.reader import TextReader
from shardplan.eval.windows import Rows
from shardplan.monitoring.step_statistics import Count

CHARACTERS_PER_WINDOW = 20
"""Number of characters that are encoded per token of a window, if the stride counts characters."""


@dataclass(frozen=True)
class Protocol:
    """How texts are divided into windows: a given prefix, and a suffix whose probability is measured."""

    prefix: int = 50
    suffix: int = 50
    stride: int = 5
    unit: StrideUnit = StrideUnit.TOKENS
    bos_in_prefix: bool = False
    """Whether the first token of the prefix is the tokenizer's beginning-of-sequence token, outside of the text."""

    @property
    def text_prefix(self) -> int:
        """Number of prefix tokens that are part of the text."""
        return self.prefix - self.bos_in_prefix

    @property
    def length(self) -> int:
        """Number of window tokens that are part of the text."""
        return self.text_prefix + self.suffix

    @property
    def encoded_characters(self) -> int:
        """Maximum number of characters that are encoded for a window, if the stride counts characters."""
        return CHARACTERS_PER_WINDOW * (self.prefix + self.suffix)

    def count(self, size: int) -> int:
        """Return the number of windows of a text of `size` tokens or characters, whichever the stride counts.

        If the stride counts characters, the number includes windows that turn out to have too few tokens.
        """
        if self.unit is StrideUnit.CHARACTERS:
            return -(-size // self.stride)
        return max(0, (size - self.length) // self.stride + 1)


def result_schema(suffix: int) -> pa.Schema:
    """Return the columns of the results for suffixes of `suffix` tokens.

    >>> result_schema(50).names[-3:], result_schema(50).field("rank").type
    (['log_prob', 'rank', 'top_log_prob'], FixedSizeListType(fixed_size_list<item: int32>[50]))
    """
    return pa.schema(
        [
            ("window", pa.int64()),
            ("text", pa.string()),
            ("start", pa.int64()),
            ("suffix_start", pa.int64()),
            ("end", pa.int64()),
            ("log_prob", pa.list_(pa.float32(), suffix)),
            ("rank", pa.list_(pa.int32(), suffix)),
            ("top_log_prob", pa.list_(pa.float32(), suffix)),
        ]
    )


@dataclass(frozen=True)
class ExtractionWindows:
    """The windows of all texts, numbered from 0 in the order of the texts."""

    protocol: Protocol
    special: tuple[int, ...]
    """Tokens with which each window begins."""
    ids: tuple[str, ...]
    """Id of each text."""
    pieces: tuple[np.ndarray, ...]
    """Number of tokens of each piece, int64[piece] for each text; empty if the stride counts characters."""
    counts: tuple[int, ...]
    """Number of windows of each text."""
    characters: tuple[int, ...]
    """Number of characters of each text."""
    position: int
    """Tokens of a sequence; those after its windows are padding."""
    spacing: int = 1
    """Score every `spacing`-th window, counted over all texts."""

    @property
    def window_tokens(self) -> int:
        """Tokens per window, special tokens included."""
        return len(self.special) + self.protocol.length

    @property
    def per_sequence(self) -> int:
        """Windows per sequence."""
        return self.position // self.window_tokens

    @property
    def total(self) -> int:
        """Number of windows that are scored."""
        return -(-int(self._firsts[-1]) // self.spacing)

    @cached_property
    def _firsts(self) -> np.ndarray:
        """Index of the first window of each text, and finally the number of all windows, int64[text + 1]."""
        return np.concatenate([[0], np.cumsum(self.counts)])

    @property
    def sequences(self) -> int:
        """Number of sequences."""
        return -(-self.total // self.per_sequence)

    def count(self, sequences: int) -> Count:
        """Count the windows and tokens in the first `sequences` sequences."""
        windows = min(sequences * self.per_sequence, self.total)
        return Count(windows, windows * self.protocol.suffix)

    def job(self, first: int, last: int) -> "ExtractionJob":
        """Return the job that makes the sequences from `first` to `last`."""
        parts = self.locate(first * self.per_sequence, last * self.per_sequence)
        texts = {text for text, _ in parts}
        return ExtractionJob(
            self.protocol, self.special, self.position, last - first, parts,
            {text: np.concatenate([[0], np.cumsum(self.pieces[text])]) for text in texts} if self.pieces else {},
            {text: self.characters[text] for text in texts},
        )  # fmt: skip

    def locate(self, first: int, last: int) -> list[tuple[int, range]]:
        """Return the scored windows from `first` to `last`, as the text of each and its index within the text."""
        begin, end = first * self.spacing, min(last, self.total) * self.spacing
        parts = []
        for text in range(max(int(np.searchsorted(self._firsts, begin, "right")) - 1, 0), len(self.counts)):
            offset = int(self._firsts[text])
            if offset >= end:
                break
            start = max(begin, -(-offset // self.spacing) * self.spacing) - offset
            numbers = range(start, min(end - offset, self.counts[text]), self.spacing)
            if numbers:
                parts.append((text, numbers))
        return parts

    def table(self, first: int, rows: Rows, scores: Mapping[str, np.ndarray]) -> pa.Table:
        """Return the results of some sequences, one row per window; see `shardplan.eval.windows.Windows`."""
        windows, schema = rows.windows, result_schema(self.protocol.suffix)
        kept = np.flatnonzero(windows["is_valid"])
        columns = {
            "window": pa.array(first + kept),
            "text": pa.array([self.ids[i] for i in windows["text"][kept]], pa.string()),
            **{name: pa.array(windows[name][kept]) for name in ("start", "suffix_start", "end")},
        }
        # the score of a token is that of the position before it
        suffix = slice(self.window_tokens - self.protocol.suffix - 1, self.window_tokens - 1)
        for name, values in scores.items():
            each = values[:, : self.per_sequence * self.window_tokens].reshape(-1, self.window_tokens)[kept, suffix]
            kind = schema.field(name).type
            flat = pa.array(np.ascontiguousarray(each).reshape(-1), kind.value_type)
            columns[name] = pa.FixedSizeListArray.from_arrays(flat, type=kind)
        return pa.table(columns, schema)

    def find_tokens(self, rows: Rows) -> np.ndarray:
        """Return which elements of sequences are tokens of windows that have results."""
        is_token = np.zeros((len(rows.inputs[0]), self.position), bool)
        by_window = np.repeat(rows.windows["is_valid"], self.window_tokens)
        is_token[:, : self.per_sequence * self.window_tokens] = by_window.reshape(len(is_token), -1)
        return is_token


@dataclass(frozen=True)
class ExtractionJob:
    """Makes the windows of some sequences."""

    protocol: Protocol
    special: tuple[int, ...]
    position: int
    sequences: int
    parts: Sequence[tuple[int, range]]
    """Each text, and the indices of its windows."""
    before: Mapping[int, np.ndarray]
    """Text -> number of tokens before each piece, and of all tokens, int64[piece + 1]."""
    characters: Mapping[int, int]
    """Text -> number of characters in it."""

    def make(self, texts: TextReader) -> Rows:
        """Make the sequences; windows past the end or with too few tokens are padding, marked invalid."""
        width = len(self.special) + self.protocol.length
        per_sequence = self.position // width
        count = self.sequences * per_sequence
        tokens = np.zeros((count, self.protocol.length), np.int32)
        windows = {name: np.zeros(count, np.int64) for name in ("text", "start", "suffix_start", "end")}
        windows["is_valid"] = np.zeros(count, bool)
        at = 0
        fill = self._fill_by_tokens if self.protocol.unit is StrideUnit.TOKENS else self._fill_by_characters
        for text, numbers in self.parts:
            # the text between windows that do not overlap is not read
            overlaps = numbers.step * self.protocol.stride < self.protocol.length
            for group in [numbers] if overlaps else [numbers[i : i + 1] for i in range(len(numbers))]:
                part = slice(at, at + len(group))
                windows["text"][part] = text
                own = {name: values[part] for name, values in windows.items()}
                fill(texts, text, np.array(group) * self.protocol.stride, tokens[part], own)
                at += len(group)
        packed = np.zeros((count, width), np.int32)
        packed[:, : len(self.special)] = np.where(windows["is_valid"][:, None], self.special, 0)
        packed[:, len(self.special) :] = tokens
        sequences = np.zeros((self.sequences, self.position), np.int32)
        sequences[:, : per_sequence * width] = packed.reshape(self.sequences, -1)
        return Rows((sequences,), windows)

    def _fill_by_tokens(
        self, texts: TextReader, text: int, starts: np.ndarray, tokens: np.ndarray, windows: Mapping[str, np.ndarray]
    ) -> None:
        """Fill arrays with the windows of a text that start at given tokens."""
        protocol = self.protocol
        read = texts.tokens(text, self.before[text], int(starts[0]), int(starts[-1]) + protocol.length)
        starts = starts - starts[0]
        tokens[:] = read.ids[starts[:, None] + np.arange(protocol.length)]
        windows["start"][:], windows["suffix_start"][:] = (
            read.starts[starts],
            read.starts[starts + protocol.text_prefix],
        )
        windows["end"][:] = read.ends[starts + protocol.length - 1]
        windows["is_valid"][:] = True

    def _fill_by_characters(
        self, texts: TextReader, text: int, starts: np.ndarray, tokens: np.ndarray, windows: Mapping[str, np.ndarray]
    ) -> None:
        """Fill arrays with the windows of a text that start at given characters and have enough tokens."""
        protocol, tokenizer, first = self.protocol, texts.tokenizer, int(starts[0])
        end = min(self.characters[text], int(starts[-1]) + protocol.encoded_characters)
        part = texts.characters(text, first, end)
        encoded = [part[start - first :][: protocol.encoded_characters] for start in starts]
        for i, encoding in enumerate(tokenizer.encode_batch_fast(encoded, add_special_tokens=False)):
            if len(encoding.ids) < protocol.length:
                continue
            ids, start = encoding.ids[: protocol.length], starts[i]
            tokens[i] = ids
            windows["start"][i], windows["is_valid"][i] = start, True
            windows["end"][i] = start + len(tokenizer.decode(ids, skip_special_tokens=False))
            windows["suffix_start"][i] = start + len(
                tokenizer.decode(ids[: protocol.text_prefix], skip_special_tokens=False)
            )


def divide_texts(
    protocol: Protocol,
    special: tuple[int, ...],
    ids: Sequence[str],
    pieces: Sequence[np.ndarray],
    characters: Sequence[int],
    position: int,
    limit: int | None = None,
) -> ExtractionWindows:
    """Assign indices to the windows of texts.

    >>> pieces = [np.array([13]), np.array([5])]
    >>> protocol = Protocol(prefix=3, suffix=2, stride=4)
    >>> windows = divide_texts(protocol, (), ["a", "b"], pieces, characters=[50, 20], position=10)
    >>> windows.counts, windows.sequences
    ((3, 1), 2)

    Args:
        limit: most windows to score, evenly spread over all; None for all.

    Raises:
        ConfigError: no text has a window.
    """
    by_tokens = protocol.unit is StrideUnit.TOKENS
    sizes = [int(each.sum()) for each in pieces] if by_tokens else characters
    counts = tuple(map(protocol.count, sizes))
    if sum(counts) == 0:
        raise no_window_error(protocol)
    spacing = 1 if limit is None else -(-sum(counts) // limit)
    return ExtractionWindows(
        protocol, special, tuple(ids), tuple(pieces) if by_tokens else (), counts, tuple(characters), position, spacing
    )


def no_window_error(protocol: Protocol) -> ConfigError:
    """Return the error for texts that are too short for a window.

    >>> str(no_window_error(Protocol(prefix=50, suffix=50, stride=10)))
    'data.path holds no text of 100 tokens, the length of a window'
    """
    return ConfigError(f"data.path holds no text of {protocol.length} tokens, the length of a window")
