"""Makes Levanter's own scripts stream and save checkpoints as shardplan does, and compute right losses."""

import sys
from typing import Any

import haliax as hax
import jax.numpy as jnp
from haliax import AxisSelector, NamedArray
from haliax.partitioning import physical_axis_size
from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter
from levanter.models import loss

from shardplan.checkpoint.load import HFCheckpointConverter
from shardplan.errors import ConfigError
from shardplan.model.levanter_compat import INSTALLED_SCHEMA, loss_takes_sharded_vocab
from shardplan.model.soft_cap import cap_gemma2_logits

FUSED_LOSS = "fused_cross_entropy_loss_and_logsumexp_penalty"
"""Function of `levanter.models.loss` with which language models of marin-levanter compute their losses."""


def patch_levanter() -> None:
    """Make Levanter, used as it is, stream and save checkpoints as shardplan does, and compute right losses.

    Call it before a script of Levanter runs; `scripts/levanter_main.py` does so.

    Raises:
        ConfigError: this version of Levanter computes its losses in another way.
    """
    LevanterConverter.load_pretrained = HFCheckpointConverter.load_pretrained
    LevanterConverter.save_pretrained = HFCheckpointConverter.save_pretrained
    cap_gemma2_logits()
    if not loss_takes_sharded_vocab(INSTALLED_SCHEMA):
        if _fused_loss is None:
            raise ConfigError(
                f"this marin-levanter has no {FUSED_LOSS} for patch_levanter to replace; install a version that "
                "shardplan is tested with, or plan with --pin vocab="
            )
        for module in list(sys.modules.values()):  # eval_harness has imported the function by name
            if getattr(module, "__name__", "").startswith("levanter.") and vars(module).get(FUSED_LOSS) is _fused_loss:
                setattr(module, FUSED_LOSS, _loss_under_any_mapping)


_fused_loss = getattr(loss, FUSED_LOSS, None)


def _loss_under_any_mapping(
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
    """Compute the loss of `target_y` as `FUSED_LOSS` does, whose arguments and result these are.

    Levanter's runs on each device as if that had all of `Contract` and `Label`. Where the current mapping shards one of
    them, this computes the logits, sharded, and leaves the sums over devices to the compiler.
    """
    label, contract = pred_lm_head.resolve_axis(Label), pred_embeddings.resolve_axis(Contract)
    if all((physical_axis_size(axis) or 1) == 1 for axis in (label, contract)):
        assert _fused_loss is not None
        return _fused_loss(
            pred_embeddings, pred_lm_head, Contract, Label, target_y, reduction=reduction,
            reduction_axis=reduction_axis, weight=weight, logsumexp_weight=logsumexp_weight, dtype=dtype,
            logit_soft_cap=logit_soft_cap, precision=precision, return_argmax=return_argmax, **settings,
        )  # fmt: skip
    # as `shardplan.model.forward.project_to_vocab`, for axes and a precision that the caller names
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
