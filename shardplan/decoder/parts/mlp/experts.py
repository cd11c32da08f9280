"""An MLP of routed experts: each token passes through the few experts that its router chooses, and all shared ones.

The experts are computed by `shardplan.experts`, sharded over devices as the axis mapping in force says. Their weights
have axes of their own, so that they can be stored and computed under other mappings than the rest of the model.
Sources: https://arxiv.org/abs/2401.04088, and for shared experts https://arxiv.org/abs/2401.06066.
"""

from dataclasses import dataclass, replace

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from jax import Array

from shardplan.decoder.parts.linear import INITIAL_SCALE
from shardplan.decoder.parts.mlp.mlp import ACTIVATIONS, MlpConfig, MlpLayer
from shardplan.decoder.parts.mlp.router import Router, RouterConfig
from shardplan.experts.block import routed_mlp
from shardplan.experts.expert_weights import ExpertFunction, ExpertWeights
from shardplan.model.gradient_checkpointing.activation_names import ActivationName


@dataclass(frozen=True)
class GatedActivation:
    """The hidden state of an expert: activation(gate) * up."""

    name: str
    """A key of `shardplan.decoder.parts.mlp.mlp.ACTIVATIONS`."""

    def __call__(self, gate: Array | None, up: Array) -> Array:
        """Compute the hidden states."""
        hidden: Array = ACTIVATIONS[self.name](gate) * up
        return hidden


@dataclass(frozen=True)
class ClampedSwish:
    """The activation of gpt-oss's experts: `(up + 1) * gate * sigmoid(alpha * gate)`, of clamped gate and up.

    Source: https://github.com/openai/gpt-oss, `swiglu`.
    """

    alpha: float
    limit: float
    """Largest gate, and largest absolute value of the up projection."""

    def __call__(self, gate: Array | None, up: Array) -> Array:
        """Compute the hidden states."""
        assert gate is not None
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * gate * jax.nn.sigmoid(self.alpha * gate)


@dataclass(frozen=True)
class ExpertsConfig:
    """Experts with gates, all of one size."""

    router: RouterConfig
    size: int
    """Elements of the hidden state of an expert."""
    activation: GatedActivation | ClampedSwish
    has_bias: bool = False
    weighs_inputs: bool = False
    """Whether the routing weight multiplies the expert's input rather than its output."""
    shared: MlpConfig | None = None
    """One MLP for all tokens, of the size of all shared experts together."""

    @property
    def Experts(self) -> Axis:
        """The axis of the experts."""
        return Axis("experts", self.router.experts)

    @property
    def ExpertMlp(self) -> Axis:
        """The axis of an expert's hidden state."""
        return Axis("expert_mlp", self.size)

    def flops_per_token(self, embed: int) -> int:
        """Count the FLOPs of a token's projections and of the router, as Levanter's `lm_flops_per_token` does.

        Args:
            embed: elements of the residual stream.
        """
        shared = 0 if self.shared is None else self.shared.flops_per_token(embed)
        return 2 * 3 * embed * self.size * self.router.experts_per_token + 2 * embed * self.router.experts + shared

    def init(self, Embed: Axis, key: jax.Array) -> "ExpertsLayer":
        """Make the router and the experts with random weights."""
        router, gate, up, down, shared = jax.random.split(key, 5)
        experts, mlp, embed = self.Experts, self.ExpertMlp, Embed.alias("expert_embed")

        def random(key: Array, *axes: Axis) -> NamedArray:
            return hax.random.normal(key, axes) * INITIAL_SCALE

        def bias(*axes: Axis) -> NamedArray | None:
            return hax.zeros(axes) if self.has_bias else None

        weights: ExpertWeights[NamedArray] = ExpertWeights(
            gate=random(gate, experts, embed, mlp),
            up=random(up, experts, embed, mlp),
            down=random(down, experts, mlp, embed),
            gate_bias=bias(experts, mlp),
            up_bias=bias(experts, mlp),
            down_bias=bias(experts, embed),
        )
        return ExpertsLayer(
            router=self.router.init(Embed, router),
            experts=weights,
            # an axis of its own, as layers without experts have MLPs of another size
            shared=None if self.shared is None else replace(self.shared, axis="shared_mlp").init(Embed, shared),
            config=self,
        )


class ExpertsLayer(eqx.Module):
    """The router and the experts of a layer."""

    router: Router
    experts: ExpertWeights[NamedArray]
    shared: MlpLayer | None
    config: ExpertsConfig = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray) -> NamedArray:
        """Compute the output {batch, position, embed} from an input with the same axes."""
        config = self.config
        function = ExpertFunction(config.activation, config.weighs_inputs)
        chosen, weights = self.router(x)
        # the axis that `x` has; weights of experts have the same axis under another name
        (embed,) = (axis for axis in self.router.weight.axes if axis.name != config.router.Scores.name)
        outputs = routed_mlp(config.Experts, config.ExpertMlp, embed, x, chosen, weights, self.experts, function)
        if self.shared is not None:
            outputs = outputs + self.shared(x)
        return ActivationName.MLP_OUT(outputs)
