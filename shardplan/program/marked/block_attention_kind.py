"""Kinds of attention to given blocks, as a trace marks them."""

from dataclasses import dataclass

from shardplan.plan.attention_plan import SparseKernel
from shardplan.positions.sequence_order import SequenceOrder


@dataclass(frozen=True)
class BlockAttentionKind:
    """The sizes and the method of a call of `attend_to_blocks`, which the model chooses rather than the plan."""

    groups: int
    """Number of key and value heads."""
    heads_per_group: int
    """Number of query heads per key head."""
    key_size: int
    """Channels of a head of queries and keys."""
    value_size: int
    """Channels of a head of values."""
    selection_block: int
    """Tokens of a block."""
    selected: int
    """Number of blocks that each query attends to."""
    method: SparseKernel
    layout: SequenceOrder
    """The order of positions."""
    queries_per_chunk: int
    """Number of a device's queries that are computed at a time."""

    def selection_blocks(self, positions: int) -> int:
        """Return the number of blocks in a sequence; the last one may be shorter."""
        return -(-positions // self.selection_block)
