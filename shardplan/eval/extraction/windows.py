"""Windows of an extraction run: which part of which text each is, in an order that every run agrees on. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from shardplan.config.sections import StrideUnit
from shardplan.errors import ConfigError

CHARACTERS_PER_WINDOW = 20
"""With a stride in characters: characters of text that are encoded for each token of a window."""


@dataclass(frozen=True)
class Protocol:
    """How texts are divided into windows of a prefix, which is given, and a suffix, whose probability is measured."""

    prefix: int = 50
    suffix: int = 50
    stride: int = 5
    unit: StrideUnit = StrideUnit.TOKENS

    @property
    def length(self) -> int:
        """Tokens of a window."""
        return self.prefix + self.suffix

    @property
    def encoded_characters(self) -> int:
        """With a stride in characters: the most characters that are encoded for a window."""
        return CHARACTERS_PER_WINDOW * self.length

    def count(self, size: int) -> int:
        """Number of windows of a text of `size` tokens or characters, as the stride counts.

        With a stride in characters this includes those that turn out to have too few tokens.
        """
        if self.unit is StrideUnit.CHARACTERS:
            return -(-size // self.stride)
        return max(0, (size - self.length) // self.stride + 1)


@dataclass(frozen=True)
class WindowIndex:
    """The windows of all texts, numbered from 0 on: those of the first text first."""

    protocol: Protocol
    counts: tuple[int, ...]
    """Number of windows of each text."""

    @property
    def total(self) -> int:
        """Number of windows."""
        return sum(self.counts)

    def locate(self, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return the windows from `first` to `last` as (text, its first window, and the one after its last)."""
        ranges, offset = [], 0
        for text, count in enumerate(self.counts):
            start, end = max(first - offset, 0), min(last - offset, count)
            if start < end:
                ranges.append((text, start, end))
            offset += count
        return ranges


def make_index(protocol: Protocol, sizes: Sequence[int]) -> WindowIndex:
    """Number the windows of texts.

    Args:
        sizes: of each text, the number of its tokens or characters, as the stride counts.

    Raises:
        ConfigError: no text has a window.
    """
    index = WindowIndex(protocol, tuple(map(protocol.count, sizes)))
    if index.total == 0:
        raise ConfigError(f"data.path holds no text of {protocol.length} tokens, the length of a window")
    return index


@dataclass(frozen=True)
class Shards:
    """The shards of a run: ranges of windows whose results are written together.

    A step has `lanes` parts, which different devices compute; each has windows of its own part of the shard, so that
    the process of these devices needs the text around them alone.
    """

    total: int
    """Number of windows."""
    lanes: int
    lane_windows: int
    """Windows of a lane in one step."""
    steps: int
    """Steps of a shard, except for the last one, which may have fewer."""

    @property
    def size(self) -> int:
        """Windows of a shard."""
        return self.steps * self.lanes * self.lane_windows

    @property
    def count(self) -> int:
        """Number of shards."""
        return -(-self.total // self.size)

    def steps_of(self, shard: int) -> int:
        """Number of steps of a shard."""
        left = self.total - shard * self.size
        return min(self.steps, -(-left // (self.lanes * self.lane_windows)))

    def lane_range(self, shard: int, lane: int) -> tuple[int, int]:
        """Return the first window of a lane in a shard, and the one after its last; some may be past the total."""
        size = self.steps_of(shard) * self.lane_windows
        first = shard * self.size + lane * size
        return first, first + size


@dataclass(frozen=True)
class WindowRows:
    """Some windows with their tokens."""

    tokens: np.ndarray
    """int32[window, token]; 0 where the window is not valid."""
    text: np.ndarray
    """int32[window]: index of the text."""
    start: np.ndarray
    """int64[window]: the first character of the window in its text."""
    suffix: np.ndarray
    """int64[window]: the first character of the suffix."""
    end: np.ndarray
    """int64[window]: the character after the last one."""
    valid: np.ndarray
    """bool[window]: False for padding, and for windows with too few tokens."""


def empty_rows(count: int, length: int) -> WindowRows:
    """Return `count` windows that are not valid."""
    zeros = np.zeros(count, np.int64)
    tokens = np.zeros((count, length), np.int32)
    return WindowRows(tokens, zeros.astype(np.int32), zeros, zeros.copy(), zeros.copy(), zeros.astype(bool))
