"""Grouped matmuls: the rows of each group times the group's matrix.

JAX's `ragged_dot`, which XLA compiles to a kernel on TPUs, and so its gradients. An attribute of the operation says
which tiles the kernel has: those of `shardplan.experts.tiles` for the generation, for each gradient its own. Without a
generation they are XLA's: of 128 or 256 rows and all inner elements, so that rows are read once for every few columns.
"""

from contextlib import nullcontext
from functools import partial

import jax
from jax import Array
from jax.experimental.xla_metadata import set_xla_metadata

from shardplan.experts.tiles import GroupedMatmul, fastest_tiles
from shardplan.hardware.generations import Generation

TO_ROWS = jax.lax.RaggedDotDimensionNumbers(
    (((1,), (1,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[0]
)
"""Dimensions of [rows, inputs] x [groups, inputs, outputs]."""
TO_MATRICES = jax.lax.RaggedDotDimensionNumbers(
    (((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
)
"""Dimensions of [rows, inputs] x [rows, outputs], for the rows of each group."""


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_matmul(rows: Array, matrices: Array, sizes: Array, generation: Generation | None = None) -> Array:
    """Multiply consecutive groups of rows, each by its own matrix.

    >>> import jax.numpy as jnp
    >>> rows, matrices = jnp.ones((3, 2)), jnp.stack([jnp.eye(2), 10 * jnp.eye(2)])
    >>> grouped_matmul(rows, matrices, jnp.array([1, 2])).tolist()
    [[1.0, 1.0], [10.0, 10.0], [10.0, 10.0]]

    Args:
        rows: [rows, inputs], the rows of group 0 first.
        matrices: [groups, inputs, outputs].
        sizes: int32[groups], the number of rows of each group.
        generation: generation of the TPUs that run it; None for other devices.

    Returns:
        [rows, outputs] in the dtype of `rows`; rows that belong to no group have arbitrary values.
    """
    groups, inputs, outputs = matrices.shape
    matmul = GroupedMatmul(len(rows), groups, inputs, outputs, rows.dtype.itemsize)
    return _multiply(rows, matrices, sizes, TO_ROWS, matmul, generation)


def _forward(
    rows: Array, matrices: Array, sizes: Array, generation: Generation | None
) -> tuple[Array, tuple[Array, Array, Array]]:
    return grouped_matmul(rows, matrices, sizes, generation), (rows, matrices, sizes)


def _backward(
    generation: Generation | None, residuals: tuple[Array, Array, Array], gradient: Array
) -> tuple[Array, Array, None]:
    rows, matrices, sizes = residuals
    groups, inputs, outputs = matrices.shape
    of_rows = GroupedMatmul(len(rows), groups, outputs, inputs, rows.dtype.itemsize)
    of_matrices = GroupedMatmul(len(rows), groups, inputs, outputs, rows.dtype.itemsize, is_matrix_gradient=True)
    # XLA transposes the matrices itself if the operation does not, and forgets the tiles
    to_rows = _multiply(gradient, matrices.swapaxes(1, 2), sizes, TO_ROWS, of_rows, generation)
    to_matrices = _multiply(rows, gradient, sizes, TO_MATRICES, of_matrices, generation)
    return to_rows, to_matrices.astype(matrices.dtype), None


grouped_matmul.defvjp(_forward, _backward)


def _multiply(
    left: Array,
    right: Array,
    sizes: Array,
    dimensions: jax.lax.RaggedDotDimensionNumbers,
    matmul: GroupedMatmul,
    generation: Generation | None,
) -> Array:
    """Compute a grouped matmul, or a gradient of one, with the tiles for its shape."""
    tiles = nullcontext()
    if generation is not None:
        tiles = set_xla_metadata(ragged_dot_tiling=str(fastest_tiles(matmul, generation)))
    with tiles:
        return jax.lax.ragged_dot_general(left, right, sizes, dimensions, preferred_element_type=left.dtype)
