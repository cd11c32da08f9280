"""The forward pass of a Levanter model on a batch of tokens: activations, logits and losses."""

from typing import Any, Protocol

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from levanter.utils.tree_utils import inference_mode

from shardplan.model.dtypes.parameter_dtypes import cast_arrays
from shardplan.model.logits.logit_blocks import compute_target_losses, prepare_head, project_to_vocab
from shardplan.model.registry import Model


def equal_windows(position: Axis, window: int | None) -> NamedArray | None:
    """Return, for each position, the position at which its window of `window` tokens begins; None for one window.

    >>> equal_windows(Axis("position", 6), window=3).array.tolist()
    [0, 0, 0, 3, 3, 3]
    """
    return None if window is None else hax.arange(position) // window * window


def compute_activations(
    model: Model, module: Any, tokens: NamedArray, window_starts: NamedArray | None = None
) -> NamedArray:
    """Compute the residual stream [batch, position, embed] after the last layer, for int32[batch, position] tokens.

    Args:
        window_starts: int32[batch, position] or int32[position], the index at which each token's window begins, if
            several windows are packed into a sequence; None for one window. Positions count from 0 in each window, and
            tokens attend only to tokens of the same window.
    """
    mask, settings = model.mask, {}
    if window_starts is not None:
        mask = mask.with_segment_ids(window_starts)  # windows of a sequence differ in where they begin
        settings = {"pos_ids": hax.arange(tokens.axes[-1]) - window_starts}
    result = module.activations(tokens, mask, key=None, **settings)
    # mixture-of-experts models return the router's auxiliary loss as well, which is not part of the likelihood
    return result[0] if isinstance(result, tuple) else result


def compute_logits(model: Model, module: Any, activations: NamedArray) -> NamedArray:
    """Compute float32[..., vocab] logits from activations [..., embed], with the model's soft cap."""
    return project_to_vocab(activations, prepare_head(module, model.logit_soft_cap), module.Embed)


def cast_for_compute(module: Any, dtype: str) -> Any:
    """Cast the floating-point arrays of the module to the compute dtype, and disable its dropout.

    Parameters that stay float32 are not cast.

    >>> from haliax import Axis, nn
    >>> from jax.random import key
    >>> linear = nn.Linear.init(Axis("embed", 2), Axis("mlp", 4), key=key(0))
    >>> str(cast_for_compute(linear, "bfloat16").weight.dtype)
    'bfloat16'
    """
    return cast_arrays(inference_mode(module, True), dtype, lambda array, own: array.astype(own))


class Forward(Protocol):
    """Runs the layers of a model, with positions in any order; results are in the order of the sequence."""

    def in_layer_order(self, is_token: NamedArray) -> NamedArray:
        """Reorder bool[batch, position] to the order of positions in the layers; False for their padding."""

    def activations(
        self, model: Model, module: Any, tokens: NamedArray, window_starts: NamedArray | None
    ) -> NamedArray:
        """Compute the residual stream, as `compute_activations`."""

    def last_activations(self, model: Model, module: Any, tokens: NamedArray) -> NamedArray:
        """Compute the residual stream [batch, embed] at the last position only."""

    def losses(
        self,
        model: Model,
        module: Any,
        tokens: NamedArray,
        predicted: NamedArray,
        window_starts: NamedArray | None,
        blocks: int,
    ) -> NamedArray:
        """Compute the loss, float32[batch, position] in nats, of the token after each position.

        Args:
            tokens: int32[batch, position].
            predicted: bool[batch, position]; where it is False the loss is 0.
            window_starts: as for `compute_activations`.
            blocks: number of blocks of positions; the logits of only one block are in memory at a time.
        """


class SequenceForward:
    """The forward pass on positions in the order of the sequence."""

    def in_layer_order(self, is_token: NamedArray) -> NamedArray:
        """Return `is_token` unchanged, because layers take positions in the order of the sequence."""
        return is_token

    def activations(
        self, model: Model, module: Any, tokens: NamedArray, window_starts: NamedArray | None
    ) -> NamedArray:
        """Compute the residual stream, as `compute_activations`."""
        return compute_activations(model, module, tokens, window_starts)

    def last_activations(self, model: Model, module: Any, tokens: NamedArray) -> NamedArray:
        """Compute the residual stream [batch, embed] at the last position only."""
        stream = compute_activations(model, module, tokens)
        return stream[module.Pos.name, stream.axis_size(module.Pos.name) - 1]

    def losses(
        self,
        model: Model,
        module: Any,
        tokens: NamedArray,
        predicted: NamedArray,
        window_starts: NamedArray | None,
        blocks: int,
    ) -> NamedArray:
        """Compute the loss of the token after each position; see `Forward`."""
        activations = compute_activations(model, module, tokens, window_starts)
        position = tokens.axes[-1]
        # `roll` gives the last position the first token, which does not follow it
        has_target = 1 - hax.nn.one_hot(-1, position, dtype=jnp.float32)
        weights = predicted.astype(jnp.float32) * has_target
        targets = hax.roll(tokens, -1, position)
        return compute_target_losses(module, activations, targets, weights, model.logit_soft_cap, blocks)
