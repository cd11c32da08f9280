"""Computes the loss of the next token as Levanter's trainer does, and corrects it for a sharded vocabulary.

Levanter never makes the logits of all tokens: in a `shard_map`, each device multiplies its tokens by one block of the
vocabulary after the other, and computes the logits again for the gradients. The sizes of the blocks depend on the
generation of the devices and on the number of tokens on a device.

If the compute sharding shards the vocabulary, Levanter's function treats each device's shard as the whole vocabulary.
`fused_loss` is the same function with the missing sums over devices; `shardplan.levanter_patch` puts it into Levanter,
and `next_token_losses` uses it.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray
from haliax.partitioning import physical_axis_name, physical_axis_size
from levanter.layers.attention import AttentionMask
from levanter.models import loss
from levanter.models.lm_model import LmExample

FUSED_LOSS = "fused_cross_entropy_loss_and_logsumexp_penalty"
"""Name of the function of `levanter.models.loss` by which Levanter's language models compute losses."""
LEVANTERS_FUSED_LOSS = getattr(loss, FUSED_LOSS, None)
"""Levanter's own `FUSED_LOSS` function; None if this version has none."""
KERNELS = "levanter.kernels.pallas.fused_cross_entropy_loss"
"""Package of Levanter that computes the losses of one device."""


def next_token_losses(
    module: Any, tokens: NamedArray, predicted: NamedArray, mask: AttentionMask, soft_cap: float | None
) -> NamedArray:
    """Compute the loss of every next token with Levanter's `compute_next_token_loss`, including auxiliary losses.

    Args:
        module: a Levanter language model.
        tokens: int32[batch, position].
        predicted: bool[batch, position]; False leaves out the loss of the token after this position.
        soft_cap: soft cap of the logits.

    Returns:
        float32[batch, position] in nats. The last position has no loss. An auxiliary loss, such as the loss of a
        router of experts, is added at every position.
    """
    example = LmExample(tokens=tokens, attn_mask=mask, loss_weight=predicted.astype(jnp.float32))
    settings = {"reduction": None, "reduction_axis": (), "logit_soft_cap": soft_cap}
    with _right_for_sharded_vocab():
        return module.compute_next_token_loss(example, **settings)


@contextmanager
def block_sizes_of(device_kind: str) -> Iterator[None]:
    """Let Levanter choose the blocks of its loss for devices of `device_kind`, even if this machine has none.

    Args:
        device_kind: JAX's name of the kind of device, such as "TPU v4".
    """
    sizes = import_module(f"{KERNELS}.tuned_block_sizes")
    with _replaced(sizes, "_normalized_device_kind", lambda given: (given or device_kind).lower()):
        yield


@contextmanager
def one_block_of_tokens() -> Iterator[None]:
    """Make Levanter's loss process all tokens of a device at once, and divide only the vocabulary into blocks.

    Tracing needs this, because the block size depends on the number of tokens per device, and a traced program has the
    tokens of all devices. Within the context Levanter also does not compare its choice of a kernel between processes,
    because only process 0 traces to make a plan.
    """
    kernel, choice = (import_module(f"{KERNELS}.{name}") for name in ("xla", "api"))
    with (
        _replaced(kernel, "_resolve_xla_batch_block_size", lambda tokens, *_, **__: tokens),
        _replaced(choice, "_autotune_process_ids", lambda *_: (jax.process_index(),)),
    ):
        yield


def fused_loss(
    pred_embeddings: NamedArray,
    pred_lm_head: NamedArray,
    Contract: AxisSelector,
    Label: AxisSelector,
    target_y: NamedArray,
    *,
    reduction: Any = hax.mean,
    reduction_axis: Any = None,
    weight: NamedArray | None = None,
    logsumexp_weight: float | None = 0.0,
    dtype: Any = jnp.float32,
    logit_soft_cap: float | None = None,
    precision: Any = None,
    return_argmax: bool = False,
    **settings: Any,
) -> Any:
    """Drop-in replacement for Levanter's fused loss: same arguments, same result, correct under every axis mapping.

    If the compute sharding shards only the vocabulary, each device computes the losses over its own shard in blocks, as
    Levanter does, and devices add up their sums. If the compute sharding shards the residual stream, or if the most
    probable token is requested, the function computes sharded logits, and leaves the sums to the compiler.
    """
    label, contract = pred_lm_head.resolve_axis(Label), pred_embeddings.resolve_axis(Contract)
    is_label_sharded, is_contract_sharded = ((physical_axis_size(axis) or 1) > 1 for axis in (label, contract))
    if not is_label_sharded and not is_contract_sharded:
        assert LEVANTERS_FUSED_LOSS is not None
        return LEVANTERS_FUSED_LOSS(
            pred_embeddings, pred_lm_head, Contract, Label, target_y, reduction=reduction,
            reduction_axis=reduction_axis, weight=weight, logsumexp_weight=logsumexp_weight, dtype=dtype,
            logit_soft_cap=logit_soft_cap, precision=precision, return_argmax=return_argmax, **settings,
        )  # fmt: skip
    if not is_contract_sharded and not return_argmax:
        kernel_settings = {"dtype": dtype, "logit_soft_cap": logit_soft_cap, "precision": precision}
        losses = _losses_of_vocab_shards(
            pred_embeddings, pred_lm_head.rearrange((contract, label)), target_y, logsumexp_weight, kernel_settings
        )
        return hax.nn.loss.maybe_reduce_loss(losses, reduction, reduction_axis, where=None, weight=weight)
    logits = hax.dot(pred_embeddings, pred_lm_head, axis=contract, precision=precision).astype(dtype or jnp.float32)
    if logit_soft_cap is not None:
        logits = logit_soft_cap * hax.tanh(logits / logit_soft_cap)
    result = loss.cross_entropy_and_logsumexp_penalty(
        label,
        logits,
        hax.nn.one_hot(target_y, label, dtype=logits.dtype),
        reduction=reduction,
        reduction_axis=reduction_axis,
        weight=weight,
        logsumexp_weight=logsumexp_weight,
    )
    return (result, hax.argmax(logits, label)) if return_argmax else result


def _losses_of_vocab_shards(
    activations: NamedArray, head: NamedArray, targets: NamedArray, logsumexp_weight: float | None, settings: Any
) -> NamedArray:
    """Compute float32[..., position] losses: each device sums over its vocabulary shard, then devices add their sums.

    Args:
        activations: [..., position, embed].
        head: [embed, vocab]; the compute sharding shards vocab.
        targets: int32[..., position].
        settings: further arguments of Levanter's kernel.
    """
    contract, label = head.axes
    mesh_axes = physical_axis_name(label)
    kernel = import_module(f"{KERNELS}.xla").linear_softmax_cross_entropy_loss_xla

    def losses_on_device(activations: NamedArray, targets: NamedArray, head: NamedArray) -> NamedArray:
        size = head.resolve_axis(label.name).size
        places = targets.array.reshape(-1) - jax.lax.axis_index(mesh_axes) * size
        is_here = (places >= 0) & (places < size)
        rows = activations.rearrange((*targets.axes, contract)).array.reshape(-1, contract.size)
        losses, local = kernel(rows, jnp.where(is_here, places, 0), head.array, **settings)
        largest = jax.lax.pmax(jax.lax.stop_gradient(local), mesh_axes)
        # logarithm of the sum of exp(logits) over the whole vocabulary, and the logit of the target
        total = largest + jnp.log(jax.lax.psum(jnp.exp(local - largest), mesh_axes))
        target = jax.lax.psum(jnp.where(is_here, local - losses, 0), mesh_axes)
        result = total - target + (logsumexp_weight or 0.0) * total**2
        return NamedArray(result.reshape([axis.size for axis in targets.axes]), targets.axes)

    return hax.shard_map(losses_on_device, check_rep=False)(activations, targets, head)


@contextmanager
def _right_for_sharded_vocab() -> Iterator[None]:
    """Replace Levanter's loss by `fused_loss` within the context, so that vocab may be sharded."""
    with _replaced(loss, FUSED_LOSS, fused_loss):
        yield


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    """Replace a function of a Levanter module within the context."""
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
