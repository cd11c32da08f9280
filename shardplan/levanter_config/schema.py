"""What Levanter's flat schema and mesh schema have in common: their parsed form, and the checks of mesh sizes."""

from collections.abc import Iterable
from dataclasses import dataclass

from shardplan.hardware import divisors
from shardplan.levanter_config.section import AxisLists, CorrectableError, MappingEntry
from shardplan.plan.mesh_axes import LEVANTER_BATCH

BATCH_MESH_AXES = list(LEVANTER_BATCH)
"""Mesh axes that Levanter shards the batch over."""


@dataclass(frozen=True)
class ParsedSchema:
    """The part of a trainer section that the two schemas spell differently; see `TrainerSection` for the fields."""

    mesh: dict[str, int]
    compute: list[MappingEntry]
    params: list[MappingEntry]
    batch_axis: str
    is_batch_mapped: bool
    batch_shards: int


class MeshSizeError(CorrectableError):
    """Sizes of mesh axes whose product is not the number of devices; with `nearest` at `key` it would be."""


def merge_entries(entries: Iterable[MappingEntry]) -> AxisLists:
    """Merge entries into one mapping, in which the last entry of a logical axis wins."""
    return {entry.axis: list(entry.mesh_axes) for entry in entries}


def sharded_axes(entries: Iterable[MappingEntry]) -> AxisLists:
    """Merge entries into one mapping without the logical axes that are replicated."""
    return {axis: mesh_axes for axis, mesh_axes in merge_entries(entries).items() if mesh_axes}


def divide_by_sizes(total: str, count: int, sizes: dict[str, int]) -> int:
    """Divide `count` by each of `sizes` in turn.

    Args:
        total: describes `count` in the error message, as in `the 32 devices`.
        sizes: dotted key -> size.

    Raises:
        MeshSizeError: a size does not divide what the sizes before it leave.
    """
    for name, size in sizes.items():
        if count % size:
            valid = [max(d for d in divisors(count) if d < size), *[d for d in divisors(count) if d > size][:1]]
            raise MeshSizeError(
                f"{name} {size} does not divide {total}; did you mean {' or '.join(map(str, valid))}?",
                name,
                min(valid, key=lambda divisor: abs(divisor - size)),
            )
        count //= size
        if size > 1:
            total = f"the {count_text(count, 'device')} that {name} {size} leaves"
    return count


def devices_text(devices: int, slices: int) -> str:
    """Describe the devices of one slice for a message: `the 16 devices of a slice`."""
    return f"the {count_text(devices // slices, 'device')}{' of a slice' if slices > 1 else ''}"


def count_text(number: int, noun: str) -> str:
    """Format `1 slice` or `2 slices`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
