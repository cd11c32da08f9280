"""The search's choices for computations: mesh axes, attention methods, and the method of experts."""

from typing import NamedTuple

from shardplan.experts.method import ExpertStrategy
from shardplan.plan.attention_plan import SparseKernel, Strategy
from shardplan.plan.mapping import MeshAxes
from shardplan.positions.sequence_order import SequenceOrder


class AttentionMethod(NamedTuple):
    """A method of attention, sequence-parallel unless its strategy is `Strategy.NONE`."""

    strategy: Strategy
    order: SequenceOrder
    sparse_kernel: SparseKernel | None = None
    """For Native Sparse Attention: the method of its selected branch. Shardings determine the kernel of other
    attention."""


METHODS = (
    AttentionMethod(Strategy.ALL_GATHER, SequenceOrder.CONTIGUOUS),
    AttentionMethod(Strategy.ALL_GATHER, SequenceOrder.ZIGZAG),
    AttentionMethod(Strategy.RING, SequenceOrder.CONTIGUOUS),
    AttentionMethod(Strategy.RING, SequenceOrder.ZIGZAG),
    AttentionMethod(Strategy.ULYSSES, SequenceOrder.CONTIGUOUS),
    AttentionMethod(Strategy.HYBRID, SequenceOrder.CONTIGUOUS),
    AttentionMethod(Strategy.HYBRID, SequenceOrder.ZIGZAG),
)
"""All methods of sequence-parallel attention."""

UNSHARDED = AttentionMethod(Strategy.NONE, SequenceOrder.CONTIGUOUS)
"""The method of attention by matmuls, for positions that are not sharded."""

KindMethods = tuple[AttentionMethod, ...]
"""The method of each of `Step.attention_kinds`, in their order, all with the same order of positions."""


def sparse_methods(is_sharded: bool, order: SequenceOrder, has_kernel: bool) -> list[AttentionMethod]:
    """Return the methods of Native Sparse Attention for an order of positions.

    >>> [str(each.sparse_kernel) for each in sparse_methods(True, SequenceOrder.ZIGZAG, has_kernel=False)]
    ['dense_mask', 'gathered_blocks']

    Args:
        is_sharded: whether positions are sharded, so that keys and values are gathered.
        has_kernel: whether kernels can compute it.
    """
    strategy = Strategy.ALL_GATHER if is_sharded else Strategy.NONE
    kernels = [kernel for kernel in SparseKernel if has_kernel or kernel is not SparseKernel.KERNEL]
    return [AttentionMethod(strategy, order, kernel) for kernel in kernels]


class ComputeSharding(NamedTuple):
    """The search's choice for one component's computations."""

    mapping: dict[str, MeshAxes]
    """Logical axis -> mesh axes."""
    methods: KindMethods | None = None
    """The methods of attention; None for Levanter's own, and in a component without attention."""
    experts: ExpertStrategy | None = None
    """How routed experts are computed; None for a component without experts."""
