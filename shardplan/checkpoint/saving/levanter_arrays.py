"""Reads back the names, shapes and types of a written Levanter checkpoint's arrays."""

from typing import Any

import haliax as hax
import jax
import numpy as np
import tensorstore
from levanter.tensorstore_serialization import _create_ocdbt_spec
from levanter.utils.jax_utils import leaf_key_paths

from shardplan.errors import CheckpointError, one_line


def check_arrays_written(root: str, tree: Any) -> None:
    """Open every array of `tree` in the Levanter checkpoint at `root`, without reading its data.

    Raises:
        CheckpointError: an array is missing, or has another shape or type.
    """

    def is_leaf(node: Any) -> bool:
        return isinstance(node, hax.NamedArray)

    names = jax.tree.leaves(leaf_key_paths(tree, is_leaf=is_leaf))
    arrays = [getattr(leaf, "array", leaf) for leaf in jax.tree.leaves(tree, is_leaf=is_leaf)]
    opened = []
    for name in names:
        spec = tensorstore.Spec(dict(_create_ocdbt_spec(root, name.replace(".", "/"))))
        opened.append(tensorstore.open(spec, open=True, read=True))
    for name, array, future in zip(names, arrays, opened, strict=True):
        try:
            stored = future.result()
        except ValueError as error:  # all that tensorstore raises
            raise CheckpointError(f"{root} has no array {name}: {one_line(error, 100)}; write it again") from error
        actual = tuple(stored.shape), str(np.dtype(stored.dtype.numpy_dtype))
        if actual != (array.shape, str(array.dtype)):
            raise CheckpointError(
                f"{root}: {name} is {actual}, and was written as {(array.shape, str(array.dtype))}; write it again"
            )
