"""Arguments of Levanter's `dot_product_attention`: which ones shardplan's function accepts and which it refuses."""

from dataclasses import dataclass
from typing import Any

import jax
from levanter.layers.attention import AttentionBackend

from shardplan.errors import ConfigError, nearest
from shardplan.plan.attention_plan import KernelName


@dataclass(frozen=True)
class LevanterArguments:
    """Arguments of Levanter's `dot_product_attention` that shardplan accepts only if they do not change the result."""

    bias: Any = None
    precision: Any = None
    use_flash: bool | None = None
    attn_backend: AttentionBackend | None = None
    flash_block_size: int | None = None
    """Side of a block of scores in positions, which shardplan calls `block`."""
    dropout: float = 0.0
    inference: bool = True

    def check(self, kernel: str) -> None:
        """Check that no argument would change the result.

        Raises:
            ConfigError: an argument would change the result, or requires one of Levanter's implementations.
        """
        if self.bias is not None:
            raise ConfigError(
                "attention: bias is not supported; leave it out, or use Levanter's dot_product_attention, which has it"
            )
        if self.dropout and not self.inference:
            raise ConfigError(
                f"attention: dropout is {self.dropout}, and is not supported; set it to 0, or inference to True"
            )
        if self.use_flash is False:
            raise ConfigError("attention: use_flash is False, but scores are always computed in blocks; leave it out")
        self._check_backend()
        if kernel == KernelName.SPLASH and self.precision not in (None, "default", jax.lax.Precision.DEFAULT):
            raise ConfigError(
                f"attention: precision is {self.precision}, which the splash kernel cannot choose; leave it out, or "
                "use the kernel blockwise, which computes products at the highest precision"
            )

    def block_side(self, block: int | None, default: int) -> int:
        """Return the side of a block of scores in positions.

        Args:
            block: the value of shardplan's own argument.

        Raises:
            ConfigError: both arguments are given, or the side is less than 1.
        """
        if block is not None and self.flash_block_size is not None:
            raise ConfigError(
                f"attention: block is {block} and flash_block_size is {self.flash_block_size}, which mean the same; "
                "leave one out"
            )
        for name, side in (("block", block), ("flash_block_size", self.flash_block_size)):
            if side is not None and side < 1:
                raise ConfigError(f"attention: {name} is {side}; it must be at least 1")
        return block or self.flash_block_size or default

    def _check_backend(self) -> None:
        """Check that the caller does not require one of Levanter's implementations."""
        backend, backends = self.attn_backend, [str(backend.value) for backend in AttentionBackend]
        if backend is None:
            return
        if backend not in (*AttentionBackend, *backends):
            raise ConfigError(f"attention: attn_backend is {backend!r}; {nearest(str(backend), backends)}")
        if AttentionBackend(backend) is not AttentionBackend.DEFAULT:
            raise ConfigError(
                f"attention: attn_backend is {AttentionBackend(backend).value!r}, one of Levanter's implementations; "
                f"leave it out, or choose kernel: {' or '.join(KernelName)}"
            )
