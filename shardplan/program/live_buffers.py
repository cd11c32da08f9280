"""Live buffers: the arrays in memory at each point of a traced program, with the role that decides their size."""

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property

from shardplan.program.attention_kind import AttentionKind
from shardplan.program.named_arrays import TracedArray


class BufferRole(StrEnum):
    """Why a buffer is in memory; its size under a sharding follows from it."""

    PARAMETER = "parameter"
    """A parameter in its stored sharding; live at every point."""
    OPTIMIZER_STATE = "optimizer state"
    """State of the optimizer, sharded like parameters; live at every point."""
    LIVE = "live"
    """A value between the operation that writes it and the last one that reads it."""
    GATHERED_WEIGHT = "gathered weight"
    """The all-gathered copy of a parameter, between its first and last use in a loop's body."""
    REORDERED_WEIGHT = "reordered weight"
    """What a gather needs beyond the gathered copy, until it is complete: another copy, whose elements it reorders."""
    PREFETCHED_WEIGHT = "prefetched weight"
    """A gathered weight before its first use, if the compiler gathers early: from the loop before that use on."""
    WEIGHT_GATHERED_FIRST = "weight gathered first"
    """A gathered weight of the head before its first use, if the compiler gathers it at the start of the program."""
    UNSCATTERED_RESULT = "unscattered result"
    """The result of a matmul before its reduce-scatter: a gradient is unsharded until each device keeps its shard."""
    SUM_OF_RESULT = "sum of a result"
    """The sum of an unscattered result over devices, if the compiler sums it at once."""
    UNSUMMED_RESULT = "unsummed result"
    """An unscattered result from its matmul to the end of the last loop, if the compiler sums it after that loop."""
    LOCAL_GRADIENT = "local gradient"
    """A device's own gradient of a parameter, from the end of its shard_map to the end of the last loop: the compiler
    sums it over devices after that loop."""
    FLOAT32_RESULT = "float32 result"
    """The result of a grouped matmul while it is computed, in float32."""
    FLOAT32_SUMMAND = "float32 summand"
    """A result of a grouped matmul, in float32, until it is added to another such result."""
    SUMMED_ROWS = "summed rows"
    """The sum of such results while it is written; the compiler writes it over one of them if it can."""
    UNFREED_ROWS = "unfreed rows"
    """Rows routed to experts, from their last use until the gradients of experts are computed."""
    UNSLICED_ROWS = "unsliced rows"
    """Rows for grouped matmuls before each device keeps the slices that it multiplies with its shards of experts."""
    SLICED_ROWS = "sliced rows"
    """The slices of such rows that grouped matmuls take, where parameters have more shards than rows; as long."""
    ROUTED_TOKENS = "routed tokens"
    """The tokens from which such rows are looked up; as long."""
    FACTOR_OF_GRADIENT = "factor of a gradient"
    """A resharded factor of the gradient of such rows, while the gradients of experts are computed: the gradient of
    the routing weights, which is computed last, reads it again."""
    GATHERED_ROWS = "gathered rows"
    """The experts' result, computed again for the same gradient, where grouped matmuls take slices of rows: the slices
    are gathered while the gradients of experts are computed."""
    LOOKUP_RESULT = "lookup result"
    """The result of a lookup and its transient copies while it is computed."""
    COPIED_STACK = "copied stack"
    """A copy of stacked parameters in another memory layout, from before the loop over them until its end."""
    KEYS_OR_VALUES = "keys or values"
    """Keys or values beyond a device's own, while attention uses them; nonzero where positions are sharded."""
    KEYS_OR_VALUES_GRADIENT = "gradient of keys or values"
    """The gradient of such keys or values while it is computed."""
    SCORES = "scores"
    """A block of attention scores while it is computed without a kernel; a kernel never writes scores to memory."""


ROLE_OF_SCHEDULE = (BufferRole.SUM_OF_RESULT, BufferRole.UNSUMMED_RESULT)
"""Roles that tell the schedules of a program apart: buffers of each role exist in one schedule only."""


@dataclass(frozen=True)
class LiveBuffer:
    """A buffer that is in memory at some point of the program."""

    role: BufferRole
    array: TracedArray
    related_arrays: tuple[TracedArray, ...] = ()
    """Of a lookup result: its table. Of keys or values: the attention output, in the matmul that reads scores."""
    is_read_by_grouped_matmuls: bool = False
    """Whether only grouped matmuls consume the array: between tasks it has the sharding of their parameters."""
    attention: AttentionKind | None = None
    """Of scores, keys and values, and of gradients of the latter: their kind of attention."""

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.role, self.array, self.related_arrays, self.is_read_by_grouped_matmuls, self.attention))


ProgramPoint = tuple[tuple[LiveBuffer, int], ...]
"""The buffers that are live at one point of the program, each with its number.

Parameters and optimizer state are not among them. Parameters of one shape and type are one buffer.
"""
