"""What one collective of a compiled module is: its kind, mesh axes, bytes per device, and the operation it serves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shardplan.hardware import Slice, place_mesh
from shardplan.hardware.mesh_placement import NETWORK
from shardplan.verify.hlo.module import SAME_VALUE, Computation, Instruction, replica_groups, source_target_pairs

KINDS = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "ragged-all-to-all", "collective-permute",
    "collective-broadcast",
)  # fmt: skip
"""Opcodes, without the `-start` and `-done` of asynchronous ones."""
_WRAPPERS = ("jit(", "while", "body", "cond", "closed_call", "checkpoint", "rematted_computation", "custom_vjp_call")


@dataclass(frozen=True)
class Transfer:
    """One execution of a collective, as one device sees it."""

    kind: str
    mesh_axes: tuple[str, ...]
    bytes: float
    """Received."""
    seconds: float
    """While nothing else is on its links."""
    links: frozenset[str]
    """Transfers that have a link in common wait for each other."""
    op: str
    """Operation of the traced program that it serves."""


class Network:
    """The mesh of a plan on the links of a slice."""

    def __init__(self, mesh: Mapping[str, int], hardware: Slice, slice_of_partition: Sequence[int]) -> None:
        self.mesh, self.slices = mesh, slice_of_partition
        self.placement = place_mesh(hardware, mesh)

    def transfer(self, computation: Computation, instruction: Instruction, context: str) -> Transfer | None:
        """What `instruction` moves; None where its groups are not understood.

        A ring of n devices: each receives (n-1)/n of an all-gather's result, of an all-to-all's or a reduce-scatter's
        operand, and twice that of an all-reduce (https://jax-ml.github.io/scaling-book/sharding).

        Args:
            context: the operation to attribute it to where the compiler does not say one.
        """
        kind = base_opcode(instruction)
        # a ragged all-to-all has its indices behind the array that it sends, at most as much as there is
        sent = instruction.operands[:1] if kind == "ragged-all-to-all" else instruction.operands
        size = sum(a.bytes for name in sent for a in computation.instructions[name].arrays)
        op = short_op(instruction.op_name or context)
        if kind == "collective-permute":
            pairs = source_target_pairs(instruction.attributes["source_target_pairs"])
            moved = tuple((a, b) for a, b in pairs if a != b)
            received = float(size if moved else 0)
            cost = self.placement.permute(moved)
            return Transfer(kind, self._axes(moved), received, cost.seconds(received), cost.links, op)
        root = computation.root
        while root.opcode in SAME_VALUE:
            root = computation.instructions[root.operands[0]]
        if kind == "all-reduce" and root.opcode == "dynamic-slice" and root.operands[0] == instruction.name:
            kind = "reduce-scatter"  # the TPU compiler writes one as a fusion of these two
        groups = replica_groups(instruction.attributes.get("replica_groups", ""), len(self.slices))
        if groups is None:
            return None
        n = len(groups[0])
        factor = {
            "all-gather": n - 1,
            "all-reduce": 2 * (n - 1) / n,
            "collective-broadcast": 1 if n > 1 else 0,
        }.get(kind, (n - 1) / n)
        axes = self._axes(groups)
        within_slice = all(len({self.slices[member] for member in group}) == 1 for group in groups)
        # groups that are another part of an axis are timed as all of it
        cost = self.placement.collective(kind, axes, within_slice)
        return Transfer(kind, axes, factor * size, cost.seconds(factor * size), cost.links, op)

    def between_slices(self, instruction: Instruction, context: str) -> Transfer:
        """What a `recv` from the hosts of other slices brings: the part on the network of a collective."""
        attributes = instruction.attributes.get("frontend_attributes", "")
        kind = attributes.partition('_xla_megascale_transfer_type="')[2].partition('"')[0]
        size = float(instruction.arrays[0].bytes)
        seconds = size * self.placement.network_seconds
        axes = self._axes(self._across())
        op = short_op(instruction.op_name or context)
        return Transfer(kind.lower().replace("_", "-") or "recv", axes, size, seconds, frozenset({NETWORK}), op)

    def _across(self) -> list[tuple[int, ...]]:
        """The first partition of every slice: they are at the same place, so that only what crosses slices differs."""
        return [tuple(self.slices.index(number) for number in sorted(set(self.slices)))]

    def _axes(self, groups: Sequence[Sequence[int]]) -> tuple[str, ...]:
        """Mesh axes along which the members of a group differ."""
        different, names = set(), list(self.mesh)
        for group in groups:
            first = self._coordinates(group[0])
            for member in group[1:]:
                different |= {i for i, c in enumerate(self._coordinates(member)) if c != first[i]}
        return tuple(name for i, name in enumerate(names) if i in different)

    def _coordinates(self, partition: int) -> tuple[int, ...]:
        sizes = list(self.mesh.values())
        return tuple(partition // math.prod(sizes[i + 1 :]) % size for i, size in enumerate(sizes))


def base_opcode(instruction: Instruction) -> str:
    """The opcode without the suffix of asynchronous operations."""
    return instruction.opcode.removesuffix("-start").removesuffix("-done")


def is_collective(instruction: Instruction) -> bool:
    """Whether it moves data between devices, or waits for such a move."""
    return base_opcode(instruction) in KINDS


def short_op(op_name: str) -> str:
    """The named part of an operation's path: modules and Haliax's contraction, without the wrappers of JAX."""
    parts = [part for part in op_name.split("/") if part and not part.startswith(_WRAPPERS)]
    # Haliax's contraction is followed by dimension numbers and a primitive
    for i, part in enumerate(parts):
        if part.startswith("contract "):
            return "/".join([*parts[max(0, i - 2) : i], part])
    return "/".join(parts[-3:])
