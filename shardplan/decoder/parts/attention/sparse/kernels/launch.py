"""Launches Pallas kernels, compiled on TPUs and interpreted elsewhere, and defines small functions for their bodies."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

MASKED_SCORE = -1e30
"""Score of masked pairs: finite, so that the difference of two of them is 0 rather than NaN."""
LOG2_E = 1.4426950408889634
"""log2(e), as exp(x) = exp2(x * LOG2_E): exp2 is one instruction, and the factor merges into the scale of scores."""
LANES = 128
"""Size of a vector register's minor dimension."""
SUBLANES = 8
"""Rows of a vector register; the rows of a block in memory must be a multiple of it."""
SMALLEST_VMEM = 16 * 2**20
"""Bytes of VMEM in a core of v4, the least of all TPUs."""
INTERPRETER: Any = True
"""Value of `interpret` for `pallas_call` on devices other than TPUs."""


def launch(
    kernel: Callable[..., None],
    *,
    grid: tuple[int, ...],
    semantics: tuple[str, ...],
    in_specs: Sequence[pl.BlockSpec],
    out_specs: Sequence[pl.BlockSpec],
    out_shapes: Sequence[jax.ShapeDtypeStruct],
    scratch: Sequence[Any],
    name: str,
    aliases: Mapping[int, int] | None = None,
    vmem_limit: int | None = None,
) -> Callable[..., list[jax.Array]]:
    """Return a function that runs a kernel on arrays; the first array is prefetched to scalar memory.

    Args:
        semantics: per dimension of the grid, "parallel" if the cores of a chip may divide it, else "arbitrary".
        name: names the kernel in compiled programs and profiles.
        aliases: argument -> result that replaces it in memory.
        vmem_limit: bytes of VMEM that the kernel may take; default: the compiler's.
    """

    def run(interpret: Any) -> Callable[..., list[jax.Array]]:
        result: Callable[..., list[jax.Array]] = pl.pallas_call(
            kernel,
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1, grid=grid, in_specs=in_specs, out_specs=out_specs, scratch_shapes=scratch
            ),
            out_shape=out_shapes,
            # copies are of blocks that exist: checks of their bounds take as long as starting them
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=semantics, disable_bounds_checks=True, vmem_limit_bytes=vmem_limit
            ),
            input_output_aliases=aliases or {},
            interpret=interpret,
            name=name,
        )
        return result

    def run_anywhere(*arrays: jax.Array) -> list[jax.Array]:
        chosen: list[jax.Array] = jax.lax.platform_dependent(*arrays, tpu=run(False), default=run(INTERPRETER))
        return chosen

    return run_anywhere


def vmem_bytes() -> int:
    """Return the bytes of VMEM in a core of the target TPU; the least of all TPUs if the target is unknown.

    >>> vmem_bytes() // 2**20  # without a TPU
    16
    """
    return pltpu.get_tpu_info().vmem_capacity_bytes if pltpu.is_tpu_device() else SMALLEST_VMEM


def multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x y in float32: [i, k], [k, j] -> [i, j].

    >>> multiply(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0], [5.0, 6.0]])).tolist()
    [[13.0, 16.0]]
    """
    return jax.lax.dot_general(x, y, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def multiply_transposed(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x y^T in float32: [i, k], [j, k] -> [i, j].

    >>> multiply_transposed(jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0], [5.0, 6.0]])).tolist()
    [[11.0, 17.0]]
    """
    return jax.lax.dot_general(x, y, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)


def transpose_multiply(x: jax.Array, y: jax.Array) -> jax.Array:
    """Return x^T y in float32: [k, i], [k, j] -> [i, j].

    >>> transpose_multiply(jnp.array([[1.0], [2.0]]), jnp.array([[3.0, 4.0], [5.0, 6.0]])).tolist()
    [[13.0, 16.0]]
    """
    return jax.lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)


def transpose(x: jax.Array) -> jax.Array:
    """Return x^T by way of float32, in which matrices of every size can be transposed.

    >>> transpose(jnp.array([[1.0, 2.0, 3.0]])).tolist()
    [[1.0], [2.0], [3.0]]
    """
    return x.astype(jnp.float32).T.astype(x.dtype)


def indices(shape: tuple[int, int], axis: int) -> jax.Array:
    """Return int32[shape], the index along an axis.

    >>> indices((2, 3), 1).tolist()
    [[0, 1, 2], [0, 1, 2]]
    """
    return jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def quotient(x: jax.Array, divisor: int) -> jax.Array:
    """Return x // divisor of an int32 scalar >= 0; plain `//` needs the sign, which kernels cannot compute.

    >>> quotient(jnp.array([0, 7, 8]), 8).tolist()
    [0, 0, 1]
    """
    return jax.lax.div(x, jnp.int32(divisor))


def remainder(x: jax.Array, divisor: int) -> jax.Array:
    """Return x % divisor of an int32 scalar >= 0.

    >>> remainder(jnp.array([0, 7, 9]), 8).tolist()
    [0, 7, 1]
    """
    return jax.lax.rem(x, jnp.int32(divisor))


def divide(x: jax.Array, divisor: int) -> jax.Array:
    """Return x // divisor of int32 in 0 .. 2**20, by way of float32, because vector units have no integer division.

    >>> import numpy as np
    >>> divide(np.array([0, 5, 6, 2**20]), 6).tolist(), 2**20 // 6
    ([0, 0, 1, 174762], 174762)
    """
    return ((x.astype(jnp.float32) + 0.5) * (1 / divisor)).astype(jnp.int32)


def row_to_column(row: jax.Array) -> jax.Array:
    """Transpose [1, n] to [n, 1] by a mask and a sum, which work for any n."""
    n = row.shape[1]
    is_diagonal = indices((n, n), 0) == indices((n, n), 1)
    return jnp.where(is_diagonal, row, 0).sum(axis=1, keepdims=True)
