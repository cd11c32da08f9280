"""The all-gather strategy: every device gathers the keys and values of all devices. Runs inside `jax.shard_map`."""

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array


@dataclass(frozen=True)
class KeyValueGather:
    """The all-gather of keys and values before attention; same methods as `ulysses.UlyssesExchange`."""

    axes: tuple[str, ...]
    """Mesh axes that shard the sequence, major to minor."""

    def all_gather(self, x: Array, axis: int) -> Array:
        """Concatenate the shards of all devices along `axis`."""
        return jax.lax.all_gather(x, self.axes, axis=axis, tiled=True)

    def reshard_queries(self, q: Array) -> Array:
        """Return queries unchanged: they stay on their device."""
        return q

    def reshard_keys(self, k: Array) -> Array:
        """Gather keys or values: k[B, N, S, ...] -> [B, N, devices x S, ...]."""
        return self.all_gather(k, 2)

    def reshard_keys_gradient(self, gradient: Array, dtype: Any) -> Array:
        """Transpose `reshard_keys`: reduce-scatter a float32 gradient [B, N, devices x S, ...] and cast it to `dtype`.

        The sum is in float32, because the error of a bfloat16 sum grows with the number of its terms.
        """
        return jax.lax.psum_scatter(gradient, self.axes, scatter_dimension=2, tiled=True).astype(dtype)

    def reshard_outputs(self, out: Array, dtype: Any) -> Array:
        """Return outputs unchanged: they stay on their device, in their dtype."""
        del dtype  # only applies to what is sent
        return out
