"""The named axes of a model: its parameters, and the contractions they take part in.

Everything is read from the module tree of the Levanter model; no axis name is written here.
"""

import dataclasses
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
from haliax.axis import axis_name
from haliax.util import ensure_tuple

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
class Contraction:
    """A product of activations with a weight, or a lookup in one."""

    weight: str
    """Path of the parameter."""
    inputs: tuple[str, ...]
    """Logical axes of the weight that are contracted (for a lookup: indexed)."""
    outputs: tuple[str, ...]
    """Logical axes of the weight that the result has."""
    routed: tuple[str, ...] = ()
    """Logical axes of the weight of which each token uses a few entries (experts)."""
    uses_per_token: int = 1
    """How many entries of the routed axes each token uses."""
    repeats: int = 1
    """Times it happens in one forward pass: the sizes of the scanned axes."""
    is_lookup: bool = False

    @property
    def module(self) -> str:
        """Path of the module two levels up (the MLP, the attention), whose activations live together."""
        return ".".join(self.weight.split(".")[:-2])


@dataclass(frozen=True)
class Attention:
    """One attention module: softmax(q k^T) v."""

    heads: tuple[str, ...]
    """Logical axes that number the query heads where q, k and v are made, major to minor."""
    merged: str
    """Logical axis that numbers the query heads where the result is projected: `heads` flattened into one."""
    head_size: str
    repeats: int


@dataclass(frozen=True)
class ModelAxes:
    """What the planner knows of a model."""

    type: str
    parameters: tuple[Parameter, ...]
    contractions: tuple[Contraction, ...]
    attention: tuple[Attention, ...]
    residual: str
    """Logical axis of the residual stream."""
    position: str
    vocab: str

    @cached_property
    def axes(self) -> Sizes:
        """Every logical axis of the parameters."""
        return {name: size for parameter in self.parameters for name, size in parameter.axes.items()}

    def elements(self, axes: Iterable[str]) -> int:
        """Product of the sizes of `axes`."""
        return math.prod(self.axes[axis] for axis in axes)

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.size for parameter in self.parameters)


def inspect_model(model: Model) -> ModelAxes:
    """The inventory of `model`, from its abstract module tree."""
    template = model.template
    head = template.get_lm_head()
    contractions: list[Contraction] = []
    attention: list[Attention] = []
    for path, module in _modules(template, ""):
        contractions += _contractions(path, module, model, head)
        attention += _attention(module)
    return ModelAxes(
        type=model.type,
        parameters=tuple(_parameters(template)),
        contractions=tuple(contractions),
        attention=tuple(attention),
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


def _parameters(template: Any) -> Iterator[Parameter]:
    for path, leaf in named_leaves(template):
        if isinstance(leaf, hax.NamedArray):
            yield Parameter(path, {axis.name: axis.size for axis in leaf.axes}, str(leaf.array.dtype))
        else:
            # an array without names cannot be mapped: its dimensions get names that no mapping holds
            yield Parameter(path, {f"_{i}": n for i, n in enumerate(leaf.shape)}, str(leaf.dtype))


def _modules(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every module below `node`, with its path, parents first."""
    if isinstance(node, hax.NamedArray):
        return
    if isinstance(node, eqx.Module):
        yield path, node
        for item in dataclasses.fields(node):
            if not item.metadata.get("static", False):
                yield from _modules(getattr(node, item.name), f"{path}.{item.name}" if path else item.name)
    elif isinstance(node, list | tuple):
        for i, child in enumerate(node):
            yield from _modules(child, f"{path}[{i}]")


def _contractions(path: str, module: Any, model: Model, head: hax.NamedArray) -> Iterator[Contraction]:
    if isinstance(module, hnn.Linear | hnn.MoELinear):
        routed = _names(module.Experts) if isinstance(module, hnn.MoELinear) else ()
        yield Contraction(
            weight=f"{path}.weight",
            inputs=_names(module.In),
            outputs=_names(module.Out),
            routed=routed,
            uses_per_token=model.config.num_experts_per_tok if routed else 1,
            repeats=_scanned(module.weight, (*_names(module.In), *_names(module.Out), *routed)),
        )
    elif isinstance(module, hnn.Embedding):
        vocab, embed = _names(module.Vocab), _names(module.Embed)
        yield Contraction(f"{path}.weight", vocab, embed, is_lookup=True)
        if module.weight is head:  # tied embeddings: the same weight makes the logits
            yield Contraction(f"{path}.weight", embed, vocab)


def _attention(module: Any) -> Iterator[Attention]:
    """Levanter's attention modules: those whose configuration names the axes of their heads."""
    config: Any = getattr(module, "config", None)
    merged, head_size = getattr(config, "Heads", None), getattr(config, "HeadSize", None)
    projections = [
        part
        for part in vars(module).values()
        if isinstance(part, hnn.Linear) and head_size is not None and head_size in ensure_tuple(part.Out)
    ]
    if merged is None or head_size is None or not projections:
        return
    grouped = hasattr(config, "KVHeads")
    query = projections[0]
    yield Attention(
        heads=(config.KVHeads.name, config.QHeadsPerGroup.name) if grouped else (merged.name,),
        merged=merged.name,
        head_size=head_size.name,
        repeats=_scanned(query.weight, (*_names(query.In), *_names(query.Out))),
    )


def _names(axes: Any) -> tuple[str, ...]:
    return tuple(axis_name(axis) for axis in ensure_tuple(axes))


def _scanned(weight: hax.NamedArray, own: tuple[str, ...]) -> int:
    """Product of the weight's axes that are not the module's `own`: those it is stacked along."""
    return math.prod(axis.size for axis in weight.axes if axis.name not in own)
