"""Reads the parameters and logical axes of a model from its module tree."""

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import haliax as hax
import jax

from shardplan.model.axes import ModelAxes, Parameter
from shardplan.model.registry import Model


@lru_cache(maxsize=8)  # models are compared by identity; lint inspects the same one for every edit that it tries
def inspect_model(model: Model) -> ModelAxes:
    """Read the parameters and logical axes of `model` from its abstract module tree."""
    template = model.template
    # `template.Embed` of a decoder is the axis that its output head contracts, which may be another one
    residual = model.config.Embed if model.is_decoder else template.Embed
    return ModelAxes(
        type=model.type,
        parameters=tuple(parameters_of(template)),
        residual=residual.name,
        position=template.Pos.name,
        vocab=template.Vocab.name,
    )


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Yield path and value of every array in `tree`; a NamedArray is one leaf, and other leaves are skipped."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))[0]
    for path, leaf in leaves:
        if isinstance(leaf, hax.NamedArray) or hasattr(leaf, "shape"):
            yield jax.tree_util.keystr(path).lstrip("."), leaf


def axes_of(leaf: Any) -> tuple[hax.Axis, ...]:
    """Return the axes of an array; none if they do not match its shape, as for an optimizer state of lower rank."""
    try:
        axes = leaf.axes if isinstance(leaf, hax.NamedArray) else ()
    except ValueError:  # raised by haliax if there are more or fewer names than dimensions
        return ()
    return axes if axes and tuple(axis.size for axis in axes) == leaf.array.shape else ()


def parameters_of(template: Any) -> Iterator[Parameter]:
    """Yield every array of a model, with its logical axes."""
    for path, leaf in named_leaves(template):
        if isinstance(leaf, hax.NamedArray):
            yield Parameter(path, {axis.name: axis.size for axis in leaf.axes}, str(leaf.array.dtype))
        else:
            # an array without names cannot be mapped: its dimensions get names that no mapping contains
            yield Parameter(path, {f"_{i}": n for i, n in enumerate(leaf.shape)}, str(leaf.dtype))
