"""Gates of the three branches: a sigmoid for each branch and head of queries, not normalised. Paper: equation 5."""

import jax
import jax.numpy as jnp


def compute_gates(products: jax.Array, biases: jax.Array) -> jax.Array:
    """Return the gates float32[b, t, g, r, 3], in the order compressed, selected, window.

    >>> compute_gates(jnp.zeros((1, 1, 1, 1, 3)), jnp.zeros((1, 1, 3)))[0, 0, 0, 0].tolist()
    [0.5, 0.5, 0.5]

    Args:
        products: [b, t, g, r, 3], of the layer's input and the weight of the gates.
        biases: [g, r, 3].
    """
    return jax.nn.sigmoid(products.astype(jnp.float32) + biases.astype(jnp.float32))


def mix(gates: jax.Array, branches: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
    """Return the sum of the branches, each multiplied by its gate, in float32.

    >>> branches = tuple(jnp.full((1, 1, 1, 1, 2), value) for value in (1.0, 10.0, 100.0))
    >>> mix(jnp.array([1.0, 0.5, 0.0]).reshape(1, 1, 1, 1, 3), branches).ravel().tolist()
    [6.0, 6.0]

    Args:
        gates: float32[b, t, g, r, 3], in the order of the branches.
        branches: [b, t, g, r, d] each: compressed, selected, window.
    """
    mixed = jnp.zeros(branches[0].shape, jnp.float32)
    for number, branch in enumerate(branches):
        mixed += gates[..., number, None] * branch
    return mixed
