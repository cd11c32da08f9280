"""Grouped matmuls: the rows of each group times a matrix of its own.

JAX's `ragged_dot`, which XLA compiles to a kernel on TPUs, and so its gradients.
"""

import jax
from jax import Array


def grouped_matmul(rows: Array, matrices: Array, sizes: Array) -> Array:
    """Multiply consecutive groups of rows by a matrix each.

    Args:
        rows: [rows, inputs]; those of group 0 first.
        matrices: [groups, inputs, outputs].
        sizes: int32[groups], the number of rows of each group.

    Returns:
        [rows, outputs] in the dtype of `rows`; rows after those of the last group have any values.
    """
    return jax.lax.ragged_dot(rows, matrices, sizes, preferred_element_type=rows.dtype)
