"""The tree of an Orbax checkpoint: nested dictionaries of a model's arrays, under the two keys of MaxText's parameters.

The path of an array is that of the Plan: `segments[0].stacked.layers[0].mlp.up_proj.weight` is the array
`tree["params"]["params"]["segments"]["0"]["stacked"]["layers"]["0"]["mlp"]["up_proj"]["weight"]`.
"""

import re
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from shardplan.errors import CheckpointError, one_line
from shardplan.model.inspect import named_leaves

PREFIX = ("params", "params")
"""Keys above the arrays: `params` of MaxText's state, and the Flax collection `params` within it."""


def make_tree(model: Any) -> dict[str, Any]:
    """Return the arrays of a model as nested dictionaries, without copies.

    >>> from jax import numpy as jnp
    >>> make_tree({"norm": {"weight": jnp.ones(2)}})
    {'params': {'params': {'norm': {'weight': Array([1., 1.], dtype=float32)}}}}
    """
    tree: dict[str, Any] = {}
    for path, leaf in named_leaves(model):
        node, keys = tree, [*PREFIX, *split_path(path)]
        for key in keys[:-1]:
            node = node.setdefault(key, {})
        node[keys[-1]] = getattr(leaf, "array", leaf)
    return tree


def split_path(path: str) -> list[str]:
    """Split a path into its keys: names, and indices as text.

    >>> split_path("segments[0].stacked.norm.weight")
    ['segments', '0', 'stacked', 'norm', 'weight']
    """
    return re.findall(r"[^.\[\]']+", path)


def check_tree_written(item: str, tree: Any) -> None:
    """Compare the metadata of an Orbax checkpoint's arrays with the arrays of `tree`.

    Args:
        item: the folder of the item, local or gs://.

    Raises:
        CheckpointError: an array is missing, or has another shape or type.
    """
    try:
        metadata = ocp.PyTreeCheckpointHandler().metadata(epath.Path(item))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{item} cannot be read back: {one_line(error, 100)}; write it again") from error
    stored = {_name(path): value for path, value in jax.tree_util.tree_leaves_with_path(metadata.tree)}
    for path, array in jax.tree_util.tree_leaves_with_path(tree):
        name = _name(path)
        if name not in stored:
            raise CheckpointError(f"{item} has no array {name}; write it again")
        actual = tuple(stored[name].shape), str(np.dtype(stored[name].dtype))
        if actual != (array.shape, str(array.dtype)):
            raise CheckpointError(
                f"{item}: {name} is {actual}, and was written as {(array.shape, str(array.dtype))}; write it again"
            )


def _name(path: jax.tree_util.KeyPath) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")
