"""Names of the activations of a layer, by which a policy of gradient checkpointing keeps them.

Haliax names what a loop carries from layer to layer; within a layer Levanter's models have no names. Here projections
of attention and its context are called as in MaxText, and outputs as in Haliax's guide. The outputs of projections that
an activation function follows are named before it: its derivative needs them.
"""

from enum import StrEnum

import haliax as hax
from haliax import NamedArray


class ActivationName(StrEnum):
    """An activation that a policy may keep: `gradient_checkpointing: {save_block_internals: [attn_out]}`."""

    QUERIES = "query_proj"
    """Queries, before norm and rotation."""
    KEYS = "key_proj"
    VALUES = "value_proj"
    CONTEXT = "context"
    """The values that queries attend to, before the output projection."""
    ATTENTION_OUT = "attn_out"
    """The output of attention, before it is normalised and added to the residual stream."""
    GATE = "gate_proj"
    """The gate of the MLP, before the activation."""
    UP = "up_proj"
    """The hidden state of the MLP, before the activation or its product with the gate."""
    MLP_OUT = "mlp_out"
    """The output of the MLP, before it is normalised and added to the residual stream."""

    def __call__(self, x: NamedArray) -> NamedArray:
        """Give an array this name; its values stay the same."""
        named: NamedArray = hax.tree_checkpoint_name(x, self.value)
        return named
