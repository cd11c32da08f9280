"""Says which layers have no kernels, and why."""

from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import SUBLANES
from shardplan.errors import ConfigError


def kernel_refusal(config: NativeSparseConfig) -> str | None:
    """Return why a layer cannot be computed by kernels; None if it can.

    >>> kernel_refusal(NativeSparseConfig(2560, 4, 16, 192, 128, 32, 16, 64, 16, 512))
    """
    if config.selection_block % SUBLANES:
        return (
            f"selection_block is {config.selection_block}; kernels copy blocks of a multiple of {SUBLANES} tokens: "
            f"use {config.selection_block // SUBLANES * SUBLANES + SUBLANES}, or another method"
        )
    return None


def check_kernel(config: NativeSparseConfig) -> None:
    """Check that a layer can be computed by kernels.

    Raises:
        ConfigError: it cannot.
    """
    reason = kernel_refusal(config)
    if reason is not None:
        raise ConfigError(f"native sparse attention: {reason}")
