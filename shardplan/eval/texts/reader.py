"""Reads the tokens of a run's texts, in worker processes. Imports no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from shardplan.eval.texts.encoding import PieceEncoder, Tokens, make_tokenizer
from shardplan.eval.texts.store import TextStore, read_characters

CACHED_PIECES = 64
"""Number of encoded pieces that a worker caches, because neighbouring windows need the same pieces."""


class SpecialTokens(NamedTuple):
    """The tokens that a tokenizer adds to a text, such as a token for its beginning."""

    before: tuple[int, ...]
    after: tuple[int, ...]


def special_tokens(tokenizer: Tokenizer) -> SpecialTokens:
    """Return the tokens that a tokenizer adds to a text.

    >>> from tokenizers.models import WordLevel
    >>> from tokenizers.processors import TemplateProcessing
    >>> tokenizer = Tokenizer(WordLevel({"a": 0, "<s>": 1}, unk_token="a"))
    >>> tokenizer.post_processor = TemplateProcessing(single="<s> $0", special_tokens=[("<s>", 1)])
    >>> special_tokens(tokenizer)
    SpecialTokens(before=(1,), after=())
    """
    encoding = tokenizer.encode("a")
    own = np.flatnonzero(np.array(encoding.special_tokens_mask) == 0)
    first, last = (own[0], own[-1] + 1) if len(own) else (len(encoding.ids), len(encoding.ids))
    return SpecialTokens(tuple(encoding.ids[:first]), tuple(encoding.ids[last:]))


@dataclass(frozen=True)
class Source:
    """The texts of a run, and the tokenizer with which workers encode them."""

    tokenizer: bytes
    """Content of the tokenizer.json."""
    name: str
    """Name of the tokenizer, for messages."""
    path: str
    """Path of the `TextStore`."""
    pieces: tuple[np.ndarray, ...]
    """`Text.pieces` of each text."""
    characters: tuple[int, ...]
    """Number of characters of each text."""

    @property
    def all_pieces(self) -> list[tuple[int, int]]:
        """(Text, piece) for every piece of all texts, in order."""
        return [(text, i) for text, places in enumerate(self.pieces) for i in range(len(places) - 1)]

    def by_text(self, values: Sequence[int]) -> list[np.ndarray]:
        """Divide values of all pieces, in the order of `all_pieces`, into one array int64[piece] per text."""
        return np.split(np.array(values, np.int64), np.cumsum([len(each) - 1 for each in self.pieces])[:-1])


def make_source(store: TextStore, tokenizer: bytes, name: str) -> Source:
    """Collect the texts and the tokenizer from which workers encode the texts of `store`.

    >>> import tempfile
    >>> from shardplan.eval.texts.store import PIECE, Text
    >>> texts = Text("a", PIECE + 5, "", np.array([0, PIECE, PIECE + 5])), Text("b", 3, "", PIECE + np.array([5, 8]))
    >>> make_source(TextStore(texts, tempfile.NamedTemporaryFile()), b"", "tokenizer.json").all_pieces
    [(0, 0), (0, 1), (1, 0)]
    """
    return Source(
        tokenizer, name, store.path, tuple(t.pieces for t in store.texts), tuple(t.characters for t in store.texts)
    )


class TextReader:
    """Reads characters and tokens of the texts of a source."""

    def __init__(self, source: Source):
        self._source = source
        self.tokenizer: Tokenizer = make_tokenizer(source.tokenizer, source.name)
        self._encoded = lru_cache(CACHED_PIECES)(self._encode)

    def count_tokens(self, pieces: Sequence[tuple[int, int]]) -> tuple[list[int], int]:
        """Return the number of tokens of each given (text, piece), and the largest token id."""
        ids = [self._encoded(*piece).ids for piece in pieces]
        return [len(each) for each in ids], max((int(each.max()) for each in ids if len(each)), default=0)

    def characters(self, text: int, start: int, end: int) -> str:
        """Return the characters from `start` to `end` of a text."""
        return read_characters(self._source.path, self._source.pieces[text], start, end)

    def tokens(self, text: int, before: np.ndarray, start: int, end: int) -> Tokens:
        """Return the tokens from `start` to `end` of a text, without special tokens.

        Args:
            before: int64[piece + 1], the number of tokens before each piece, and finally of all pieces.
        """
        if start >= end:
            return Tokens(*(np.zeros(0, dtype) for dtype in (np.int32, np.int64, np.int64)))
        first, last = int(np.searchsorted(before, start, "right")) - 1, int(np.searchsorted(before, end, "left"))
        encoded = [self._encoded(text, piece) for piece in range(first, last)]
        part = slice(start - int(before[first]), end - int(before[first]))
        return Tokens(*(np.concatenate(arrays)[part] for arrays in zip(*encoded, strict=True)))

    def _encode(self, text: int, piece: int) -> Tokens:
        s = self._source
        return PieceEncoder(self.tokenizer, s.path, s.pieces[text], s.characters[text]).encode(piece)
