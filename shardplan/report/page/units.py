"""Numbers with units for the page, and the ticks of axes."""

import math
from dataclasses import dataclass

from shardplan.hardware import GIB

TICKS = 5
"""Approximate number of ticks on an axis."""
MIN_TICKS = 3
"""Fewest ticks on a logarithmic axis."""


NEARLY = 0.9995
"""Fraction of a power of ten from which a number of three digits is rounded up to that power."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Percent of the length of the axis."""
    text: str


def gib_text(size: float) -> str:
    """Format bytes as GiB, or as MiB or KiB if they are few."""
    if size >= GIB / 10:
        return f"{size / GIB:,.2f} GiB"
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 / 10 else f"{size / 2**10:,.1f} KiB"


def seconds_text(seconds: float) -> str:
    """Format seconds in a unit that makes the number easy to read."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= NEARLY * size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < NEARLY * 1000 else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def rate_text(per_second: float) -> str:
    """Format FLOP/s with a prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if per_second >= NEARLY * size:
            return f"{per_second / size:.3g} {prefix}FLOP/s"
    return f"{per_second:.3g} FLOP/s"


def linear_ticks(limit: float) -> list[Tick]:
    """Return ticks at round numbers from 0 up to `limit`."""
    return [Tick(100 * value / limit, f"{value:.10g}") for value in _round_numbers(0.0, limit)] if limit > 0 else []


def _round_numbers(low: float, high: float) -> list[float]:
    """Return about `TICKS` round numbers from `low` to `high`."""
    # the margins of 1e-9 keep a tick at either end that division has moved past it
    rough = (high - low) / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    return [i * step for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Return the position of a value, in percent of the axis's length."""
        return 100 * math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self, unit: float = 1.0) -> list[Tick]:
        """Return ticks at powers of ten; on a short axis also at their multiples, or at other round numbers.

        Args:
            unit: unit of the texts.
        """
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for factors in ((1,), (1, 2, 5), (1, 1.5, 2, 2.5, 3, 4, 5, 7)):
            powers = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
            values = [value for value in powers if self.low <= value <= self.high]
            if len(values) >= MIN_TICKS:
                break
        else:
            values = _round_numbers(self.low, self.high)
        return [Tick(self.at(value), f"{value / unit:,.10g}") for value in values]
