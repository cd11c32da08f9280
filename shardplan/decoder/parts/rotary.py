"""Rotary embeddings: the leading channels of each head are rotated by angles that grow with the position.

Frequencies are plain numbers of the configuration, so that a plan computes nothing for them; how a config.json scales
them is in `shardplan.decoder.parts.frequencies`. Source: https://arxiv.org/abs/2104.09864, in the form of transformers,
where the two halves of the rotated channels are pairs. Checkpoints whose neighbouring channels are pairs are put in
this order while they are loaded.
"""

from dataclasses import dataclass

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, NamedArray

from shardplan.decoder.parts.frequencies import Frequencies


class Positions(eqx.Module):
    """The index of each token in its text."""

    indices: NamedArray
    """int32[..., position]."""
    length: NamedArray
    """int32[]: one more than the largest index."""

    @staticmethod
    def of(indices: NamedArray) -> "Positions":
        """Find the length that belongs to indices."""
        return Positions(indices, hax.max(indices) + 1)


@dataclass(frozen=True)
class Rotary:
    """Rotary embeddings of the leading channels of a head, two for each frequency."""

    frequencies: Frequencies

    def __call__(self, x: NamedArray, head_size: Axis, positions: Positions) -> NamedArray:
        """Rotate `x` {..., position, head_size} by the angles of its positions; returns the type of `x`."""
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
        # in the type of the model, as transformers and Levanter do: float32 takes up to 4 % of a step (docs/log.md)
        cos, sin = cos.astype(x.dtype), sin.astype(x.dtype)
        return x * cos + self._quarter_turn(x, head_size) * sin

    def _of_channels(self, frequencies: tuple[float, ...], head_size: Axis) -> NamedArray:
        """The frequency of each channel: 0, with cosine 1 and sine 0, for channels that are not rotated."""
        channels = np.zeros(head_size.size, np.float32)
        channels[: 2 * len(frequencies)] = np.tile(np.asarray(frequencies, np.float32), 2)
        return hax.named(jnp.asarray(channels), head_size)

    def _quarter_turn(self, x: NamedArray, head_size: Axis) -> NamedArray:
        """Turn each pair of channels by 90 degrees; what the channels behind get does not matter."""
        half = self.frequencies.pairs
        first, second = x[head_size, :half], x[head_size, half : 2 * half]
        parts = [-second, first]
        if 2 * half < head_size.size:
            parts.append(x[head_size, 2 * half :])
        return hax.concatenate(head_size, parts)
