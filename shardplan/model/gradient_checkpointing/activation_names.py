"""Names of a layer's activations, by which a gradient checkpointing policy says which ones to save.

Haliax names the carry of a loop over layers; Levanter's models name nothing within a layer. Here, the projections and
the context of attention have the names of MaxText, and outputs have the names of Haliax's guide. The gate and up
projections are named before the activation function, because its derivative needs its input.

shardplan's decoder gives its activations these names itself. Modules of Levanter get them from outside: how a `Linear`
multiplies is a field of it, and `with_activation_names` puts one there that names its result.
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from enum import StrEnum
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from haliax import NamedArray
from haliax.nn import Linear
from haliax.nn.scan import ScanCheckpointPolicy
from jax.ad_checkpoint import checkpoint_name
from jax.experimental.layout import Layout, with_layout_constraint

from shardplan.runtime.private_jax import named_splash_residuals


class ActivationName(StrEnum):
    """An activation that a policy may keep: `gradient_checkpointing: {save_block_internals: [attn_out]}`."""

    QUERIES = "query_proj"
    """Queries, before norm and rotation."""
    KEYS = "key_proj"
    VALUES = "value_proj"
    SELECTED_BLOCKS = "selected_blocks"
    """The indices of the blocks that queries of Native Sparse Attention or of `attend_to_blocks` attend to. If they are
    recomputed, rounding may select another block, and the gradients belong to another forward pass."""
    CONTEXT = "context"
    """The weighted sum of values, before the output projection. A kernel gives this name to its log-sum-exp as well;
    otherwise its gradients would compute the sum again, as those of Native Sparse Attention do."""
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
        if self is ActivationName.CONTEXT and _KERNEL_NAMES_CONTEXT.get():
            return x
        named: NamedArray = hax.tree_checkpoint_name(x, self.value)
        return named


TILE_ROWS = 16
"""Rows of a tile of two-byte numbers, in the last but one dimension."""
NAMES_OF_LINEARS = {
    "q_proj": ActivationName.QUERIES, "k_proj": ActivationName.KEYS, "v_proj": ActivationName.VALUES,
    "o_proj": ActivationName.ATTENTION_OUT, "gate_proj": ActivationName.GATE, "up_proj": ActivationName.UP,
    "down_proj": ActivationName.MLP_OUT,
}  # fmt: skip
"""Field of a Levanter module that holds a `Linear` -> name of the layer's result."""
READERS_OF_CARRIES = {
    ActivationName.QUERIES, ActivationName.KEYS, ActivationName.VALUES, ActivationName.GATE, ActivationName.UP,
}  # fmt: skip
"""The activations computed directly from the residual stream, which is the carry of the loop over layers."""
_KERNEL_NAMES_CONTEXT = ContextVar("kernel_names_context", default=False)


@contextmanager
def context_named_by_kernel() -> Iterator[None]:
    """Let attention kernels name the attention output, in place of the model, so that it is saved only once.

    Levanter's splash attention then names its output and its log-sum-exp, as shardplan's attention always does.
    """
    token = _KERNEL_NAMES_CONTEXT.set(True)
    try:
        with named_splash_residuals(ActivationName.CONTEXT.value):
            yield
    finally:
        _KERNEL_NAMES_CONTEXT.reset(token)


def with_activation_names(module: Any, kept: Collection[str] = ()) -> Any:
    """Return a Levanter module that names its activations; a module that names them already is returned unchanged.

    shardplan's decoder is returned unchanged too, because its own modules name their activations. The named result of a
    projection does not include the bias.

    Args:
        kept: names of the activations that gradient checkpointing keeps, whose order in memory is then fixed.
    """
    leaves, structure = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda node: isinstance(node, Linear))
    named = [_with_name(node, NAMES_OF_LINEARS.get(_field(path)), kept) for path, node in leaves]
    return jax.tree.unflatten(structure, named)


def named_as_configured(module: Any, config: Any) -> Any:
    """Return a Levanter module that names its activations, if its configuration's checkpointing keeps any by name."""
    policy = getattr(config, "gradient_checkpointing", None)
    if not isinstance(policy, ScanCheckpointPolicy):
        return module
    kept = [*_names(policy.save_block_internals), *_names(policy.offload_block_internals)]
    return with_activation_names(module, kept) if kept else module


def _names(internals: bool | Sequence[str] | None) -> Sequence[str]:
    """Return the names in a field of a policy; a bool means all or none."""
    return () if internals is None or isinstance(internals, bool) else internals


def _field(path: tuple[Any, ...]) -> str:
    """Return the last field of a path into a module; empty for an element of a sequence."""
    return str(getattr(path[-1], "name", "")) if path else ""


def _with_name(node: Any, name: ActivationName | None, kept: Collection[str]) -> Any:
    if name is None or not isinstance(node, Linear) or isinstance(node.dot_general, _NamedDotGeneral):
        return node
    reads_kept = name in READERS_OF_CARRIES or (name is ActivationName.ATTENTION_OUT and ActivationName.CONTEXT in kept)
    return replace(node, dot_general=_NamedDotGeneral(node.dot_general, name, reads_kept, name in kept))


class _NamedDotGeneral(eqx.Module):
    """Names the result of a Haliax `dot_general`; for the attention output projection, it also names the operand.

    The order of kept activations in memory is fixed. Otherwise the matmuls of gradients would choose the order, and the
    TPU compiler would copy the kept activations of all layers between the passes. The order of other activations is
    free, because fixing it makes a step slower (docs/log.md).
    """

    dot_general: Any
    name: ActivationName = eqx.field(static=True)
    reads_kept: bool = eqx.field(static=True)
    """Whether the operand is kept, or is computed directly from the carry of the loop over layers."""
    is_kept: bool = eqx.field(static=True)
    """Whether the result is kept."""

    def __call__(
        self, lhs: jax.Array, rhs: jax.Array, dimension_numbers: Any, *arguments: Any, **settings: Any
    ) -> jax.Array:
        """Multiply as `jax.lax.dot_general`."""
        if self.name is ActivationName.ATTENTION_OUT and not _KERNEL_NAMES_CONTEXT.get():
            lhs = checkpoint_name(lhs, ActivationName.CONTEXT.value)
        (contracted, _), _ = dimension_numbers
        tokens = lhs.ndim - len(contracted)
        operand = _in_order(lhs, tokens) if self.reads_kept else lhs
        product = self.dot_general(operand, rhs, dimension_numbers, *arguments, **settings)
        if not self.is_kept:
            return checkpoint_name(product, self.name.value)
        # before the name for what the forward pass writes, after it for what gradients read: if one of them is free,
        # the compiler copies all layers of what is kept for the last one, which it takes out of the loop
        return _in_order(checkpoint_name(_in_order(product, tokens), self.name.value), tokens)


def _in_order(x: jax.Array, tokens: int) -> jax.Array:
    """Make the compiler store an array in row-major order, or with its positions before its last dimension.

    The last but one dimension may be the few query heads of a group, which fill a tile in part.

    Args:
        tokens: number of dimensions that number tokens, the first ones; the last of them are positions.
    """
    *order, last = range(x.ndim)
    if x.shape[order[-1]] % TILE_ROWS:
        order.append(order.pop(tokens - 1))
    constrained: jax.Array = with_layout_constraint(x, Layout((*order, last)))
    return constrained
