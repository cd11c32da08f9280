"""Tokenized requests, and the windows of tokens to compute for them. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.errors import ConfigError
from shardplan.eval.packing import pack


@dataclass(frozen=True)
class Request:
    """A continuation whose probability is requested, and the context that it follows; lists of token ids."""

    context: list[int]
    continuation: list[int]
    task: str = ""
    """Name of the request's task, for messages."""


@dataclass(frozen=True)
class PackedRequests:
    """Requests as windows of tokens, packed into rows.

    A window is the context and the whole continuation. The score at a position is the score of the next token, so that
    the scores of the continuation begin at the last token of the context, and end one token before the window's end.
    """

    position: int
    """Tokens of a row."""
    tokens: list[np.ndarray]
    """Tokens of every window, int32[token]; windows are in the order of the rows, without gaps."""
    row: np.ndarray
    """Row of each window, int64[window]."""
    offset: np.ndarray
    """Index of each window's first token in its row, int64[window]."""
    start: np.ndarray
    """Index of the first score of each request's continuation, counted over all rows, int64[request]."""
    end: np.ndarray
    """Index after the last score of each request's continuation, int64[request]."""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return int(self.row[-1]) + 1

    @property
    def filled(self) -> float:
        """Fraction of the rows' tokens that windows fill."""
        return sum(map(len, self.tokens)) / (self.rows * self.position)

    def fill(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the tokens and the `window_starts`, both int32[row, position], of `count` rows from `first` on.

        The end of a row that no window fills is a window of zeros.
        """
        tokens, starts = np.zeros((2, count, self.position), np.int32)
        used = np.zeros(count, np.int64)
        for window in range(*np.searchsorted(self.row, [first, first + count])):
            row, begin, ids = self.row[window] - first, self.offset[window], self.tokens[window]
            tokens[row, begin : begin + len(ids)] = ids
            starts[row, begin : begin + len(ids)] = begin
            used[row] = max(used[row], begin + len(ids))
        for row, end in enumerate(used):
            starts[row, end:] = end
        return tokens, starts


def pack_requests(requests: Sequence[Request], max_length: int, position: int) -> PackedRequests:
    """Pack the windows of one or more requests into rows of `position` tokens.

    A window has at most `max_length` + 1 tokens, because the last one is only predicted; a longer window loses its
    beginning, as in the `hf` model of lm_eval. A window that is the beginning of another window is not computed
    separately.

    >>> requests = [Request([1, 2, 3], [4, 5]), Request([1, 2, 3], [4])]
    >>> packed = pack_requests(requests, max_length=6, position=8)
    >>> [window.tolist() for window in packed.tokens]
    [[1, 2, 3, 4, 5]]

    Args:
        max_length: less than `position`.

    Raises:
        ConfigError: a context or a continuation has no tokens, or a continuation has more than `max_length`.
    """
    for request in requests:
        where = f"task {request.task}: " if request.task else ""
        if not request.context:
            raise ConfigError(f"{where}a context has no tokens; give the requests a token to follow")
        if not request.continuation:
            raise ConfigError(
                f"{where}a continuation has no tokens: its text is empty, or its only token stands in for an empty "
                "context; change the task"
            )
        if len(request.continuation) > max_length:
            raise ConfigError(
                f"{where}a continuation has {len(request.continuation)} tokens, and max_length is {max_length}; raise "
                "workload.position"
            )
    # bytes are compared by whole tokens, and much faster than lists
    ids = [np.array((each.context + each.continuation)[-(max_length + 1) :], ">i4").tobytes() for each in requests]
    window = np.empty(len(ids), np.int64)
    kept: list[bytes] = []
    for index in sorted(range(len(ids)), key=ids.__getitem__, reverse=True):
        # of all windows that begin with this one, the next in order is one
        if not kept or not kept[-1].startswith(ids[index]):
            kept.append(ids[index])
        window[index] = len(kept) - 1
    tokens = [np.frombuffer(each, ">i4").astype(np.int32) for each in kept]
    row, offset = pack(np.array([len(each) for each in tokens]), position)
    lengths = np.array([len(each) // 4 for each in ids])
    scored = np.array([len(each.continuation) for each in requests])
    end = row[window] * position + offset[window] + lengths - 1
    order = np.argsort(row, kind="stable")
    return PackedRequests(position, [tokens[i] for i in order], row[order], offset[order], end - scored, end)
