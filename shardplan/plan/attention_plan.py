"""How a plan computes attention: the strategy of sequence parallelism, the order of positions, and the kernel."""

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from shardplan.errors import ConfigError, nearest
from shardplan.positions.sequence_order import SequenceOrder

if TYPE_CHECKING:
    from shardplan.positions.sequence_layout import SequenceLayout


class Strategy(StrEnum):
    """How devices share attention over a sequence."""

    NONE = "none"
    """Positions are not sharded, or Levanter's own attention is used and the partitioner gathers the keys."""
    ALL_GATHER = "all_gather"
    """Every device gathers all keys and values."""
    RING = "ring"
    """Keys and values pass around a ring of devices."""
    ULYSSES = "ulysses"
    """An all-to-all reshards heads to positions and back."""
    HYBRID = "hybrid"
    """Ulysses within groups of devices, and a ring between the groups."""


class KernelName(StrEnum):
    """What computes attention on one device."""

    BLOCKWISE = "blockwise"
    """XLA, one block of keys after the other."""
    SPLASH = "splash"
    """JAX's Pallas kernel for TPUs."""


@dataclass(frozen=True)
class AttentionPlan:
    """Sequence parallelism of a plan: how attention is computed where positions are sharded, and by which kernel.

    Raises:
        ConfigError: an unknown strategy, layout or kernel.
    """

    strategy: Strategy = Strategy.NONE
    ulysses: int = 1
    """Number of devices that reshard heads to positions."""
    ring: int = 1
    """Number of ring positions; `ulysses` x `ring` is the number of shards of the positions."""
    layout: SequenceOrder = SequenceOrder.CONTIGUOUS
    """The order of positions; see `shardplan.positions.sequence_layout`."""
    kernel: KernelName = KernelName.BLOCKWISE

    def __post_init__(self) -> None:
        for name, kind in (("strategy", Strategy), ("layout", SequenceOrder), ("kernel", KernelName)):
            value = getattr(self, name)
            if value not in list(kind):
                raise ConfigError(f"attention.{name} is {value!r}; {nearest(value, kind)}")
        object.__setattr__(self, "strategy", Strategy(self.strategy))
        object.__setattr__(self, "layout", SequenceOrder(self.layout))
        object.__setattr__(self, "kernel", KernelName(self.kernel))

    @property
    def gathers_keys(self) -> bool:
        """Whether every device holds all keys while it computes attention."""
        return self.strategy in (Strategy.NONE, Strategy.ALL_GATHER)

    def sequence_layout(self, length: int) -> "SequenceLayout":
        """Which of `length` positions each device holds."""
        # imports NumPy, which whoever only reads a Plan does not need
        from shardplan.positions.sequence_layout import SequenceLayout

        return SequenceLayout(length, self.ring, self.ulysses, self.layout)
