"""Bytes per device of a step under a mapping, by part: stored arrays, and live buffers at the peak. Pure.

`shardplan.program.walk` finds which buffers are live at a point, and `shardplan.cost.buffer_roles` has their bytes.
Nothing is measured here; the rules were compared with the TPU compiler's peaks (scripts/bench_planner.py).
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from shardplan.cost.buffer_roles import ROLES, MemoryPart, buffer_bytes, host_buffer_bytes
from shardplan.cost.sharding import ShardingAssignment
from shardplan.program.live_buffers import BufferRole, LiveBuffer, ProgramPoint
from shardplan.program.tasks import Step


@dataclass(frozen=True)
class Memory:
    """Bytes per device at the peak of the program, a field for each `MemoryPart`."""

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
    """Return the bytes per device at the peak of the program, by part."""
    return Memory(**max(memory_by_part(step, assignment), key=_total))


def memory_by_part(step: Step, assignment: ShardingAssignment) -> list[dict[MemoryPart, float]]:
    """Return the bytes per device at every point of the program, by part."""
    stored = _bytes_by_part(((buffer, 1) for buffer in stored_buffers(step)), step, assignment)
    return [{**stored, **_bytes_by_part(point, step, assignment)} for point in step.points]


def point_bytes(point: ProgramPoint, assignment: ShardingAssignment) -> float:
    """Return the bytes per device of the buffers live at a point, except those live at every point."""
    return sum(count * buffer_bytes(buffer, assignment) for buffer, count in point)


def host_bytes(step: Step, assignment: ShardingAssignment) -> float:
    """Return the most bytes of host memory that a device uses at any point of the program."""
    return max(sum(count * host_buffer_bytes(buffer, assignment) for buffer, count in point) for point in step.points)


def stored_buffers(step: Step) -> Iterator[LiveBuffer]:
    """Yield the buffers that are live at every point: parameters and optimizer state."""
    yield from (LiveBuffer(BufferRole.PARAMETER, array) for array in step.parameters)
    yield from (LiveBuffer(BufferRole.OPTIMIZER_STATE, array) for array in step.state)


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
    """Return the part of `Memory` that a buffer belongs to."""
    part = ROLES[buffer.role].part
    if part is not None:
        return part
    if buffer.array.weight is not None:
        return MemoryPart.CAST_PARAMETERS
    if buffer.array.is_local and not any(axis in step.activation_axes for axis in buffer.array.axes):
        return MemoryPart.GATHERED_WEIGHTS  # a device's copy of a parameter in a shard_map, or the gradient of one
    if step.has_gradients and assignment.is_stored_like_a_parameter(buffer.array):
        return MemoryPart.GRADIENTS
    return MemoryPart.LOGITS if step.vocab in buffer.array.axes else MemoryPart.ACTIVATIONS
