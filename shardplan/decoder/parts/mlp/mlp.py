"""The MLP of a layer: two or three projections with an activation between them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call

from shardplan.decoder.parts.linear import Linear
from shardplan.model.gradient_checkpointing.activation_names import ActivationName

XIELU = "xielu"
"""Name of the activation with parameters, see `Xielu`."""
ACTIVATIONS: dict[str, Callable[[NamedArray], NamedArray]] = {
    "gelu": partial(hax.nn.gelu, approximate=False),
    "gelu_tanh": partial(hax.nn.gelu, approximate=True),
    "quick_gelu": hax.nn.quick_gelu,
    "relu": hax.nn.relu,
    "silu": hax.nn.silu,
    "tanh": hax.tanh,
}
"""Name of an activation without parameters -> the function."""


@dataclass(frozen=True)
class MlpConfig:
    """The configuration of an MLP; `init` gets the axis of its inputs."""

    size: int
    """Size of the hidden state."""
    activation: str
    """A key of `ACTIVATIONS`, or `XIELU`."""
    has_bias: bool = False
    is_gated: bool = False
    """Whether hidden = activation(gate) * up with a third projection, the gate; else hidden = activation(up)."""
    axis: str = "mlp"
    """Name of the axis of the hidden state."""

    @property
    def Mlp(self) -> Axis:
        """The axis of the hidden state."""
        return Axis(self.axis, self.size)

    def flops_per_token(self, embed: int) -> int:
        """Count the FLOPs of a token's projections, as Levanter's `lm_flops_per_token` does.

        Args:
            embed: size of the residual stream.
        """
        return 2 * embed * self.size * (3 if self.is_gated else 2)

    def init(self, Embed: Axis, key: jax.Array) -> "MlpLayer":
        """Make the MLP with random weights."""
        up, down, gate = jax.random.split(key, 3)
        return MlpLayer(
            gate_proj=Linear.init((self.Mlp,), (Embed,), self.has_bias, gate) if self.is_gated else None,
            up_proj=Linear.init((self.Mlp,), (Embed,), self.has_bias, up),
            down_proj=Linear.init((Embed,), (self.Mlp,), self.has_bias, down),
            xielu=Xielu.init() if self.activation == XIELU else None,
            config=self,
        )


class Xielu(eqx.Module):
    """The activation xIELU, whose two slopes are parameters.

    Source: https://arxiv.org/abs/2411.13010.
    """

    alpha_p: NamedArray
    """Parameter, a scalar, of the slope for positive values, before the softplus."""
    alpha_n: NamedArray
    """Parameter, a scalar, of the slope for negative values, before the softplus."""

    BETA = 0.5
    EPSILON = -1e-6
    """Largest argument of expm1, so that expm1(x) - x does not subtract nearly equal numbers."""

    @staticmethod
    def init() -> "Xielu":
        """Make the activation with slopes of 0.8."""
        positive, negative = jnp.log(jnp.expm1(0.8)), jnp.log(jnp.expm1(0.8 - Xielu.BETA))
        return Xielu(hax.named(positive, ()), hax.named(negative, ()))

    def __call__(self, x: NamedArray) -> NamedArray:
        """Compute the activation in float32; the result has the dtype of `x`."""
        wide = x.astype(jnp.float32)
        positive = hax.nn.softplus(self.alpha_p.astype(jnp.float32))
        negative = self.BETA + hax.nn.softplus(self.alpha_n.astype(jnp.float32))
        below = (hax.expm1(hax.minimum(wide, self.EPSILON)) - wide) * negative
        return (hax.where(wide > 0, positive * wide * wide, below) + self.BETA * wide).astype(x.dtype)


class MlpLayer(eqx.Module):
    """The MLP of a layer: two or three projections and an activation."""

    gate_proj: Linear | None
    up_proj: Linear
    down_proj: Linear
    xielu: Xielu | None
    config: MlpConfig = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray) -> NamedArray:
        """Compute {..., embed} from {..., embed}."""
        up = ActivationName.UP(self.up_proj(x))
        activate = ACTIVATIONS[self.config.activation] if self.xielu is None else self.xielu
        hidden = activate(up) if self.gate_proj is None else activate(ActivationName.GATE(self.gate_proj(x))) * up
        return ActivationName.MLP_OUT(self.down_proj(hidden))
