"""Computes the frequencies of rotary embeddings, scaled as a config.json says. Pure arithmetic.

Sources: linear https://arxiv.org/abs/2306.15595, yarn https://arxiv.org/abs/2309.00071 (in
`shardplan.model.corrections.rotary`), longrope https://arxiv.org/abs/2402.13753; llama3 as in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.model.corrections.rotary import YarnConfig


@dataclass(frozen=True)
class Frequencies:
    """The frequencies of rotary embeddings: radians per position, for each pair of channels."""

    short: tuple[float, ...]
    """Frequencies for texts of up to `original_positions` tokens, or for all texts if `long` is None."""
    magnitude: float = 1.0
    """Factor of the rotated channels of queries and keys."""
    long: tuple[float, ...] | None = None
    """Frequencies for texts of more than `original_positions` tokens; None if `short` holds for all texts."""
    original_positions: int = 0

    @property
    def pairs(self) -> int:
        """Number of pairs of channels."""
        return len(self.short)


def unscaled(theta: float, channels: int) -> Frequencies:
    """Return the rotary frequencies for `channels` channels of a head, with the base `theta`.

    >>> [round(each, 6) for each in unscaled(10000.0, 4).short]
    [1.0, 0.01]
    """
    return Frequencies(_as_tuple(_powers(theta, channels)))


def scaled(theta: float, channels: int, scaling: Mapping[str, Any] | None) -> Frequencies:
    """Return the frequencies of `unscaled`, scaled as a config.json says.

    >>> [round(each, 4) for each in scaled(10000.0, 4, {"rope_type": "linear", "factor": 4.0}).short]
    [0.25, 0.0025]

    Args:
        scaling: `rope_scaling` with all its values (`shardplan.decoder.families.common.rotary_keys`); None for none.
    """
    if scaling is None:
        return unscaled(theta, channels)
    powers = _powers(theta, channels)
    match scaling["rope_type"]:
        case "linear":
            return Frequencies(_as_tuple(powers / scaling["factor"]))
        case "llama3":
            return Frequencies(_as_tuple(_llama3(powers, scaling)))
        case "yarn":
            yarn = YarnConfig.make_from_hf_config(theta, dict(scaling))
            return Frequencies(_as_tuple(yarn.frequencies(channels)), yarn.attention_factor)
        case "longrope":
            return Frequencies(
                _as_tuple(powers / np.asarray(scaling["short_factor"])),
                scaling["attention_factor"],
                _as_tuple(powers / np.asarray(scaling["long_factor"])),
                scaling["original_max_position_embeddings"],
            )
        case other:
            raise AssertionError(other)


def _powers(theta: float, channels: int) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, channels, 2) / channels)


def _llama3(powers: np.ndarray, scaling: Mapping[str, Any]) -> np.ndarray:
    """Return (1 - kept) * power / factor + kept * power, where kept grows from 0 to 1 with the number of rotations.

    Rotations are counted over the original positions, and kept is 0 up to `low_freq_factor` and 1 from
    `high_freq_factor` on.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] * powers / (2 * math.pi)
    # Llama 4 has no frequencies between
    kept = rotations >= low if high == low else np.clip((rotations - low) / (high - low), 0, 1)
    return (1 - kept) * powers / scaling["factor"] + kept * powers


def _as_tuple(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.astype(np.float32).tolist())
