"""The named axes of a model's parameters, read from the module tree of the Levanter model."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import haliax as hax
import jax

from shardplan.model.registry import Model

Sizes = dict[str, int]
"""Logical axis name -> size, in the order of the array's dimensions."""


@dataclass(frozen=True)
class Parameter:
    """One array of the model."""

    path: str
    """Attribute path in the Levanter module, as in `transformer.norm.weight`."""
    axes: Sizes
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.axes.values())


@dataclass(frozen=True)
class ModelAxes:
    """What the planner knows of a model."""

    type: str
    parameters: tuple[Parameter, ...]
    residual: str
    """Logical axis of the residual stream."""
    position: str
    vocab: str

    @cached_property
    def axes(self) -> Sizes:
        """Every logical axis of the parameters."""
        return {name: size for parameter in self.parameters for name, size in parameter.axes.items()}

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.size for parameter in self.parameters)


def inspect_model(model: Model) -> ModelAxes:
    """The inventory of `model`, from its abstract module tree."""
    template = model.template
    return ModelAxes(
        type=model.type,
        parameters=tuple(_parameters(template)),
        residual=template.Embed.name,
        position=template.Pos.name,
        vocab=template.Vocab.name,
    )


def named_leaves(tree: Any) -> Iterator[tuple[str, Any]]:
    """Path and value of every array of `tree`; a NamedArray is one leaf. Non-arrays are left out."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, hax.NamedArray))[0]
    for path, leaf in leaves:
        if isinstance(leaf, hax.NamedArray) or hasattr(leaf, "shape"):
            yield jax.tree_util.keystr(path).lstrip("."), leaf


def axes_of(leaf: Any) -> tuple[hax.Axis, ...]:
    """The named axes of an array; none where it has lost them, as in an optimizer's state of fewer dimensions."""
    axes = leaf.axes if isinstance(leaf, hax.NamedArray) else ()
    return axes if axes and tuple(axis.size for axis in axes) == leaf.array.shape else ()


def _parameters(template: Any) -> Iterator[Parameter]:
    for path, leaf in named_leaves(template):
        if isinstance(leaf, hax.NamedArray):
            yield Parameter(path, {axis.name: axis.size for axis in leaf.axes}, str(leaf.array.dtype))
        else:
            # an array without names cannot be mapped: its dimensions get names that no mapping holds
            yield Parameter(path, {f"_{i}": n for i, n in enumerate(leaf.shape)}, str(leaf.dtype))
