"""Numbers with units for the page, and the ticks of axes."""

import math
from dataclasses import dataclass

from shardplan.hardware import GIB

TICKS = 5
"""About how many ticks an axis has."""


@dataclass(frozen=True)
class Tick:
    """A mark on an axis."""

    at: float
    """Percent of the length of the axis."""
    text: str


def gib_text(size: float) -> str:
    """Bytes as GiB, or as MiB where these are few."""
    return f"{size / GIB:,.2f} GiB" if size >= GIB / 10 else f"{size / 2**20:,.1f} MiB"


def seconds_text(seconds: float) -> str:
    """Seconds with a unit in which the number is easy to read."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}" if seconds / size < 1000 else f"{seconds / size:,.0f} {unit}"
    return f"{seconds * 1e6:.2g} µs" if seconds else "0 s"


def rate_text(per_second: float) -> str:
    """FLOP/s with a prefix."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9)):
        if per_second >= size:
            return f"{per_second / size:.3g} {prefix}FLOP/s"
    return f"{per_second:.3g} FLOP/s"


def linear_ticks(limit: float) -> list[Tick]:
    """Round numbers from 0 up to `limit`."""
    if limit <= 0:
        return [Tick(0.0, "0")]
    rough = limit / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * unit for factor in (1, 2, 2.5, 5, 10) if factor * unit >= rough * (1 - 1e-9))
    return [Tick(100 * i * step / limit, f"{i * step:.10g}") for i in range(int(limit / step + 1e-9) + 1)]


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic axis."""

    low: float
    high: float

    def at(self, value: float) -> float:
        """Percent of the length of the axis."""
        return 100 * math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)

    def ticks(self) -> list[Tick]:
        """The powers of ten, and where there are few of them also twice and five times these."""
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        factors = (1,) if last - first > 3 else (1, 2, 5)
        values = [factor * 10.0**power for power in range(first, last + 1) for factor in factors]
        return [Tick(self.at(v), f"{v:,.10g}") for v in values if self.low * 0.999 <= v <= self.high * 1.001]
