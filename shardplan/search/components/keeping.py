"""Chooses the activations that a step keeps: all combinations of options are compared.

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
"""Combinations whose bytes are computed at once."""


class Amount(NamedTuple):
    """Time and memory of some choices of shardings, and how each option about activations changes them."""

    seconds: float
    """Without copies to and from the host in loops."""
    bytes: np.ndarray
    """[row]: bytes at every point of the program, then in the memory of the host."""
    copy_seconds: np.ndarray
    """[window]: seconds of copies to and from the host."""
    options: np.ndarray
    """[option, 1 + windows + rows]: seconds, seconds of copies, and bytes that each option adds."""

    def plus(self, other: "Amount") -> "Amount":
        """Return both together."""
        return Amount(
            self.seconds + other.seconds,
            self.bytes + other.bytes,
            self.copy_seconds + other.copy_seconds,
            self.options + other.options,
        )


class Kept(NamedTuple):
    """A combination of options, and what all takes with it."""

    options: tuple[int, ...]
    seconds: float
    handicapped_seconds: float
    """Seconds by which combinations are compared: more where activations are copied to the host."""
    copies: int
    """Number of options that copy activations to the host."""
    bytes: np.ndarray


@dataclass(frozen=True)
class Keeping:
    """All combinations of options about activations."""

    combinations: np.ndarray
    """[combination, option]: 1 where a combination has an option, else 0."""
    activations: tuple[tuple[int, ...], ...]
    """The options of each activation."""
    loops: tuple[int, ...]
    """[window]: the loop of matmuls that copies can hide behind; those of one loop follow each other."""
    hiding: np.ndarray
    """[window]: seconds of these matmuls, ascending within a loop."""
    saved: np.ndarray
    """[option, window]: seconds of them that an option saves."""
    copies: np.ndarray
    """[combination]: how many of its options copy activations to the host."""

    @staticmethod
    def of(
        sizes: Sequence[int], loops: tuple[int, ...], hiding: np.ndarray, saved: np.ndarray, copies: np.ndarray
    ) -> "Keeping":
        """Return all combinations of options, given each activation's number of options.

        Args:
            copies: [option]: whether it copies an activation to the host.
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
        """Number of different sets of matmuls that copies can hide behind."""
        return len(self.loops)

    @cached_property
    def _hiding_of_combinations(self) -> np.ndarray:
        """[combination, window]: seconds that copies can hide behind."""
        return self.hiding - self.combinations @ self.saved

    @cached_property
    def _is_before(self) -> np.ndarray:
        """[window, other window]: whether copies of the window run before those of the other one have ended."""
        loops = np.array(self.loops)
        return np.triu(loops[:, None] == loops[None, :])

    def least(self, options: np.ndarray) -> np.ndarray:
        """Return a lower bound, at most 0, on the change of any combination of options, given each option's.

        Args:
            options: [..., option, row]; the result is [..., row].
        """
        total = np.zeros((*options.shape[:-2], options.shape[-1]))
        for indices in self.activations:
            total += np.minimum(0.0, options[..., list(indices), :].min(axis=-2))
        return total

    def by_combination(self, seconds: np.ndarray, options: np.ndarray) -> np.ndarray:
        """Return [choice, combination]: the seconds of choices with the options of each combination.

        Args:
            seconds: [choice].
            options: [choice, option].
        """
        return seconds[:, None] + options @ self.combinations.T

    def select(self, combinations: np.ndarray) -> "Keeping":
        """Return some of the combinations."""
        return replace(self, combinations=self.combinations[combinations], copies=self.copies[combinations])

    def fastest(self, amount: Amount, limit: float, handicapped_limit: float, available: np.ndarray) -> Iterator[Kept]:
        """Yield the combinations that fit and tie with the fastest of them.

        Args:
            limit: seconds above which none is returned.
            handicapped_limit: the same for handicapped seconds.
            available: [row]: bytes that may be used.
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
            device_points: number of rows that are not of the host.
        """
        seconds, handicapped = self._seconds(amount)
        chunks = np.array_split(np.arange(len(self.combinations)), -(-len(self.combinations) // CHUNK))
        peaks = [self._bytes(amount, chunk)[:, :device_points].max(axis=1) for chunk in chunks]
        i = int(np.concatenate(peaks).argmin())
        size = self._bytes(amount, np.array([i]))[0]
        return Kept(self._options(i), float(seconds[i]), float(handicapped[i]), int(self.copies[i]), size)

    def _seconds(self, amount: Amount) -> tuple[np.ndarray, np.ndarray]:
        """Return the seconds of every combination, and its handicapped seconds."""
        copies = amount.copy_seconds + self.combinations @ amount.options[:, 1 : 1 + self.windows]
        late = np.maximum(0.0, copies @ self._is_before - self._hiding_of_combinations)
        seconds = amount.seconds + self.combinations @ amount.options[:, 0]
        for loop in dict.fromkeys(self.loops):
            seconds += late[:, np.array(self.loops) == loop].max(axis=1)
        return seconds, seconds * (1 + LEFT_OUT * (self.copies > 0))

    def _bytes(self, amount: Amount, combinations: np.ndarray) -> np.ndarray:
        """Return [combination, row]: bytes of some combinations."""
        return amount.bytes + self.combinations[combinations] @ amount.options[:, 1 + self.windows :]

    def _options(self, combination: int) -> tuple[int, ...]:
        return tuple(map(int, np.flatnonzero(self.combinations[combination])))
