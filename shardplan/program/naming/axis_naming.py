"""The state that rules for JAX primitives share while they name axes, and the interface of a rule."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from shardplan.program.named_arrays import AxisCopy, Dim, TracedArray, most_named
from shardplan.program.operations import OperationKind


@dataclass
class AxisNaming:
    """What rules find out about the axes of a program while they name them."""

    merged_axes: dict[str, Dim] = field(default_factory=dict)
    """Logical axis -> the axes into which other parts of the program split it."""
    unnamed: Counter[str] = field(default_factory=Counter)
    """Primitive -> number of its results whose axes no rule could name."""
    expert_dims: list[Dim] = field(default_factory=list)
    """Dimensions that index the matrices of grouped matmuls."""
    unpriced: Counter[str] = field(default_factory=Counter)
    """Primitive without a rule -> number of its occurrences."""
    resized_axes: set[str] = field(default_factory=set)
    """Logical axes along which slices are taken; if such an axis were sharded, its elements would have to move."""
    is_local: bool = False
    """Whether each device computes separately, in a `shard_map`, and takes slices of its own part of an array."""

    def unify(self, left: Dim, right: Dim) -> Dim:
        """Return one dimension for two operands; if their axes differ, record which axis is split into which."""
        names = [name for name, _ in (*left, *right)]
        if left == right or any(name is None or isinstance(name, AxisCopy) for name in names):
            return most_named((left, right))
        for merged, parts in ((right, left), (left, right)):
            if len(merged) == 1 and not any(name in self.merged_axes for name, _ in parts):
                self.merged_axes.setdefault(str(merged[0][0]), parts)
                return merged
        return left


RuleResult = tuple[OperationKind, list[TracedArray], dict[str, Any]]
"""The kind of the operation, its results, and further fields of `Operation`."""

Rule = Callable[[AxisNaming, Any, list[TracedArray]], RuleResult]
"""A rule: function of the known facts about axes, an equation of a jaxpr and its operands -> the equation's results."""


def itemsize_of(atom: Any) -> int:
    """Return the bytes per element of an operand or result of an equation."""
    return np.dtype(atom.aval.dtype).itemsize if hasattr(atom.aval, "dtype") else 0


def unnamed_dims(atom: Any) -> tuple[Dim, ...]:
    """Return the dimensions of an operand or result of an equation, without names."""
    return tuple(((None, size),) for size in atom.aval.shape)


def join_factors(dims: Sequence[Dim]) -> Dim:
    """Join the logical axes of several dimensions, with their sizes, in order."""
    return tuple(factor for dim in dims for factor in dim)
