"""Patches Levanter's own scripts: they stream and save checkpoints as shardplan does, and fix losses and experts."""

import sys
from typing import Any

import jax
import levanter.tracker
from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter
from levanter.models.lm_model import LmConfig

import shardplan.decoder.section  # registers its type of `model` sections
import shardplan.synthetic_data  # noqa: F401  # registers its type of components of `data` sections
from shardplan.checkpoint.load import HFCheckpointConverter
from shardplan.errors import ConfigError, check_argument
from shardplan.experts.levanter import HasExpertMethod, patch_blocks
from shardplan.experts.method import ExpertMethod
from shardplan.model.corrections.soft_cap import cap_gemma2_logits
from shardplan.model.gradient_checkpointing.activation_names import named_as_configured
from shardplan.model.logits.levanter_loss import FUSED_LOSS, LEVANTERS_FUSED_LOSS, fused_loss

LEVANTERS_BUILD = LmConfig.build
LEVANTERS_JIT_LOG = levanter.tracker.jit_log
"""Levanter's function that logs values of a compiled step, before it is patched."""


def patch_levanter(experts: ExpertMethod | HasExpertMethod | None = None) -> None:
    """Make Levanter stream and save checkpoints as shardplan does, and fix its losses.

    Shardplan's blocks compute the experts of Levanter's Mixtral and Qwen3-MoE, so that they can be sharded. Levanter
    then also understands sections `model: {type: shardplan_decoder, ...}`, and gradient checkpointing can keep
    activations of its models by name. Call this function before a Levanter script runs, as `scripts/levanter_main.py`
    does.

    Args:
        experts: how experts are computed, or a plan that says so; default: tokens are gathered.

    Raises:
        ConfigError: this version of Levanter computes its losses in another way.
    """
    if experts is not None:
        remedy = "ExpertMethod('gather_tokens'), or a plan"
        check_argument("patch_levanter", "experts", experts, (ExpertMethod, HasExpertMethod), remedy)
    patch_blocks(experts if isinstance(experts, ExpertMethod | None) else experts.experts)
    levanter.tracker.jit_log = _log_without_gradient
    LevanterConverter.load_pretrained = HFCheckpointConverter.load_pretrained
    LevanterConverter.save_pretrained = HFCheckpointConverter.save_pretrained
    LmConfig.build = _build_with_names
    cap_gemma2_logits()
    if LEVANTERS_FUSED_LOSS is None:
        raise ConfigError(
            f"this marin-levanter has no {FUSED_LOSS} for patch_levanter to replace; install a version that "
            "shardplan is tested with, or plan with --pin vocab="
        )
    for module in list(sys.modules.values()):  # eval_harness has imported the function by name
        is_levanters = getattr(module, "__name__", "").startswith("levanter.")
        if is_levanters and vars(module).get(FUSED_LOSS) is LEVANTERS_FUSED_LOSS:
            setattr(module, FUSED_LOSS, fused_loss)


def _build_with_names(config: Any, Vocab: Any, *, key: Any) -> Any:
    """Build a model as Levanter does, and name the activations that its gradient checkpointing keeps by name."""
    return named_as_configured(LEVANTERS_BUILD(config, Vocab, key=key), config)


def _log_without_gradient(metrics: Any, *, step: int | None = None) -> None:
    """Log values of a compiled step as Levanter does, but without gradients through the logged values.

    Levanter's Mixtral logs how tokens are routed, and a callback cannot be differentiated.
    """
    LEVANTERS_JIT_LOG(jax.lax.stop_gradient(metrics), step=step)
