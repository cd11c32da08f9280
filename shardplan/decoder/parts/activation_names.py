"""Names of a layer's activations, by which a gradient checkpointing policy says which of them to save.

Haliax names the carry of a loop over layers; Levanter's models name nothing within a layer. Here, the projections and
the context of attention have the names of MaxText, and outputs have the names of Haliax's guide. The gate and up
projections are named before the activation function, because its derivative needs its input.
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
    """The weighted sum of values, before the output projection."""
    ATTENTION_OUT = "attn_out"
    """The output of attention, before it is normalised and added to the residual stream."""
    GATE = "gate_proj"
    """The gate of the MLP, before the activation."""
    UP = "up_proj"
    """The hidden state of the MLP, before the activation or its product with the gate."""
    MLP_OUT = "mlp_out"
    """The output of the MLP, before it is normalised and added to the residual stream."""

    def __call__(self, x: NamedArray) -> NamedArray:
        """Give an array this name, without changing its values."""
        named: NamedArray = hax.tree_checkpoint_name(x, self.value)
        return named
