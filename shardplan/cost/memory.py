"""Bytes per device of a step under a mapping, by part: stored arrays, and the largest point of the program. Pure.

Nothing is measured here. The rules of what is written to memory are those of `shardplan.program.walk`, and were
compared with the TPU compiler's peaks (scripts/bench_planner.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import assert_never

from shardplan.cost.attention import FLOAT32_BYTES, extra_attention_bytes
from shardplan.cost.partitioned_lookup import partition_lookup
from shardplan.cost.sharding import ShardingAssignment, WeightGather
from shardplan.program.live_buffers import BufferRole, LiveBuffer, ProgramPoint
from shardplan.program.named_arrays import TracedArray, score_positions
from shardplan.program.tasks import Step

FLASH_BLOCK = 1024
"""Side of the block of attention scores that Levanter's flash attention computes without a kernel, in tokens."""
ROLES_WITH_STORED_SHARDING = {
    BufferRole.FLOAT32_RESULT, BufferRole.FLOAT32_SUMMAND, BufferRole.SUMMED_ROWS, BufferRole.SLICED_ROWS,
    BufferRole.UNSLICED_ROWS, BufferRole.GATHERED_ROWS,
}  # fmt: skip
"""Roles of activations whose bytes depend on the sharding of stored parameters."""
ATTENTION_ROLES = {BufferRole.KEYS_OR_VALUES, BufferRole.KEYS_OR_VALUES_GRADIENT}
"""Roles whose bytes depend on the strategy of attention."""


class MemoryPart(StrEnum):
    """The fields of `Memory`."""

    PARAMETERS = "parameters"
    OPTIMIZER = "optimizer"
    GRADIENTS = "gradients"
    CAST_PARAMETERS = "cast_parameters"
    GATHERED_WEIGHTS = "gathered_weights"
    ACTIVATIONS = "activations"
    LOGITS = "logits"


@dataclass(frozen=True)
class Memory:
    """Bytes per device at the largest point; `peak` is the sum of the parts, which are all live at that point."""

    parameters: float = 0.0
    optimizer: float = 0.0
    gradients: float = 0.0
    cast_parameters: float = 0.0
    gathered_weights: float = 0.0
    activations: float = 0.0
    logits: float = 0.0

    @property
    def peak(self) -> float:
        """Bytes of all parts together."""
        return sum(vars(self).values())


def estimate_memory(step: Step, assignment: ShardingAssignment) -> Memory:
    """The bytes per device at the largest point of the program, by part."""
    return Memory(**max(memory_by_part(step, assignment), key=_total))


def memory_by_part(step: Step, assignment: ShardingAssignment) -> list[dict[MemoryPart, float]]:
    """The bytes per device at every point of the program, by part."""
    stored = _bytes_by_part(((buffer, 1) for buffer in stored_buffers(step)), step, assignment)
    return [{**stored, **_bytes_by_part(point, step, assignment)} for point in schedule(step, assignment)]


def schedule(step: Step, assignment: ShardingAssignment) -> tuple[ProgramPoint, ...]:
    """The program points of the schedule with the smallest peak, which is near the peak of the compiler's schedule."""
    return min(step.schedules, key=lambda points: max(point_bytes(point, assignment) for point in points))


def point_bytes(point: ProgramPoint, assignment: ShardingAssignment) -> float:
    """Bytes per device of the buffers that are live at a point, without those that are live at every point."""
    return sum(count * buffer_bytes(buffer, assignment) for buffer, count in point)


def stored_buffers(step: Step) -> Iterator[LiveBuffer]:
    """The buffers that are live at every point: parameters and optimizer state."""
    yield from (LiveBuffer(BufferRole.PARAMETER, array) for array in step.parameters)
    yield from (LiveBuffer(BufferRole.OPTIMIZER_STATE, array) for array in step.state)


def buffer_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Bytes of a live buffer on one device; 0 where the compiler or the sharding needs none."""
    array, role, quirks = buffer.array, buffer.role, assignment.quirks
    match role:
        case BufferRole.PARAMETER | BufferRole.OPTIMIZER_STATE:
            return assignment.bytes(array)
        case BufferRole.LIVE:
            return _live_bytes(buffer, assignment)
        case BufferRole.GATHERED_WEIGHT:
            gather = assignment.weight_gather(array)
            return gather.bytes if gather else 0.0
        case BufferRole.REORDERED_WEIGHT:
            gather = assignment.weight_gather(array)
            return (gather.copies - 1) * gather.bytes if gather else 0.0
        case BufferRole.PREFETCHED_WEIGHT:
            gather = assignment.weight_gather(array) if quirks.gathers_early else None
            return gather.bytes if gather and gather.copies == 1 else 0.0
        case BufferRole.WEIGHT_GATHERED_FIRST:
            gather = assignment.weight_gather(array)
            return gather.bytes if gather and _is_gathered_first(array, gather, assignment) else 0.0
        case BufferRole.UNSCATTERED_RESULT | BufferRole.SUM_OF_RESULT:
            return _unscattered_bytes(array, assignment)
        case BufferRole.UNSUMMED_RESULT:
            unscattered = _unscattered_bytes(array, assignment)
            return unscattered - assignment.bytes(array) if unscattered else 0.0
        case BufferRole.LOCAL_GRADIENT:
            is_gradient = assignment.is_stored_like_a_parameter(replace(array, is_local=False))
            return assignment.bytes(array) if is_gradient else 0.0
        case BufferRole.FLOAT32_RESULT:
            return _float32_row_bytes(array, assignment) if _is_written_in_float32(array, assignment) else 0.0
        case BufferRole.FLOAT32_SUMMAND:
            if _is_written_in_float32(array, assignment):
                return _float32_row_bytes(array, assignment)
            return assignment.bytes(array, assignment.params if _is_sliced(array, assignment) else None)
        case BufferRole.SUMMED_ROWS:
            is_converted = _is_written_in_float32(array, assignment) or _is_sliced(array, assignment)
            return 0.0 if quirks.frees_rows and not is_converted else _live_bytes(buffer, assignment)
        case BufferRole.UNFREED_ROWS:
            return 0.0 if quirks.frees_rows else _live_bytes(buffer, assignment)
        case BufferRole.UNSLICED_ROWS:
            return assignment.bytes(array) if _is_sliced(array, assignment) else 0.0
        case BufferRole.SLICED_ROWS:
            is_kept = quirks.frees_rows and _is_sliced(array, assignment)
            return assignment.bytes(array, assignment.params) if is_kept else 0.0
        case BufferRole.GATHERED_ROWS:
            is_early = quirks.frees_rows and _is_sliced(array, assignment)
            return _live_bytes(buffer, assignment) if is_early else 0.0
        case BufferRole.ROUTED_TOKENS | BufferRole.FACTOR_OF_GRADIENT:
            return _live_bytes(buffer, assignment) if quirks.frees_rows else 0.0
        case BufferRole.LOOKUP_RESULT:
            steps = partition_lookup(buffer.related_arrays[0], array, assignment)
            return steps.gathered_table_bytes + steps.transient_bytes
        case BufferRole.COPIED_STACK:
            return assignment.bytes(array) if quirks.copies_stacks else 0.0
        case BufferRole.KEYS_OR_VALUES | BufferRole.KEYS_OR_VALUES_GRADIENT:
            return extra_attention_bytes(buffer, assignment)
        case BufferRole.SCORES:
            return _score_block_bytes(array, assignment) if quirks.plain_attention else 0.0
        case _:
            assert_never(role)


def _unscattered_bytes(result: TracedArray, assignment: ShardingAssignment) -> float:
    """Bytes per device of a result before its reduce-scatter; 0 if it needs none."""
    is_stored = assignment.is_stored_like_a_parameter(result)
    is_scattered = is_stored and assignment.num_shards(result) > assignment.num_shards(result, assignment.compute)
    return assignment.bytes(result, assignment.compute) if is_scattered else 0.0


def _live_bytes(buffer: LiveBuffer, assignment: ShardingAssignment) -> float:
    """Bytes per device of a value between tasks; if grouped matmuls read it, in the sharding of their parameters."""
    return assignment.bytes(buffer.array, assignment.params if buffer.is_read_by_grouped_matmuls else None)


def _total(parts: dict[MemoryPart, float]) -> float:
    return sum(parts.values())


def _bytes_by_part(
    buffers: Iterable[tuple[LiveBuffer, int]], step: Step, assignment: ShardingAssignment
) -> dict[MemoryPart, float]:
    parts: defaultdict[MemoryPart, float] = defaultdict(float)
    for buffer, count in buffers:
        parts[_part_of(buffer, step, assignment)] += count * buffer_bytes(buffer, assignment)
    return dict(parts)


def _part_of(buffer: LiveBuffer, step: Step, assignment: ShardingAssignment) -> MemoryPart:
    """The part of `Memory` that a buffer belongs to."""
    part = PART_OF_ROLE[buffer.role]
    if part is not None:
        return part
    if buffer.array.weight is not None:
        return MemoryPart.CAST_PARAMETERS
    if buffer.array.is_local and not any(axis in step.activation_axes for axis in buffer.array.axes):
        return MemoryPart.GATHERED_WEIGHTS  # a device's copy of a parameter in a shard_map, or the gradient of one
    if step.has_gradients and assignment.is_stored_like_a_parameter(buffer.array):
        return MemoryPart.GRADIENTS
    return MemoryPart.LOGITS if step.vocab in buffer.array.axes else MemoryPart.ACTIVATIONS


PART_OF_ROLE: dict[BufferRole, MemoryPart | None] = {
    BufferRole.PARAMETER: MemoryPart.PARAMETERS,
    BufferRole.OPTIMIZER_STATE: MemoryPart.OPTIMIZER,
    BufferRole.LIVE: None,
    BufferRole.GATHERED_WEIGHT: MemoryPart.GATHERED_WEIGHTS,
    BufferRole.REORDERED_WEIGHT: MemoryPart.GATHERED_WEIGHTS,
    BufferRole.PREFETCHED_WEIGHT: MemoryPart.GATHERED_WEIGHTS,
    BufferRole.WEIGHT_GATHERED_FIRST: MemoryPart.GATHERED_WEIGHTS,
    BufferRole.UNSCATTERED_RESULT: None,
    BufferRole.SUM_OF_RESULT: None,
    BufferRole.UNSUMMED_RESULT: None,
    BufferRole.LOCAL_GRADIENT: MemoryPart.GRADIENTS,
    BufferRole.FLOAT32_RESULT: None,
    BufferRole.FLOAT32_SUMMAND: None,
    BufferRole.SUMMED_ROWS: None,
    BufferRole.UNFREED_ROWS: None,
    BufferRole.UNSLICED_ROWS: None,
    BufferRole.SLICED_ROWS: None,
    BufferRole.ROUTED_TOKENS: None,
    BufferRole.FACTOR_OF_GRADIENT: None,
    BufferRole.GATHERED_ROWS: None,
    BufferRole.LOOKUP_RESULT: None,
    BufferRole.COPIED_STACK: None,
    BufferRole.KEYS_OR_VALUES: None,
    BufferRole.KEYS_OR_VALUES_GRADIENT: None,
    BufferRole.SCORES: None,
}
"""Role -> its part of `Memory`; None where the part follows from the array."""


def _is_gathered_first(weight: TracedArray, gather: WeightGather, assignment: ShardingAssignment) -> bool:
    """Whether the compiler gathers a weight of the head at the start of the program, rather than before its use.

    It does so where the gather is along several dimensions and leaves the weight sharded, on all generations but
    tpu7x (docs/log.md).
    """
    is_partial = assignment.num_shards(weight, assignment.compute) > 1
    return gather.num_dimensions > 1 and is_partial and not assignment.quirks.gathers_early


def _is_written_in_float32(rows: TracedArray, assignment: ShardingAssignment) -> bool:
    """Whether the kernel of grouped matmuls writes `rows` in float32, to be converted afterwards."""
    is_narrow = rows.itemsize < FLOAT32_BYTES
    return assignment.quirks.wide_rows and is_narrow and not assignment.is_stored_like_a_parameter(rows)


def _is_sliced(rows: TracedArray, assignment: ShardingAssignment) -> bool:
    """Whether grouped matmuls take slices of `rows`, because their parameters have more shards."""
    return assignment.num_shards(rows, assignment.params) > assignment.num_shards(rows)


def _float32_row_bytes(rows: TracedArray, assignment: ShardingAssignment) -> float:
    """Bytes per device of rows in float32, in the sharding of the parameters that they were multiplied with."""
    return assignment.bytes(rows, assignment.params) * FLOAT32_BYTES / rows.itemsize


def _score_block_bytes(scores: TracedArray, assignment: ShardingAssignment) -> float:
    """Bytes per device of the block of scores that attention without a kernel works on."""
    size = scores.elements / assignment.num_shards(scores, assignment.compute) * FLOAT32_BYTES
    positions = score_positions(scores)
    for name, count in scores.factors:
        if name in positions:
            size *= min(1.0, FLASH_BLOCK / count)
    return size
