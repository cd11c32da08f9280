"""Chooses the activations that a step keeps, by comparing all combinations of options.

An option is what can become of an activation: kept on the device, or copied to the host and back. Of each activation at
most one option is chosen. Seconds and bytes of options add up. Copies of one loop run one after the other, and each
hides behind the matmuls before it is due (`shardplan.program.layer_flops`).
There are few activations, so that the times of all combinations are computed at once, and their bytes in the order of
these times, until one fits. That is exact.
"""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np

from shardplan.search.tolerances import LEFT_OUT, TIME_RESOLUTION

CHUNK = 256
"""Number of combinations whose bytes are computed at a time."""


class Amount(NamedTuple):
    """The time and memory of chosen shardings, and how each option for activations changes them."""

    seconds: float
    """Seconds without host copies in loops."""
    bytes: np.ndarray
    """Bytes at every point of the program, then in host memory, [row]."""
    copy_seconds: np.ndarray
    """Seconds of host copies in each window, [window]."""
    options: np.ndarray
    """Seconds, seconds of copies, and bytes that each option adds, [option, 1 + windows + rows]."""

    def plus(self, other: "Amount") -> "Amount":
        """Add another amount to this one."""
        return Amount(
            self.seconds + other.seconds,
            self.bytes + other.bytes,
            self.copy_seconds + other.copy_seconds,
            self.options + other.options,
        )


class Kept(NamedTuple):
    """A combination of options, and the total time and memory with it."""

    options: tuple[int, ...]
    seconds: float
    handicapped_seconds: float
    """Seconds for comparisons of combinations, with a penalty for copies of activations to the host."""
    copies: int
    """Number of options that copy activations to the host."""
    bytes: np.ndarray


@dataclass(frozen=True)
class Keeping:
    """All combinations of options (keep, offload or recompute) for activations."""

    combinations: np.ndarray
    """Whether each combination contains each option (1 or 0), [combination, option]."""
    activations: tuple[tuple[int, ...], ...]
    """The options of each activation."""
    loops: tuple[int, ...]
    """Loop of the matmuls in each window, [window]; windows of one loop are adjacent."""
    hiding: np.ndarray
    """Seconds of the matmuls in each window, ascending within a loop, [window]."""
    saved: np.ndarray
    """Seconds of each window's matmuls that each option saves, [option, window]."""
    copies: np.ndarray
    """Number of options in each combination that copy activations to the host, [combination]."""

    @staticmethod
    def of(
        sizes: Sequence[int], loops: tuple[int, ...], hiding: np.ndarray, saved: np.ndarray, copies: np.ndarray
    ) -> "Keeping":
        """Make all combinations of options, given the number of options of each activation.

        Args:
            copies: [option], whether the option copies an activation to the host.
        """
        ends = [*itertools.accumulate(sizes)]
        activations = tuple(tuple(range(end - size, end)) for end, size in zip(ends, sizes, strict=True))
        chosen = [*itertools.product(*((None, *options) for options in activations))]
        combinations = np.zeros((len(chosen), sum(sizes)))
        for i, options in enumerate(chosen):
            combinations[i, [option for option in options if option is not None]] = 1
        return Keeping(combinations, activations, loops, hiding, saved, (combinations @ copies).astype(int))

    @cached_property
    def windows(self) -> int:
        """Number of windows, the different sets of matmuls behind which copies can hide."""
        return len(self.loops)

    @cached_property
    def _hiding_of_combinations(self) -> np.ndarray:
        """Return the seconds behind which copies can hide, [combination, window]."""
        return self.hiding - self.combinations @ self.saved

    @cached_property
    def _is_before(self) -> np.ndarray:
        """Return [window, other window]: whether a window's copies run before the other window's copies have ended."""
        loops = np.array(self.loops)
        return np.triu(loops[:, None] == loops[None, :])

    def least(self, options: np.ndarray) -> np.ndarray:
        """Return a lower bound (at most 0) of the change by any combination, given the change by each option.

        Args:
            options: [..., option, row]; the result is [..., row].
        """
        total = np.zeros((*options.shape[:-2], options.shape[-1]))
        for indices in self.activations:
            total += np.minimum(0.0, options[..., list(indices), :].min(axis=-2))
        return total

    def by_combination(self, seconds: np.ndarray, options: np.ndarray) -> np.ndarray:
        """Return [choice, combination]: the seconds of each choice with the options of each combination.

        Args:
            seconds: [choice].
            options: [choice, option].
        """
        return seconds[:, None] + options @ self.combinations.T

    def select(self, combinations: np.ndarray) -> "Keeping":
        """Return the same object with only some of the combinations."""
        return replace(self, combinations=self.combinations[combinations], copies=self.copies[combinations])

    def fastest(self, amount: Amount, limit: float, handicapped_limit: float, available: np.ndarray) -> Iterator[Kept]:
        """Yield the combinations that fit and tie with the fastest of them.

        Args:
            limit: seconds that no result may exceed.
            handicapped_limit: the limit for seconds with the handicap of combinations that copy to the host.
            available: [row], bytes that may be used.
        """
        seconds, handicapped = self._seconds(amount)
        possible = np.flatnonzero((seconds <= limit) & (handicapped <= handicapped_limit))
        possible = possible[np.argsort(handicapped[possible], kind="stable")]
        for start in range(0, len(possible), CHUNK):
            chunk = possible[start : start + CHUNK]
            if handicapped[chunk[0]] > handicapped_limit:
                return
            sizes = self._bytes(amount, chunk)
            for row in np.flatnonzero((sizes <= available).all(axis=1)):
                i = chunk[row]
                if handicapped[i] > handicapped_limit:
                    return
                handicapped_limit = min(handicapped_limit, handicapped[i] * (1 + TIME_RESOLUTION))
                yield Kept(self._options(i), float(seconds[i]), float(handicapped[i]), int(self.copies[i]), sizes[row])

    def smallest(self, amount: Amount, device_points: int) -> Kept:
        """Return the combination with the smallest peak memory of a device.

        Args:
            device_points: number of rows of device memory; the rows after them are of host memory.
        """
        seconds, handicapped = self._seconds(amount)
        chunks = np.array_split(np.arange(len(self.combinations)), -(-len(self.combinations) // CHUNK))
        peaks = [self._bytes(amount, chunk)[:, :device_points].max(axis=1) for chunk in chunks]
        i = int(np.concatenate(peaks).argmin())
        size = self._bytes(amount, np.array([i]))[0]
        return Kept(self._options(i), float(seconds[i]), float(handicapped[i]), int(self.copies[i]), size)

    def _seconds(self, amount: Amount) -> tuple[np.ndarray, np.ndarray]:
        """Return every combination's seconds, and the same with a handicap if it copies to the host."""
        copies = amount.copy_seconds + self.combinations @ amount.options[:, 1 : 1 + self.windows]
        late = np.maximum(0.0, copies @ self._is_before - self._hiding_of_combinations)
        seconds = amount.seconds + self.combinations @ amount.options[:, 0]
        for loop in dict.fromkeys(self.loops):
            seconds += late[:, np.array(self.loops) == loop].max(axis=1)
        return seconds, seconds * (1 + LEFT_OUT * (self.copies > 0))

    def _bytes(self, amount: Amount, combinations: np.ndarray) -> np.ndarray:
        """Return the bytes of the given combinations, [combination, row]."""
        return amount.bytes + self.combinations[combinations] @ amount.options[:, 1 + self.windows :]

    def _options(self, combination: int) -> tuple[int, ...]:
        return tuple(map(int, np.flatnonzero(self.combinations[combination])))
