"""Explains for which blocks there are no kernels, and why."""

from shardplan.decoder.parts.attention.sparse.kernels.launch import SUBLANES
from shardplan.errors import ConfigError


def kernel_refusal(setting: str, block: int) -> str | None:
    """Return the reason why kernels cannot attend to blocks of `block` tokens; None if they can.

    >>> kernel_refusal("block_size", 64)

    Args:
        setting: name of the setting that has the block size, for the message.
    """
    if block % SUBLANES:
        return (
            f"{setting} is {block}; kernels copy blocks of a multiple of {SUBLANES} tokens: "
            f"use {block // SUBLANES * SUBLANES + SUBLANES}, or another method"
        )
    return None


def check_kernel(subject: str, setting: str, block: int) -> None:
    """Check that kernels can attend to blocks of `block` tokens.

    >>> check_kernel("attend_to_blocks", "block_size", 64)
    >>> check_kernel("attend_to_blocks", "block_size", 60)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    shardplan.errors.ConfigError: attend_to_blocks: block_size is 60; kernels copy blocks of a multiple of 8 ...

    Args:
        subject: the kind of attention, for the message.
        setting: name of the setting that has the block size, for the message.

    Raises:
        ConfigError: kernels cannot attend to such blocks.
    """
    reason = kernel_refusal(setting, block)
    if reason is not None:
        raise ConfigError(f"{subject}: {reason}")
