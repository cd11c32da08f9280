"""Rotary embeddings: the leading channels of each head are rotated by angles that grow with the position.

Frequencies are numbers in the configuration (`shardplan.decoder.parts.attention.frequencies`), so that a program does
not compute them. As in transformers, each channel in the first half of the rotated channels forms a pair with one in
the second half. Checkpoints with pairs of neighbouring channels are reordered while they are loaded. Source:
https://arxiv.org/abs/2104.09864.
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from shardplan.decoder.parts.attention.frequencies import Frequencies


class Positions(eqx.Module):
    """The index of each token in its text, and the length of the longest text."""

    indices: NamedArray
    """Index of each token in its text, int32[..., position]."""
    length: NamedArray
    """Length of the longest text, the largest index plus one, int32[]."""

    @staticmethod
    def of(indices: NamedArray) -> "Positions":
        """Make the positions of tokens with these indices."""
        return Positions(indices, hax.max(indices) + 1)


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings of the leading channels of a head: each frequency rotates a pair of channels."""

    frequencies: Frequencies

    def __call__(self, x: NamedArray, head_size: Axis, positions: Positions) -> NamedArray:
        """Rotate `x` {..., position, head_size} by the angles of its positions; the result has the dtype of `x`."""
        frequencies = self._of_channels(self.frequencies.short, head_size)
        if self.frequencies.long is not None:
            is_long = positions.length > self.frequencies.original_positions
            frequencies = hax.where(is_long, self._of_channels(self.frequencies.long, head_size), frequencies)
        angles = positions.indices.astype(jnp.float32).broadcast_axis(head_size) * frequencies
        cos, sin = hax.cos(angles), hax.sin(angles)
        if self.frequencies.magnitude != 1.0:
            rotated = np.arange(head_size.size) < 2 * self.frequencies.pairs
            magnitude = np.where(rotated, self.frequencies.magnitude, 1.0).astype(np.float32)
            cos, sin = (wave * hax.named(jnp.asarray(magnitude), head_size) for wave in (cos, sin))
        # in the model's dtype, as in transformers and Levanter: float32 takes up to 4 % of a step (docs/log.md)
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        return x * cos + self._quarter_turn(x, head_size) * sin

    def _of_channels(self, frequencies: tuple[float, ...], head_size: Axis) -> NamedArray:
        """Return the frequency of each channel; it is 0 for channels that are not rotated (cosine 1, sine 0)."""
        channels = np.zeros(head_size.size, np.float32)
        channels[: 2 * len(frequencies)] = np.tile(np.asarray(frequencies, np.float32), 2)
        return hax.named(jnp.asarray(channels), head_size)

    def _quarter_turn(self, x: NamedArray, head_size: Axis) -> NamedArray:
        """Rotate each pair of channels by 90 degrees; unrotated channels get any value, because their sine is 0."""
        half = self.frequencies.pairs
        first, second = x[head_size, :half], x[head_size, half : 2 * half]
        parts = [-second, first]
        if 2 * half < head_size.size:
            parts.append(x[head_size, 2 * half :])
        return hax.concatenate(head_size, parts)
