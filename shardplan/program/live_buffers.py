"""Live buffers: the arrays in memory at each point of a traced program, with roles that determine their sizes."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from shardplan.program.marked.attention_kind import AttentionKind
from shardplan.program.marked.block_attention_kind import BlockAttentionKind
from shardplan.program.marked.expert_kind import ExpertKind
from shardplan.program.named_arrays import TracedArray


class BufferRole(StrEnum):
    """The roles of buffers, which the walk assigns and `shardplan.cost.buffer_roles` describes."""

    PARAMETER = "parameter"
    OPTIMIZER_STATE = "optimizer state"
    LIVE = "live"
    LOG_SUM_EXP = "log-sum-exp"
    GATHERED_WEIGHT = "gathered weight"
    REORDERED_WEIGHT = "reordered weight"
    PREFETCHED_WEIGHT = "prefetched weight"
    WEIGHT_GATHERED_FIRST = "weight gathered first"
    UNSCATTERED_RESULT = "unscattered result"
    LOCAL_GRADIENT = "local gradient"
    FLOAT32_RESULT = "float32 result"
    SUMMED_ROWS = "summed rows"
    UNFREED_ROWS = "unfreed rows"
    ROUTED_TOKENS = "routed tokens"
    FACTOR_OF_GRADIENT = "factor of a gradient"
    GATHERED_ROWS = "gathered rows"
    LOOKUP_RESULT = "lookup result"
    COPIED_STACK = "copied stack"
    KEYS_OR_VALUES = "keys or values"
    EXPERT_ROWS = "rows of experts"
    EXPERT_GRADIENT_ROWS = "rows of experts and their gradients"
    SPARSE_ATTENTION = "sparse attention"
    SPARSE_GRADIENT = "gradient of sparse attention"
    BLOCK_ATTENTION = "attention to given blocks"
    BLOCK_GRADIENT = "gradient of attention to given blocks"
    LOG_SUM_EXP_OF_BLOCKS = "log-sum-exp of attention to blocks"


@dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is in memory at some point of the program."""

    role: BufferRole
    array: TracedArray
    related_arrays: tuple[TracedArray, ...] = ()
    """For a lookup's result, its table; for keys or values in the matmul that reads scores, the attention output."""
    is_read_by_grouped_matmuls: bool = False
    """Whether only grouped matmuls consume the array, directly or through elementwise operations.

    Between tasks it is then sharded by the parameter mapping rather than the compute mapping."""
    attention: AttentionKind | None = None
    """The kind of attention, for scores, keys, values, and gradients of keys and values. For Native Sparse Attention,
    the array is then the queries, or a log-sum-exp."""
    experts: ExpertKind | None = None
    """The kind of expert block, for rows of experts; the array is then the tokens, and `related_arrays` has the up
    projections."""
    blocks: BlockAttentionKind | None = None
    """The kind of attention to given blocks; the array is then the queries, or a log-sum-exp."""

    def __hash__(self) -> int:
        return self._hash  # computed once, as that of `TracedArray`

    @cached_property
    def _hash(self) -> int:
        methods = self.attention, self.experts, self.blocks
        return hash((self.role, self.array, self.related_arrays, self.is_read_by_grouped_matmuls, methods))


ProgramPoint = tuple[tuple[LiveBuffer, int], ...]
"""The buffers that are live at one point of the program, and how many of each.

Parameters and optimizer state are not among them. Parameters of one shape and type are one buffer.
"""
