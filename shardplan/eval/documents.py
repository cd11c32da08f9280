"""Text to evaluate: documents, and the windows of tokens that they are split into."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from shardplan.errors import ConfigError, one_line

JSON_LINES, PLAIN_TEXT = ".jsonl", ".txt"
"""Endings of the files that can be read; case does not matter."""


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


def read_documents(path: str, limit: int | None = None) -> list[Document]:
    """Read the documents of a .jsonl file (`text`, and optionally `id`, per line) or of a .txt file (one document).

    Args:
        limit: most documents to read of a .jsonl file; None for all.

    Raises:
        ConfigError: no such file, a file of another kind, a line without a text, or two documents with one id.
    """
    ending = Path(path).suffix.lower()
    if ending not in (JSON_LINES, PLAIN_TEXT):
        raise ConfigError(
            f"data.path {path} ends in neither {JSON_LINES} (a 'text' per line) nor {PLAIN_TEXT} (one document); "
            "write the text to a file of one of these"
        )
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"data.path {path} cannot be read: {one_line(error)}") from error
    return [Document(Path(path).name, text)] if ending == PLAIN_TEXT else _parse_lines(text, path, limit)


def _parse_lines(text: str, path: str, limit: int | None) -> list[Document]:
    """Parse the first `limit` documents of a .jsonl file; a document without an id has the number of its line."""
    lines: dict[str, int] = {}
    documents: list[Document] = []
    # not splitlines, which also breaks at characters that JSON allows inside a string
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        if len(documents) == limit:
            break
        try:
            row = json.loads(line)
            row["text"].encode("utf-8")  # a string, without halves of surrogate pairs
            document = Document(str(row.get("id", number)), row["text"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ConfigError(
                f"data.path {path}, line {number}: needs an object whose 'text' is a string ({one_line(error)})"
            ) from error
        if document.id in lines:
            raise ConfigError(
                f"data.path {path}, line {number}: id {document.id!r} is that of line {lines[document.id]} already; "
                "the results need a different id for each document"
            )
        lines[document.id] = number
        documents.append(document)
    if not documents:
        raise ConfigError(f"data.path {path} holds no documents")
    return documents


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
