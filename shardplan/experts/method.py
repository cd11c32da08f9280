"""The methods by which several devices compute an MLP of routed experts. Imports no JAX."""

from dataclasses import dataclass
from enum import StrEnum

from shardplan.errors import ConfigError, nearest

OVERFLOW_SCOPE = "overflow_rounds"
"""Named scope of the loop over the rounds for rows that did not fit in the buffers; usually it has no rounds."""

UNSHARDED = "shardplan_unsharded_"
"""Prefix of names (`checkpoint_name`); the rest of the name is a logical axis of the array that no mapping shards, such
as the experts' axis in a Levanter router."""


class ExpertStrategy(StrEnum):
    """The ways in which devices compute experts together, by what they exchange: tokens or weights."""

    GATHER_TOKENS = "gather_tokens"
    """Devices all-gather the tokens of their group, apply their own experts to them, and reduce-scatter the sums."""
    EXCHANGE_TOKENS = "exchange_tokens"
    """Devices send each token to the devices of its experts, and back (ragged all-to-all)."""
    GATHER_WEIGHTS = "gather_weights"
    """Devices all-gather the weights of all experts, and apply them to their own tokens."""


@dataclass(frozen=True)
class ExpertMethod:
    """A strategy for routed experts, and the sizes of its buffers.

    Sizes count rows; a row is one token for one of the experts that it chose.
    """

    strategy: ExpertStrategy = ExpertStrategy.GATHER_TOKENS
    buffer_factor: float = 1.25
    """Rows of a device's buffer / rows of the device if all experts get equally many.

    More rows than these are computed in further rounds.
    """

    token_chunks: int = 2
    """For gather_tokens: number of chunks in which a device's tokens are gathered and computed, so that the transfers
    of one chunk run behind the experts of another."""

    def __post_init__(self) -> None:
        """Check the strategy and the sizes.

        Raises:
            ConfigError: the strategy is unknown, or a number is not positive.
        """
        if self.strategy not in list(ExpertStrategy):
            raise ConfigError(f"experts.strategy is {self.strategy!r}; {nearest(self.strategy, ExpertStrategy)}")
        object.__setattr__(self, "strategy", ExpertStrategy(self.strategy))
        if not self.buffer_factor > 0:
            raise ConfigError(f"experts.buffer_factor is {self.buffer_factor}; it must be positive, such as 1.25")
        if self.token_chunks < 1:
            raise ConfigError(f"experts.token_chunks is {self.token_chunks}; it must be at least 1")
