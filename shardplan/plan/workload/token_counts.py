"""Parses numbers of tokens as people write them: 15T, 4M, 2.5e9."""

import math
import re
from typing import NamedTuple

from shardplan.errors import ConfigError

UNITS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "G": 10**9, "T": 10**12}
"""Letter after a number -> its factor."""
_COUNT = re.compile(r"(\d+(?:_\d+)*(?:\.\d+)?(?:[eE]\+?\d+)?)([KMBGT]?)")


class TokenRange(NamedTuple):
    """The fewest and the most tokens of a step."""

    least: float
    most: float


def parse_token_count(key: str, text: str) -> float:
    """Parse a number of tokens.

    >>> parse_token_count("token_budget", "15T"), parse_token_count("token_budget", "2_000_000")
    (15000000000000.0, 2000000.0)

    Args:
        key: key that the message names.

    Raises:
        ConfigError: the text is not a positive number.
    """
    match = _COUNT.fullmatch(text.strip().replace("k", "K"))
    count = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not 0 < count < math.inf:
        raise ConfigError(f"{key} is {text!r}; it must be a number of tokens, such as 15T, 4M or 4000000")
    return count


def parse_token_range(key: str, text: str) -> TokenRange:
    """Parse the fewest and the most tokens of a step.

    >>> parse_token_range("step_tokens", "4M-16M")
    TokenRange(least=4000000.0, most=16000000.0)

    Args:
        key: key that the message names.

    Raises:
        ConfigError: the text is not a range of numbers.
    """
    first, dash, last = text.partition("-")
    if not dash:
        raise ConfigError(f"{key} is {text!r}; it must be the fewest and the most tokens of a step, such as 4M-16M")
    least = parse_token_count(f"{key} {text!r}: the fewest", first)
    tokens = TokenRange(least, parse_token_count(f"{key} {text!r}: the most", last))
    if tokens.least > tokens.most:
        raise ConfigError(f"{key} is {text!r}; the fewest tokens are more than the most")
    return tokens
