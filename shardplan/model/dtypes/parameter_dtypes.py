"""The dtype of each parameter: the requested one, or one that its module requires.

Rounding the scores of a router to bfloat16 gives some tokens other experts, so that a router is a `Float32Module`. A
`KeptWeight` has the types of the checkpoint.
Whatever loads, casts, plans or checks parameters asks here.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from haliax import NamedArray

from shardplan.errors import CheckpointError
from shardplan.model.dtypes.kept_weights import is_kept, owner_of
from shardplan.model.inspect import named_leaves

FLOAT32 = "float32"


class Float32Module(eqx.Module):
    """A module whose floating-point parameters are float32, whatever dtype the rest of its model has."""


def float32_paths(module: Any) -> frozenset[str]:
    """Return the paths of the parameters that stay float32, in the form of `shardplan.model.inspect.named_leaves`.

    Args:
        module: a module tree with arrays, or with a `jax.ShapeDtypeStruct` in place of every array.
    """
    return frozenset(path for path, _ in _leaves_of(module, _is_float32))


def kept_dtypes(module: Any) -> dict[str, str]:
    """Return path -> dtype, for the arrays of weights kept as the checkpoint stores them.

    Args:
        module: a module tree with arrays, or with a `jax.ShapeDtypeStruct` in place of every array.
    """
    return {path: str(leaf.array.dtype) for path, leaf in _leaves_of(module, is_kept)}


def check_has_numbers(module: Any) -> None:
    """Check that a model's weights are decoded, because weights kept as codes cannot be written.

    Raises:
        CheckpointError: some weights are kept as codes.
    """
    path = next(iter(kept_dtypes(module)), None)
    if path is not None:
        raise CheckpointError(
            f"{owner_of(path)} is kept as its checkpoint stores it (load.keep_dtype), and only numbers are written; "
            "load the model without load.keep_dtype"
        )


def _leaves_of(module: Any, is_searched: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Yield the path and the value of every array in modules of a given class."""
    for path, node in jax.tree_util.tree_flatten_with_path(module, is_leaf=is_searched)[0]:
        if is_searched(node):
            leaves = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda leaf: isinstance(leaf, NamedArray))[0]
            for inner, leaf in leaves:
                yield jax.tree_util.keystr((*path, *inner)).lstrip("."), leaf


def parameter_dtypes(module: Any, dtype: str) -> dict[str, str]:
    """Return path -> dtype of every parameter.

    Args:
        module: a module tree with arrays, or with a `jax.ShapeDtypeStruct` in place of every array.
        dtype: dtype of all parameters, except parameters that stay float32 or as they are stored.
    """
    own = dict.fromkeys(float32_paths(module), FLOAT32) | kept_dtypes(module)
    return {path: own.get(path, dtype) for path, _ in named_leaves(module)}


def cast_arrays(module: Any, dtype: str, cast: Callable[[Any, str], Any]) -> Any:
    """Return `module` with each floating-point array replaced by `cast` of the array and its dtype.

    Args:
        dtype: dtype of all parameters, except parameters that stay float32 or as they are stored.
        cast: takes an array, abstract or not, and the name of its dtype.
    """

    def cast_node(node: Any) -> Any:
        if is_kept(node):
            return node
        own = FLOAT32 if _is_float32(node) else dtype
        return jax.tree.map(lambda leaf: cast(leaf, own) if _is_float_array(leaf) else leaf, node)

    return jax.tree.map(cast_node, module, is_leaf=lambda node: _is_float32(node) or is_kept(node))


def with_dtypes(template: Any, dtype: str) -> Any:
    """Return a module of abstract arrays with the dtypes of its parameters.

    Args:
        template: a module with a `jax.ShapeDtypeStruct` in place of every array; any other leaf is left as it is.
        dtype: dtype of all parameters, except parameters that stay float32 or as they are stored.
    """

    def cast(leaf: Any, own: str) -> Any:
        return jax.ShapeDtypeStruct(leaf.shape, own) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return cast_arrays(template, dtype, cast)


def unrounded_dtype(own: np.dtype, dtype: Any) -> np.dtype:
    """Return the dtype in which to write a parameter, so that a parameter kept in float32 is not rounded.

    Args:
        own: dtype of the parameter's array, or of the tensor that it is copied from.
        dtype: the requested dtype.

    >>> [str(unrounded_dtype(np.dtype(own), "bfloat16")) for own in ("float32", "float16", "bfloat16")]
    ['float32', 'float32', 'bfloat16']
    """
    # JAX promotes no type of one byte
    return np.dtype(jnp.promote_types(own, dtype) if own.itemsize > 1 else dtype)


def _is_float32(node: Any) -> bool:
    return isinstance(node, Float32Module)


def _is_float_array(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)
