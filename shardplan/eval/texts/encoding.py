"""Encodes a text piece by piece, each in a worker process. Imports no JAX.

A text is encoded in pieces, each with some of the text around it. Where two pieces meet, the first token at which the
encodings of both sides agree begins the second one, so that the tokens are those of the text encoded at once. If they
agree nowhere, as in thousands of equal characters, the text is split at the piece.
"""

from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer

from shardplan.errors import CheckpointError, one_line
from shardplan.eval.texts.store import PIECE, read_characters

CONTEXT = 512
"""Characters on each side of a boundary between pieces, in which the encodings of both pieces must agree."""
AGREEMENT = 4
"""Number of consecutive tokens that must be equal for two encodings to agree."""


class Tokens(NamedTuple):
    """Tokens of a part of a text, and the characters that each token covers."""

    ids: np.ndarray
    """Token ids, int32[token]."""
    starts: np.ndarray
    """Character of the text at which each token begins, int64[token]."""
    ends: np.ndarray
    """Character of the text after each token's last, int64[token]."""


def make_tokenizer(data: bytes, name: str) -> Tokenizer:
    """Make the tokenizer of a tokenizer.json, set to encode texts completely and without padding.

    >>> from tokenizers.models import WordLevel
    >>> stored = Tokenizer(WordLevel({"a": 0, "b": 1}, unk_token="a"))
    >>> stored.enable_padding(length=8)
    >>> make_tokenizer(stored.to_str().encode(), "tokenizer.json").encode("b").ids
    [1]

    Raises:
        CheckpointError: the data is not a tokenizer.json.
    """
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{name} is damaged: {one_line(error)}") from error
    # tokenizer.json keeps the settings of its last use
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


class PieceEncoder:
    """Encodes the pieces of one text in a `TextStore`, without special tokens."""

    def __init__(self, tokenizer: Tokenizer, path: str, places: np.ndarray, characters: int):
        """Encode a text of `characters` characters.

        Args:
            path: path of the `TextStore`.
            places: `Text.pieces` of the text.
        """
        self._tokenizer, self._path, self._places, self._characters = tokenizer, path, places, characters

    def encode(self, piece: int) -> Tokens:
        """Encode a piece: return the tokens from its boundary up to the next piece's boundary."""
        start, end = self._boundary(piece), self._boundary(piece + 1)
        # as much before the piece as `_boundary` encoded, so that its first token is the one that was found there
        first = start if start == piece * PIECE else piece * PIECE - 2 * CONTEXT
        is_split = end == (piece + 1) * PIECE or end == self._characters
        tokens = self._encode(max(0, first), end if is_split else (piece + 1) * PIECE + 2 * CONTEXT)
        inside = slice(*np.searchsorted(tokens.starts, [start, end]))
        return Tokens(tokens.ids[inside], tokens.starts[inside], tokens.ends[inside])

    def _boundary(self, piece: int) -> int:
        """Return the character at which the tokens of a piece begin."""
        at = piece * PIECE
        if at == 0 or at >= self._characters:
            return min(at, self._characters)
        before, after = self._encode(at - 2 * CONTEXT, at + CONTEXT), self._encode(at - CONTEXT, at + 2 * CONTEXT)
        positions = {int(start): i for i, start in enumerate(after.starts)}
        for i in range(int(np.searchsorted(before.starts, at)), len(before.ids) - AGREEMENT):
            j = positions.get(int(before.starts[i]))
            if j is not None and np.array_equal(before.ids[i : i + AGREEMENT], after.ids[j : j + AGREEMENT]):
                return int(before.starts[i])
        return at

    def _encode(self, start: int, end: int) -> Tokens:
        """Encode the characters from `start` to `end`, without special tokens."""
        end = min(end, self._characters)
        text = read_characters(self._path, self._places, start, end)
        encoding = self._tokenizer.encode(text, add_special_tokens=False)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2) + start
        return Tokens(np.array(encoding.ids, np.int32), offsets[:, 0], offsets[:, 1])
