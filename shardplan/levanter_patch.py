"""Makes Levanter's own scripts stream and save checkpoints as shardplan does, and compute right losses."""

import sys

from levanter.compat.hf_checkpoints import HFCheckpointConverter as LevanterConverter

import shardplan.decoder.section  # noqa: F401  # registers its type of `model` sections
from shardplan.checkpoint.load import HFCheckpointConverter
from shardplan.errors import ConfigError
from shardplan.model.logits.levanter_loss import FUSED_LOSS, LEVANTERS_FUSED_LOSS, fused_loss
from shardplan.model.soft_cap import cap_gemma2_logits


def patch_levanter() -> None:
    """Make Levanter, used as it is, stream and save checkpoints as shardplan does, and compute right losses.

    Sections `model: {type: shardplan_decoder, ...}` are then understood. Call it before a script of Levanter runs;
    `scripts/levanter_main.py` does so.

    Raises:
        ConfigError: this version of Levanter computes its losses in another way.
    """
    LevanterConverter.load_pretrained = HFCheckpointConverter.load_pretrained
    LevanterConverter.save_pretrained = HFCheckpointConverter.save_pretrained
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
