"""What the search chooses of computations: mesh axes, methods of attention, and how experts are computed."""

from typing import NamedTuple

from shardplan.experts.method import ExpertStrategy
from shardplan.plan.attention_plan import Strategy
from shardplan.plan.mapping import MeshAxes
from shardplan.positions.sequence_order import SequenceOrder


class AttentionMethod(NamedTuple):
    """A method of sequence-parallel attention."""

    strategy: Strategy
    order: SequenceOrder


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


KindMethods = tuple[AttentionMethod, ...]
"""The method of each of `Step.attention_kinds`, in their order; all have the same order of positions."""


class ComputeSharding(NamedTuple):
    """What the search chooses of the computations of a component."""

    mapping: dict[str, MeshAxes]
    """Logical axis -> mesh axes."""
    methods: KindMethods | None = None
    """The methods of attention; None for Levanter's own, and in a component without attention."""
    experts: ExpertStrategy | None = None
    """How routed experts are computed; None in a component without experts."""
