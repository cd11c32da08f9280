"""Says which blocks have no kernels, and why."""

from shardplan.decoder.parts.attention.sparse.kernels.query_tiles import SUBLANES
from shardplan.errors import ConfigError


def check_kernel(setting: str, block: int) -> None:
    """Check that kernels can compute attention to blocks of `block` tokens.

    Args:
        setting: the name of the size of blocks, for the message.

    Raises:
        ConfigError: they cannot.
    """
    if block % SUBLANES:
        raise ConfigError(
            f"{setting} is {block}; kernels copy blocks of a multiple of {SUBLANES} tokens: "
            f"use {block // SUBLANES * SUBLANES + SUBLANES}, or another method"
        )
