"""Linear projections, whose weights are stored as in PyTorch: outputs first."""

import equinox as eqx
import haliax as hax
import jax
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

INITIAL_SCALE = 0.02
"""Standard deviation of new weights."""


class Linear(eqx.Module):
    """A projection with a weight {outputs, inputs}, and a bias {outputs} if the model has one."""

    weight: NamedArray
    bias: NamedArray | None
    inputs: tuple[str, ...] = eqx.field(static=True)
    """Names of the axes that are contracted."""

    @staticmethod
    def init(outputs: tuple[Axis, ...], inputs: tuple[Axis, ...], has_bias: bool, key: jax.Array) -> "Linear":
        """Make a projection with random weights and a bias of 0."""
        weight = hax.random.normal(key, (*outputs, *inputs)) * INITIAL_SCALE
        return Linear(weight, hax.zeros(outputs) if has_bias else None, tuple(axis.name for axis in inputs))

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray) -> NamedArray:
        """Project {..., inputs} to {..., outputs}."""
        projected = hax.auto_sharded(hax.dot(x, self.weight, axis=self.inputs))
        return projected if self.bias is None else projected + self.bias
