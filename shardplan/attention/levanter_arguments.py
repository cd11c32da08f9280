"""The arguments of Levanter's `dot_product_attention` that ours takes under their names, and those that it refuses."""

from typing import Any

import jax
from levanter.layers.attention import AttentionBackend

from shardplan.errors import ConfigError, nearest
from shardplan.plan.attention_plan import KernelName


def check_levanter_arguments(
    bias: Any,
    precision: Any,
    use_flash: bool | None,
    attn_backend: AttentionBackend | None,
    dropout: float,
    inference: bool,
    kernel: str,
) -> None:
    """Check the arguments that only Levanter's implementations have: none may change the result.

    Raises:
        ConfigError: one that would change it, or that requires one of Levanter's implementations.
    """
    if bias is not None:
        raise ConfigError(
            "attention: bias is not supported; leave it out, or use Levanter's dot_product_attention, which has it"
        )
    if dropout and not inference:
        raise ConfigError(f"attention: dropout is {dropout}, and is not supported; set it to 0, or inference to True")
    if use_flash is False:
        raise ConfigError("attention: use_flash is False, but scores are always computed in blocks; leave it out")
    backends = [str(backend.value) for backend in AttentionBackend]
    if attn_backend is not None and attn_backend not in (*AttentionBackend, *backends):
        raise ConfigError(f"attention: attn_backend is {attn_backend!r}; {nearest(str(attn_backend), backends)}")
    if attn_backend is not None and AttentionBackend(attn_backend) is not AttentionBackend.DEFAULT:
        raise ConfigError(
            f"attention: attn_backend is {AttentionBackend(attn_backend).value!r}, one of Levanter's implementations; "
            f"leave it out, or choose kernel: {' or '.join(KernelName)}"
        )
    if kernel == KernelName.SPLASH and precision not in (None, "default", jax.lax.Precision.DEFAULT):
        raise ConfigError(
            f"attention: precision is {precision}, which the splash kernel cannot choose; leave it out, or use the "
            "kernel blockwise, which computes products at the highest precision"
        )


def block_side(block: int | None, flash_block_size: int | None, default: int) -> int:
    """Return the side of a block of scores in positions, which Levanter calls `flash_block_size`.

    Raises:
        ConfigError: both are given, or a block has no positions.
    """
    if block is not None and flash_block_size is not None:
        raise ConfigError(
            f"attention: block is {block} and flash_block_size is {flash_block_size}, which mean the same; "
            "leave one out"
        )
    for name, side in (("block", block), ("flash_block_size", flash_block_size)):
        if side is not None and side < 1:
            raise ConfigError(f"attention: {name} is {side}; it must be at least 1")
    return block or flash_block_size or default
