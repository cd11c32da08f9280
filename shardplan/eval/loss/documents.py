"""Documents whose loss is evaluated, and the windows of tokens that they are split into."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.errors import ConfigError


@dataclass(frozen=True)
class Document:
    """One text to evaluate."""

    id: str
    text: str

    @property
    def bytes(self) -> int:
        """The number of bytes of the text in UTF-8."""
        return len(self.text.encode("utf-8"))


@dataclass(frozen=True)
class Windows:
    """Windows of equal length that cover documents.

    Neighbouring windows of a document overlap by one token, so that every token but the document's first is predicted
    exactly once, from the tokens before it in its window.
    """

    tokens: np.ndarray
    """int32[window, position]; 0 past the end of a document."""
    predicted: np.ndarray
    """bool[window, position]: whether the token after this one is predicted from here."""
    document: np.ndarray
    """int32[window]: the index of the window's document; -1 for padding."""

    @property
    def count(self) -> int:
        """The number of windows with text: all but the padding."""
        return int((self.document >= 0).sum())


def make_windows(
    documents: Sequence[Document], encode: Callable[[str], list[int]], position: int, batch: int
) -> Windows:
    """Split `documents` into windows of `position` tokens, padded with empty windows to a multiple of `batch`.

    Args:
        encode: text -> token ids, with a beginning-of-sequence token first where the tokenizer has one.

    Raises:
        ConfigError: no document has a token to predict.
    """
    rows, masks, owners = [], [], []
    for index, document in enumerate(documents):
        ids = encode(document.text)
        for start in range(0, max(len(ids) - 1, 1), position - 1):
            part = ids[start : start + position]
            row, mask = np.zeros(position, np.int32), np.zeros(position, bool)
            row[: len(part)] = part
            mask[: max(len(part) - 1, 0)] = True
            rows.append(row)
            masks.append(mask)
            owners.append(index)
    if not any(mask.any() for mask in masks):
        raise ConfigError("data.path holds no text of two tokens or more: nothing can be predicted")
    while len(rows) % batch:
        rows.append(np.zeros(position, np.int32))
        masks.append(np.zeros(position, bool))
        owners.append(-1)
    return Windows(np.stack(rows), np.stack(masks), np.array(owners, np.int32))
