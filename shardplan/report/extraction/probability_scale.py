"""Texts and shades of probabilities, given their logarithms."""

import math

LOWEST = 1e-4
"""Least probability that is shaded."""
SHADES = 16
"""Number of shades, equally many per factor of ten."""
LABELLED = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
"""Probabilities that legends and axes label."""


def probability_text(log_p: float) -> str:
    """Format a probability, given its natural logarithm: `12.3%`, or `4.1e-40` below a thousandth."""
    if log_p == -math.inf:
        return "0"
    if log_p >= math.log(1e-3):
        return f"{math.exp(log_p):.3%}" if log_p < math.log(1e-2) else f"{100 * math.exp(log_p):.3g}%"
    exponent, mantissa = divmod(log_p / math.log(10), 1)
    digits = f"{10**mantissa:.1f}"
    return f"1.0e{int(exponent) + 1}" if digits == "10.0" else f"{digits}e{int(exponent)}"


def threshold_text(probability: float) -> str:
    """Format a probability that is a round number of percent: `0.1%`, `75%`."""
    return f"{100 * probability:g}%"


def shade(log_p: float) -> int:
    """Return the shade of a probability, given its logarithm: 1 to `SHADES`, or 0 below `LOWEST`."""
    part = 1 - log_p / math.log(LOWEST)
    return 0 if part < 0 else min(SHADES, 1 + int(part * SHADES))
