"""Tokens of windows, made in worker processes: they encode the parts of texts that the windows of a process need.

Imports no JAX, so that a worker starts within a second and shares no device with the process that feeds them.
"""

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from multiprocessing import get_context, parent_process
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from shardplan.config.sections import StrideUnit
from shardplan.eval.extraction.windows import Protocol, WindowIndex, WindowRows, empty_rows
from shardplan.eval.texts.encoding import PieceEncoder, Tokens, make_tokenizer
from shardplan.eval.texts.store import TextStore, read_characters

CACHED_PIECES = 64
"""Encoded pieces that a worker keeps: neighbouring windows need the same ones."""


@dataclass(frozen=True)
class Source:
    """What a worker needs to encode the texts of a run."""

    tokenizer: bytes
    """The tokenizer.json."""
    name: str
    """Name of the tokenizer, for messages."""
    path: str
    """Path of the `TextStore`."""
    pieces: tuple[np.ndarray, ...]
    """Of each text, `Text.pieces`."""
    characters: tuple[int, ...]
    """Of each text, the number of its characters."""

    @property
    def all_pieces(self) -> list[tuple[int, int]]:
        """Text and piece of every piece of all texts, in order."""
        return [(text, i) for text, places in enumerate(self.pieces) for i in range(len(places) - 1)]


def make_source(store: TextStore, tokenizer: bytes, name: str) -> Source:
    """Return what workers need to encode the texts of `store`."""
    return Source(
        tokenizer, name, store.path, tuple(t.pieces for t in store.texts), tuple(t.characters for t in store.texts)
    )


class WindowMaker:
    """Makes windows from the texts of a source."""

    def __init__(self, source: Source):
        self._source = source
        self._tokenizer: Tokenizer = make_tokenizer(source.tokenizer, source.name)
        self._encoded = lru_cache(CACHED_PIECES)(self._encode)

    def count_tokens(self, pieces: Sequence[tuple[int, int]]) -> list[int]:
        """Return the number of tokens of each of some pieces, given as text and piece."""
        return [len(self._encoded(*piece).ids) for piece in pieces]

    def make(self, index: WindowIndex, sizes: Sequence[np.ndarray], first: int, last: int) -> WindowRows:
        """Make the windows from `first` to `last`; those past the end are not valid.

        Args:
            sizes: of each text int64[piece], the tokens of its pieces; not needed for a stride in characters.
        """
        rows, at = empty_rows(last - first, index.protocol.length), 0
        for text, start, end in index.locate(first, last):
            if index.protocol.unit is StrideUnit.TOKENS:
                self._fill_by_tokens(rows, at, index.protocol, sizes[text], text, (start, end))
            else:
                self._fill_by_characters(rows, at, index.protocol, text, (start, end))
            at += end - start
        return rows

    def _encode(self, text: int, piece: int) -> Tokens:
        s = self._source
        return PieceEncoder(self._tokenizer, s.path, s.pieces[text], s.characters[text]).encode(piece)

    def _fill_by_tokens(
        self, rows: WindowRows, at: int, protocol: Protocol, sizes: np.ndarray, text: int, windows: tuple[int, int]
    ) -> None:
        """Fill `rows` from `at` on with windows of one text that start every `stride` tokens."""
        before = np.concatenate([[0], np.cumsum(sizes)])
        begin, end = windows[0] * protocol.stride, (windows[1] - 1) * protocol.stride + protocol.length
        first, last = int(np.searchsorted(before, begin, "right")) - 1, int(np.searchsorted(before, end, "left"))
        encoded = [self._encoded(text, piece) for piece in range(first, last)]
        ids, starts, ends = (
            np.concatenate([getattr(tokens, name) for tokens in encoded]) for name in ("ids", "starts", "ends")
        )
        offsets = np.arange(windows[0], windows[1]) * protocol.stride - before[first]
        part = slice(at, at + len(offsets))
        rows.tokens[part] = ids[offsets[:, None] + np.arange(protocol.length)]
        rows.start[part], rows.suffix[part] = starts[offsets], starts[offsets + protocol.prefix]
        rows.end[part] = ends[offsets + protocol.length - 1]
        rows.text[part], rows.valid[part] = text, True

    def _fill_by_characters(
        self, rows: WindowRows, at: int, protocol: Protocol, text: int, windows: tuple[int, int]
    ) -> None:
        """Fill `rows` from `at` on with windows of one text that start every `stride` characters."""
        s = self._source
        starts = np.arange(*windows) * protocol.stride
        part = read_characters(
            s.path,
            s.pieces[text],
            int(starts[0]),
            min(s.characters[text], int(starts[-1]) + protocol.encoded_characters),
        )
        texts = [part[start - starts[0] :][: protocol.encoded_characters] for start in starts]
        for i, encoding in enumerate(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False), start=at):
            if len(encoding.ids) < protocol.length:
                continue
            ids, start = encoding.ids[: protocol.length], starts[i - at]
            rows.tokens[i] = ids
            rows.start[i], rows.text[i], rows.valid[i] = start, text, True
            rows.end[i] = start + len(self._tokenizer.decode(ids, skip_special_tokens=False))
            rows.suffix[i] = start + len(self._tokenizer.decode(ids[: protocol.prefix], skip_special_tokens=False))


_maker: WindowMaker


def _start_worker(source: Source) -> None:
    """Prepare this worker; it ends with the process that started it, whatever signal ends that one."""
    global _maker
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _maker = WindowMaker(source)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(0)


def count_tokens(pieces: Sequence[tuple[int, int]]) -> list[int]:
    """Do `WindowMaker.count_tokens` in a worker."""
    return _maker.count_tokens(pieces)


def make_rows(index: WindowIndex, sizes: Sequence[np.ndarray], first: int, last: int) -> WindowRows:
    """Do `WindowMaker.make` in a worker."""
    return _maker.make(index, sizes, first, last)


@contextmanager
def open_workers(source: Source, count: int) -> Iterator[Any]:
    """Start `count` worker processes, which end with the block; yields their executor."""
    with ProcessPoolExecutor(count, get_context("spawn"), _start_worker, (source,)) as workers:
        try:
            yield workers
        finally:
            workers.shutdown(wait=False, cancel_futures=True)


def split(pieces: Sequence[tuple[int, int]], size: int = 16) -> list[Sequence[tuple[int, int]]]:
    """Divide pieces into jobs of `size`."""
    return [pieces[i : i + size] for i in range(0, len(pieces), size)]
