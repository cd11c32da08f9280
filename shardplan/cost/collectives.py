"""Bytes that devices receive in the collectives of a step. Pure arithmetic."""

from dataclasses import dataclass, replace
from enum import Enum, auto

from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import CollectiveKind
from shardplan.plan.mapping import MeshAxes, mesh_size


class Purpose(Enum):
    """The purpose of a collective, as text with `{}` for its subject."""

    WEIGHTS = "weights of {}"
    WEIGHT_GRADIENTS = "gradient of {}"
    PARTIAL_SUMS = "partial sums of {}"
    GROUPED_RESULTS = "result of {}"
    """All-gather of a grouped matmul's result, for a use with another sharding."""
    SUMS_OVER_DEVICES = "sums of {}"
    EXCHANGES = "exchange of {}"
    """An all-gather, all-to-all or permutation that the model's own shard_map names."""
    SELECTIONS = "largest elements of {}"
    LOOKUPS = "rows of {}"
    LOOKUP_GRADIENTS = "gradient of the lookup"
    FLATTENED_AXES = "{} resharded"
    """Resharding of a flattened dimension, because its axes are sharded differently from the axis they flatten into."""
    REPLICATION = "replicated for {}"
    TOKENS_FOR_EXPERTS = "tokens gathered for experts"
    SUMS_OF_EXPERTS = "sums of the outputs of experts"
    ROWS_OF_EXPERTS = "tokens exchanged with experts"
    ATTENTION_SUMS = "attention over a sharded axis"
    KEYS_AND_VALUES = "keys and values of other positions"
    KEY_AND_VALUE_GRADIENTS = "gradients of keys and values"
    HALOS = "borders of windows and blocks of other positions"
    HEADS_TO_POSITIONS = "heads resharded to positions (all-to-all)"
    RING = "keys and values passed around the ring"


class Overlap(Enum):
    """The computation that can hide a collective."""

    NONE = auto()
    """The task waits for the collective."""
    INDEPENDENT = auto()
    """The collective depends on no other task, and overlaps with the part of its task that compilers can overlap."""
    REORDERED = auto()
    """As `INDEPENDENT`, but the result is reordered, and the task waits for a part of the collective."""
    LAYER = auto()
    """The collective depends on no other task, but lasts longer than its own task, such as a gather of expert weights;
    it overlaps with the part of the layer's compute that compilers can overlap."""
    KERNELS = auto()
    """Expert kernels hide the collective: chunks of tokens travel while other chunks are computed, and stored weights
    are gathered. Some compilers overlap little with kernels."""
    RING_HOPS = auto()
    """Each execution runs behind the attention to the keys of one hop; the last hop sends nothing."""


@dataclass(frozen=True)
class Traffic:
    """One collective of a step: its kind, its mesh axes, and the bytes of all its executions."""

    kind: CollectiveKind
    mesh_axes: MeshAxes
    bytes: float
    """Bytes received per device, over all executions of the step."""
    count: int
    """Number of executions per step."""
    purpose: Purpose
    subject: str = ""
    """The parameter or named scope that the collective serves."""
    overlap: Overlap = Overlap.NONE
    distance: int = 1
    """Distance that each device sends in a permutation along the mesh axes."""

    @property
    def cause(self) -> str:
        """Text of the purpose, with its subject."""
        return self.purpose.value.format(self.subject)


def all_gather_traffic(
    result_bytes: float,
    assignment: ShardingAssignment,
    axes: MeshAxes,
    count: int,
    purpose: Purpose,
    subject: str = "",
    overlap: Overlap = Overlap.NONE,
) -> Traffic:
    """Return the traffic of an all-gather, or of the all-reduce into which the compiler turns it.

    Args:
        result_bytes: bytes on a device after the gather, per execution.
        axes: mesh axes whose devices gather each other's shards.
        count: executions per step.
        purpose: what the collective is for.
        subject: the parameter or named scope that it serves.
        overlap: what computation it can run behind.
    """
    if assignment.compiles_all_gather_to_all_reduce(axes):
        traffic = all_reduce_traffic(result_bytes, assignment, axes, count, purpose, subject)
        return replace(traffic, overlap=overlap) if assignment.quirks.overlaps_sums else traffic
    size = _bytes_of_others(result_bytes, assignment, axes, count)
    return Traffic(CollectiveKind.ALL_GATHER, axes, size, count, purpose, subject, overlap)


def all_reduce_traffic(
    array_bytes: float, assignment: ShardingAssignment, axes: MeshAxes, count: int, purpose: Purpose, subject: str = ""
) -> Traffic:
    """Return the traffic of an all-reduce: a reduce-scatter and an all-gather of `array_bytes` per execution.

    Other arguments as for `all_gather_traffic`.
    """
    size = _bytes_of_others(2 * array_bytes, assignment, axes, count)
    return Traffic(CollectiveKind.ALL_REDUCE, axes, size, count, purpose, subject)


def reduce_scatter_traffic(
    array_bytes: float, assignment: ShardingAssignment, axes: MeshAxes, count: int, purpose: Purpose, subject: str = ""
) -> Traffic:
    """Return the traffic of a reduce-scatter, which the compiler may turn into an all-reduce.

    Every device receives the sum of its shard of `array_bytes` per execution. Other arguments as for
    `all_gather_traffic`.
    """
    if assignment.compiles_reduce_scatter_to_all_reduce(axes):
        return all_reduce_traffic(array_bytes, assignment, axes, count, purpose, subject)
    size = _bytes_of_others(array_bytes, assignment, axes, count)
    return Traffic(CollectiveKind.REDUCE_SCATTER, axes, size, count, purpose, subject)


def all_to_all_traffic(
    array_bytes: float, assignment: ShardingAssignment, axes: MeshAxes, count: int, purpose: Purpose, subject: str = ""
) -> Traffic:
    """Return the traffic of an all-to-all of `array_bytes` per device, divided equally among all devices.

    `array_bytes` are per execution; other arguments as for `all_gather_traffic`.
    """
    size = _bytes_of_others(array_bytes, assignment, axes, count)
    return Traffic(CollectiveKind.ALL_TO_ALL, axes, size, count, purpose, subject)


def permute_traffic(array_bytes: float, axes: MeshAxes, count: int, distance: int) -> Traffic:
    """Return the traffic of a permutation: each device receives `array_bytes` from another, per execution.

    Args:
        axes: mesh axes whose devices make up the ring.
        count: executions per step.
        distance: how far along the ring each device sends.
    """
    kind, overlap = CollectiveKind.COLLECTIVE_PERMUTE, Overlap.RING_HOPS
    return Traffic(kind, axes, count * array_bytes, count, Purpose.RING, overlap=overlap, distance=distance)


def _bytes_of_others(size: float, assignment: ShardingAssignment, axes: MeshAxes, count: int) -> float:
    """Return the bytes that a device receives in `count` executions.

    In each execution it needs `size` bytes. The devices along `axes` hold equal parts of them, so that it receives all
    parts but its own.
    """
    n = mesh_size(assignment.mesh, axes)
    return count * size * (n - 1) / n
