"""A model's parameters and their logical axes, as plain data without JAX."""

import math
from dataclasses import dataclass
from functools import cached_property

MAX_SIZE = 2**31 - 1
"""Largest size of an axis, which JAX indexes with 32 bits."""
Sizes = dict[str, int]
"""Logical axis name -> size, in the order of the array's dimensions."""


@dataclass(frozen=True)
class Parameter:
    """One array of a model, with its logical axes."""

    path: str
    """Attribute path in the module, as in `norm.weight`."""
    axes: Sizes
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.axes.values())


@dataclass(frozen=True)
class ModelAxes:
    """The parameters of a model, and the names of its residual, position and vocabulary axes."""

    type: str
    """Hugging Face `model_type`."""
    parameters: tuple[Parameter, ...]
    residual: str
    """Logical axis of the residual stream."""
    position: str
    """Logical axis of the tokens of a sequence."""
    vocab: str
    """Logical axis of the vocabulary."""

    @cached_property
    def axes(self) -> Sizes:
        """Every logical axis of the parameters, with its size."""
        return {name: size for parameter in self.parameters for name, size in parameter.axes.items()}

    @property
    def size(self) -> int:
        """Number of elements of all parameters together."""
        return sum(parameter.size for parameter in self.parameters)
