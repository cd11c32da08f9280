"""Reads what the collectives of a compiled module transfer: kind, mesh axes, bytes per device, and operation served."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

from shardplan.hardware import CollectiveKind, Slice, place_mesh
from shardplan.hardware.mesh_placement import NETWORK
from shardplan.verify.hlo.module import SAME_VALUE, Computation, Instruction
from shardplan.verify.hlo.replica_groups import parse_replica_groups, parse_source_target_pairs

_OPCODES = frozenset(CollectiveKind)
_WRAPPERS = ("jit(", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "custom_vjp_call")


@dataclass(frozen=True)
class CollectiveTransfer:
    """One execution of a collective, as one device sees it."""

    kind: str
    """A `CollectiveKind`, or the compiler's name for a transfer over the network between slices."""
    mesh_axes: tuple[str, ...]
    bytes: float
    """Bytes that the device receives."""
    seconds: float
    """Seconds if nothing else uses the links."""
    links: frozenset[str]
    """Links that the transfer occupies; transfers with a common link run one after the other."""
    op: str
    """Operation of the traced program that the collective serves."""


class Network:
    """The mesh of a plan, placed on the links of a slice."""

    def __init__(self, mesh: Mapping[str, int], hardware: Slice, slice_of_partition: Sequence[int]) -> None:
        self.mesh, self.slices = mesh, slice_of_partition
        self.placement = place_mesh(hardware, mesh)

    def transfer(self, computation: Computation, instruction: Instruction, context: str) -> CollectiveTransfer | None:
        """Return the transfer of the collective `instruction`; None if its replica groups are not understood.

        Args:
            context: the operation that the collective counts for if the compiler names none.
        """
        kind = CollectiveKind(base_opcode(instruction))
        if kind == CollectiveKind.RAGGED_ALL_TO_ALL:
            size = _ragged_bytes(computation, instruction)
        else:
            size = sum(array.bytes for name in instruction.operands for array in computation.instructions[name].arrays)
        op = short_op(instruction.op_name or context)
        if kind == CollectiveKind.COLLECTIVE_PERMUTE:
            return self._permute(instruction, size, op)
        root = computation.root
        while root.opcode in SAME_VALUE:
            root = computation.instructions[root.operands[0]]
        is_sliced = root.opcode == "dynamic-slice" and root.operands[0] == instruction.name
        if kind == CollectiveKind.ALL_REDUCE and is_sliced:
            kind = CollectiveKind.REDUCE_SCATTER  # the TPU compiler writes one as a fusion of these two
        groups = parse_replica_groups(instruction.attributes.get("replica_groups", ""), len(self.slices))
        if groups is None:
            return None
        received = _received_per_byte(kind, len(groups[0])) * size
        axes = self._axes(groups)
        within_slice = all(len({self.slices[member] for member in group}) == 1 for group in groups)
        # groups that are another part of a mesh axis are timed like the whole axis
        cost = self.placement.collective_cost(kind, axes, within_slice)
        return CollectiveTransfer(kind, axes, received, cost.seconds(received), cost.links, op)

    def transfer_between_slices(self, instruction: Instruction, context: str) -> CollectiveTransfer:
        """Return the transfer of a `recv` from other slices, the part of a collective that crosses the network."""
        attributes = instruction.attributes.get("frontend_attributes", "")
        kind = attributes.partition('_xla_megascale_transfer_type="')[2].partition('"')[0]
        size = float(instruction.arrays[0].bytes)
        seconds = size * self.placement.network_seconds_per_byte
        axes = self._axes([self._partitions_across_slices()])
        op = short_op(instruction.op_name or context)
        links = frozenset({NETWORK})
        return CollectiveTransfer(kind.lower().replace("_", "-") or "recv", axes, size, seconds, links, op)

    def _permute(self, instruction: Instruction, size: int, op: str) -> CollectiveTransfer:
        pairs = parse_source_target_pairs(instruction.attributes["source_target_pairs"])
        moved = tuple((source, target) for source, target in pairs if source != target)
        received = float(size if moved else 0)
        cost = self.placement.permute_cost(moved)
        kind = CollectiveKind.COLLECTIVE_PERMUTE
        return CollectiveTransfer(kind, self._axes(moved), received, cost.seconds(received), cost.links, op)

    def _partitions_across_slices(self) -> tuple[int, ...]:
        """Return the first partition of every slice; their mesh coordinates differ only on axes across slices."""
        return tuple(self.slices.index(number) for number in sorted(set(self.slices)))

    def _axes(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Return the mesh axes on which the coordinates of a group's members differ."""
        different, names = set(), list(self.mesh)
        for group in groups:
            first = self._coordinates(group[0])
            for member in group[1:]:
                different |= {i for i, c in enumerate(self._coordinates(member)) if c != first[i]}
        return tuple(name for i, name in enumerate(names) if i in different)

    def _coordinates(self, partition: int) -> tuple[int, ...]:
        """Return the mesh coordinates of a partition; partitions are numbered in row-major order."""
        sizes = list(self.mesh.values())
        return tuple(partition // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def _received_per_byte(kind: CollectiveKind, n: int) -> float:
    """Return the bytes that each of n devices in a ring receives per byte of the collective's operand.

    A device receives (n-1)/n of the result of an all-gather, (n-1)/n of the operand of an all-to-all or a
    reduce-scatter, and 2(n-1)/n of the operand of an all-reduce (https://jax-ml.github.io/scaling-book/sharding).
    """
    match kind:
        case CollectiveKind.ALL_GATHER:
            return n - 1
        case CollectiveKind.ALL_REDUCE:
            return 2 * (n - 1) / n
        case CollectiveKind.REDUCE_SCATTER | CollectiveKind.ALL_TO_ALL | CollectiveKind.RAGGED_ALL_TO_ALL:
            return (n - 1) / n
        case CollectiveKind.COLLECTIVE_BROADCAST | CollectiveKind.COLLECTIVE_PERMUTE:
            return 1 if n > 1 else 0
        case _:
            assert_never(kind)


def _ragged_bytes(computation: Computation, instruction: Instruction) -> int:
    """Return the bytes that a ragged all-to-all sends, assuming that all devices have equally many rows.

    If all devices have equally many rows, the smaller of the sent and the received array has exactly these rows; the
    larger one is a buffer with room for more.
    """
    [sent] = computation.instructions[instruction.operands[0]].arrays
    return min(sent.bytes, instruction.arrays[0].bytes)


def base_opcode(instruction: Instruction) -> str:
    """Return the opcode without the `-start` or `-done` of asynchronous operations.

    >>> base_opcode(Instruction("gather.1", "all-gather-start", (), (), {}))
    'all-gather'
    """
    return instruction.opcode.removesuffix("-start").removesuffix("-done")


def is_collective(instruction: Instruction) -> bool:
    """Return whether the instruction moves data between devices, or waits for such a move.

    >>> opcodes = "all-gather-start", "all-gather-done", "fusion"
    >>> [is_collective(Instruction("a", opcode, (), (), {})) for opcode in opcodes]
    [True, True, False]
    """
    return base_opcode(instruction) in _OPCODES


def short_op(op_name: str) -> str:
    """Return the end of an operation's path: modules and Haliax's contraction, without JAX's wrappers.

    >>> short_op("jit(step)/jit(main)/transformer/layers/mlp/dot_general")
    'layers/mlp/dot_general'
    """
    parts = [part for part in op_name.split("/") if part and not part.startswith(_WRAPPERS)]
    # Haliax's contraction is followed by dimension numbers and a primitive
    for i, part in enumerate(parts):
        if part.startswith("contract "):
            return "/".join([*parts[max(0, i - 2) : i], part])
    return "/".join(parts[-3:])
