"""Keys and values of all devices, gathered; their gradients are added up in float32. Inside `jax.shard_map`."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array


@dataclass(frozen=True)
class Gather:
    """What is done before and after attention where it is `ulysses.Exchange` elsewhere."""

    axes: tuple[str, ...]
    """Mesh axes that cut the sequence, major to minor."""

    def gathered(self, x: Array, axis: int) -> Array:
        """What all devices have along `axis`, one after the other."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

    def queries(self, q: Array) -> Array:
        """They stay."""
        return q

    def keys(self, k: Array) -> Array:
        """k[B, N, S, ...] -> [B, N, devices x S, ...]."""
        return self.gathered(k, 2)

    def keys_gradient(self, gradient: Array, dtype: Any) -> Array:
        """What `keys` gets of the float32 gradient of its result, which all devices have a part of.

        A sum of bfloat16 is as wrong as its terms are many.
        """
        return jax.lax.psum_scatter(gradient, self.axes, scatter_dimension=2, tiled=True).astype(dtype)

    def outputs(self, out: Array, dtype: Any) -> Array:
        """They stay, as they are."""
        del dtype  # nothing is sent
        return out
