"""Rules that make a decoder's parameters from the tensors of a checkpoint by data movement alone.

A rule is an expression tree: its leaves are stored tensors, its nodes reshape, transpose, slice, concatenate or stack.
`evaluate` computes it with any implementation of these operations: on arrays, or on views of a checkpoint
(`shardplan.checkpoint.mapping`). So a rule is written once, and reading, streaming and saving follow from it.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

Shape = tuple[int, ...]


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of the checkpoint."""

    name: str
    shape: Shape


@dataclass(frozen=True)
class Reshaped:
    """The elements of a rule, in the same order, in another shape."""

    rule: "Rule"
    shape: Shape


@dataclass(frozen=True)
class Transposed:
    """A rule with its dimensions in another order."""

    rule: "Rule"
    permutation: tuple[int, ...]


@dataclass(frozen=True)
class Sliced:
    """The indices from `start` up to, but not including, `stop` in one dimension of a rule."""

    rule: "Rule"
    dimension: int
    start: int
    stop: int


@dataclass(frozen=True)
class Concatenated:
    """Several rules, concatenated along one dimension."""

    rules: tuple["Rule", ...]
    dimension: int


@dataclass(frozen=True)
class Stacked:
    """Rules of equal shape, stacked along a new first dimension."""

    rules: tuple["Rule", ...]


Rule = StoredTensor | Reshaped | Transposed | Sliced | Concatenated | Stacked


class Operations[T](Protocol):
    """The operations on values of tensors that rules consist of."""

    def reshape(self, value: T, shape: Shape) -> T:
        """Reshape as `numpy.reshape` does."""

    def transpose(self, value: T, permutation: Sequence[int]) -> T:
        """Transpose as `numpy.transpose` does."""

    def slice(self, value: T, dimension: int, start: int, stop: int) -> T:
        """Take the indices from `start` up to, but not including, `stop` in a dimension."""

    def concatenate(self, values: Sequence[T], dimension: int) -> T:
        """Concatenate along a dimension."""

    def stack(self, values: Sequence[T]) -> T:
        """Stack along a new first dimension."""


def evaluate[T](rule: Rule, read: Callable[[StoredTensor], T], operations: Operations[T]) -> T:
    """Compute a rule from the values of its tensors.

    >>> import numpy as np
    >>> rule = Transposed(Reshaped(StoredTensor("qkv", (4,)), (2, 2)), (1, 0))
    >>> evaluate(rule, lambda tensor: np.arange(4), np).tolist()
    [[0, 2], [1, 3]]
    """
    match rule:
        case StoredTensor():
            return read(rule)
        case Reshaped():
            return operations.reshape(evaluate(rule.rule, read, operations), rule.shape)
        case Transposed():
            return operations.transpose(evaluate(rule.rule, read, operations), rule.permutation)
        case Sliced():
            value = evaluate(rule.rule, read, operations)
            return operations.slice(value, rule.dimension, rule.start, rule.stop)
        case Concatenated():
            parts = [evaluate(each, read, operations) for each in rule.rules]
            return operations.concatenate(parts, rule.dimension)
        case Stacked():
            return operations.stack([evaluate(each, read, operations) for each in rule.rules])


def stored_tensors(rule: Rule) -> Iterator[StoredTensor]:
    """Yield the tensors that a rule reads.

    >>> gate, up = StoredTensor("gate_proj.weight", (8, 4)), StoredTensor("up_proj.weight", (8, 4))
    >>> [tensor.name for tensor in stored_tensors(Concatenated((gate, up), 0))]
    ['gate_proj.weight', 'up_proj.weight']
    """
    match rule:
        case StoredTensor():
            yield rule
        case Concatenated() | Stacked():
            for each in rule.rules:
                yield from stored_tensors(each)
        case _:
            yield from stored_tensors(rule.rule)
