"""The kinds of collectives, under their HLO opcodes."""

from enum import StrEnum


class CollectiveKind(StrEnum):
    """One kind of collective; the value is its HLO opcode."""

    ALL_GATHER = "all-gather"
    ALL_REDUCE = "all-reduce"
    REDUCE_SCATTER = "reduce-scatter"
    ALL_TO_ALL = "all-to-all"
    RAGGED_ALL_TO_ALL = "ragged-all-to-all"
    COLLECTIVE_PERMUTE = "collective-permute"
    COLLECTIVE_BROADCAST = "collective-broadcast"
