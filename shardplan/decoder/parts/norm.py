"""RMS norm and layer norm over one or several axes, computed in float32.

Formulas: https://arxiv.org/abs/1910.07467 and https://arxiv.org/abs/1607.06450.
"""

from dataclasses import dataclass
from enum import StrEnum

import equinox as eqx
import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call


class NormKind(StrEnum):
    """The statistic that a norm divides by."""

    RMS = "rms"
    """The root mean square."""
    LAYER = "layer"
    """The standard deviation, after the mean is subtracted."""


@dataclass(frozen=True)
class NormConfig:
    """The configuration of a norm; `init` gets the axes that are normalised."""

    kind: NormKind
    epsilon: float
    has_bias: bool = False
    is_around_one: bool = False
    """Whether the norm multiplies by weight + 1, as in Gemma."""
    has_weight: bool = True
    """Whether the norm multiplies by a weight."""

    def init(self, *axes: Axis, each: tuple[Axis, ...] = ()) -> "Norm":
        """Make a norm over `axes` that multiplies by 1 and adds 0.

        Args:
            each: further axes of weight and bias, whose elements are normalised separately.
        """
        shape = (*each, *axes)
        weight = None
        if self.has_weight:
            weight = hax.zeros(shape) if self.is_around_one else hax.ones(shape)
        over = tuple(axis.name for axis in axes)
        return Norm(weight, hax.zeros(shape) if self.has_bias else None, over, self)


class Norm(eqx.Module):
    """Normalises an array over some of its axes, and multiplies it by a weight if the norm has one."""

    weight: NamedArray | None
    bias: NamedArray | None
    over: tuple[str, ...] = eqx.field(static=True)
    """Names of the axes that are normalised together."""
    config: NormConfig = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray) -> NamedArray:
        """Normalise `x`, which has the axes of the weight and any others; the result has the dtype of `x`."""
        wide = x.astype(jnp.float32)
        if self.config.kind is NormKind.LAYER:
            wide = wide - hax.mean(wide, self.over)
        wide = wide * hax.rsqrt(hax.mean(wide * wide, self.over) + self.config.epsilon)
        if self.weight is not None:
            if self.config.kind is NormKind.RMS and not self.config.is_around_one and self.bias is None:
                # in the model's dtype, as in transformers' Llama: float32 makes a step 3 % longer (docs/log.md)
                return self.weight.astype(x.dtype) * wide.astype(x.dtype)
            weight = self.weight.astype(jnp.float32)
            wide = wide * (weight + 1.0 if self.config.is_around_one else weight)
        if self.bias is not None:
            wide = wide + self.bias.astype(jnp.float32)
        return wide.astype(x.dtype)
