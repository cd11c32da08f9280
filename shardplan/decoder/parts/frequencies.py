"""Frequencies of rotary embeddings, as the keys of a config.json scale them. Pure arithmetic.

Sources: linear https://arxiv.org/abs/2306.15595, yarn https://arxiv.org/abs/2309.00071 (in
`shardplan.model.rotary`), longrope https://arxiv.org/abs/2402.13753; llama3 as in transformers.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shardplan.model.rotary import YarnConfig


@dataclass(frozen=True)
class Frequencies:
    """Radians per position of each pair of channels."""

    short: tuple[float, ...]
    """The frequencies, where `long` does not take their place."""
    magnitude: float = 1.0
    """What queries and keys are multiplied by."""
    long: tuple[float, ...] | None = None
    """Frequencies for texts of more than `original_positions` tokens; None where `short` holds for all texts."""
    original_positions: int = 0

    @property
    def pairs(self) -> int:
        """The number of pairs of channels."""
        return len(self.short)


def unscaled(theta: float, channels: int) -> Frequencies:
    """Return the rotary frequencies for `channels` channels of a head, with the base `theta`.

    >>> unscaled(10000.0, 4).short
    (1.0, 0.01)
    """
    return Frequencies(_as_tuple(_powers(theta, channels)))


def scaled(theta: float, channels: int, scaling: Mapping[str, Any] | None) -> Frequencies:
    """Return rotary frequencies as `unscaled`, then scaled as a config.json says.

    Args:
        scaling: the values of `shardplan.model.huggingface.rope_keys`; None for none.
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
    """Divide the frequencies with few rotations over the original positions, and a part of those between."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    rotations = scaling["original_max_position_embeddings"] * powers / (2 * math.pi)
    kept = np.clip((rotations - low) / (high - low), 0, 1)
    return (1 - kept) * powers / scaling["factor"] + kept * powers


def _as_tuple(values: np.ndarray) -> tuple[float, ...]:
    return tuple(values.astype(np.float32).tolist())
