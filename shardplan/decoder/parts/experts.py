"""An MLP of routed experts, computed by the block of Levanter's Mixtral.

A router sends every token through a few of the experts. Sources: https://arxiv.org/abs/2401.04088, and
`levanter.models.mixtral.MixtralSparseMoeBlock`.
"""

from dataclasses import dataclass

import equinox as eqx
import jax
from haliax import Axis, NamedArray
from haliax.jax_utils import named_call
from levanter.models.mixtral import MixtralConfig, MixtralSparseMoeBlock
from levanter.utils.activation import ActivationFunctionEnum

LEVANTER_NAMES = {"gelu_tanh": "gelu_new"}
"""Name of an activation in the decoder -> its name in Levanter, if the two differ."""


@dataclass(frozen=True)
class ExpertsConfig:
    """Gated experts, and a router that weights a token's best experts by the softmax of their scores."""

    experts: int
    experts_per_token: int
    size: int
    """Size of an expert's hidden state."""
    activation: str
    """A key of `shardplan.decoder.parts.mlp.ACTIVATIONS`."""

    def flops_per_token(self, embed: int) -> int:
        """Count the FLOPs of a token's projections and of the router, as Levanter's `lm_flops_per_token` does.

        Args:
            embed: size of the residual stream.
        """
        return 2 * 3 * embed * self.size * self.experts_per_token + 2 * embed * self.experts

    def init(self, Embed: Axis, key: jax.Array) -> "ExpertsLayer":
        """Make the router and the experts with random weights."""
        config = MixtralConfig(
            hidden_dim=Embed.size,
            intermediate_dim=self.size,
            n_routed_experts=self.experts,
            num_experts_per_tok=self.experts_per_token,
            activation_function=ActivationFunctionEnum(LEVANTER_NAMES.get(self.activation, self.activation)),
            lbl_coef=None,
            rzl_coef=None,
        )
        return ExpertsLayer(MixtralSparseMoeBlock.init(config, key=key), self)


class ExpertsLayer(eqx.Module):
    """The router and the experts of a layer."""

    block: MixtralSparseMoeBlock
    config: ExpertsConfig = eqx.field(static=True)

    @named_call  # for profiles and reports
    def __call__(self, x: NamedArray) -> NamedArray:
        """Compute {batch, position, embed} from the same axes."""
        outputs, _ = self.block(x)
        return outputs
