"""A plan's attention: the strategy of sequence parallelism, the order of positions, and the kernel."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from shardplan.errors import ConfigError, nearest
from shardplan.positions.sequence_order import SequenceOrder

if TYPE_CHECKING:
    from shardplan.positions.sequence_layout import SequenceLayout


class Strategy(StrEnum):
    """The strategies of sequence parallelism."""

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
    """The implementations of attention on one device."""

    BLOCKWISE = "blockwise"
    """Attention in XLA, one block of keys after the other."""
    SPLASH = "splash"
    """JAX's Pallas kernel for TPUs."""


class SparseKernel(StrEnum):
    """The implementations of the selected branch of Native Sparse Attention on one device."""

    DENSE_MASK = "dense_mask"
    """XLA computes scores of all tokens, and masks most of them."""
    GATHERED_BLOCKS = "gathered_blocks"
    """XLA gathers the tokens of selected blocks for every query."""
    KERNEL = "kernel"
    """Pallas kernels for TPUs, in which tiles of queries attend to the union of their blocks; the other branches then
    have kernels too."""


@dataclass(frozen=True)
class AttentionPlan:
    """A plan's attention: its sequence parallelism, if positions are sharded, and its kernel.

    Raises:
        ConfigError: the strategy, layout or kernel is unknown.
    """

    strategy: Strategy = Strategy.NONE
    ulysses: int = 1
    """Ulysses degree: number of devices in a group that exchange heads for positions."""
    ring: int = 1
    """Number of ring indices; `ulysses` x `ring` is the number of shards of the positions."""
    layout: SequenceOrder = SequenceOrder.CONTIGUOUS
    """The order of positions; see `shardplan.positions.sequence_layout`."""
    kernel: KernelName | SparseKernel = KernelName.BLOCKWISE
    """The kernel on each device; a `SparseKernel` only for Native Sparse Attention."""
    kinds: dict[str, "AttentionPlan"] = field(default_factory=dict)
    """Name of a kind of attention (`shardplan.program.marked.attention_kind`) -> its plan, for kinds that differ from
    this one. All kinds have the same order of positions."""

    def __post_init__(self) -> None:
        kernels = [*KernelName, *SparseKernel]
        for name, kind in (("strategy", [*Strategy]), ("layout", [*SequenceOrder]), ("kernel", kernels)):
            value = getattr(self, name)
            if value not in kind:
                raise ConfigError(f"attention.{name} is {value!r}; {nearest(value, kind)}")
        object.__setattr__(self, "strategy", Strategy(self.strategy))
        object.__setattr__(self, "layout", SequenceOrder(self.layout))
        object.__setattr__(self, "kernel", next(each for each in kernels if each == self.kernel))

    @classmethod
    def of_kinds(cls, methods: Mapping[str, "AttentionPlan"]) -> "AttentionPlan":
        """Return the plan for several kinds of attention, by name; the first kind also stands for unnamed kinds.

        Without any kind, it is the plan of Levanter's own attention.
        """
        first = next(iter(methods.values()), cls())
        return replace(first, kinds={name: method for name, method in methods.items() if method != first})

    def of(self, kind: str) -> "AttentionPlan":
        """Return the plan for one kind of attention, by its name."""
        return self.kinds.get(kind, self)

    @property
    def methods(self) -> tuple["AttentionPlan", ...]:
        """This plan, and the plans of `kinds`."""
        return self, *self.kinds.values()

    @property
    def sparse_kernel(self) -> SparseKernel:
        """The method for the selected branch of Native Sparse Attention; a dense mask by default."""
        return self.kernel if isinstance(self.kernel, SparseKernel) else SparseKernel.DENSE_MASK

    @property
    def is_sequence_parallel(self) -> bool:
        """Whether shardplan's attention, rather than Levanter's own, computes any kind."""
        return any(method.strategy != Strategy.NONE for method in self.methods)

    @property
    def runs_in_levanter(self) -> bool:
        """Whether Levanter's programs can compute this attention: Levanter's own, or sparse attention in text order."""
        return all(
            method.strategy == Strategy.NONE
            or (isinstance(method.kernel, SparseKernel) and method.layout == SequenceOrder.CONTIGUOUS)
            for method in self.methods
        )

    @property
    def gathers_keys(self) -> bool:
        """Whether every device holds all keys while it computes attention."""
        return self.strategy in (Strategy.NONE, Strategy.ALL_GATHER)

    def sequence_layout(self, length: int) -> "SequenceLayout":
        """Return the layout of `length` positions over the devices."""
        # imports NumPy, which whoever only reads a Plan does not need
        from shardplan.positions.sequence_layout import SequenceLayout

        return SequenceLayout(length, self.ring, self.ulysses, self.layout)
