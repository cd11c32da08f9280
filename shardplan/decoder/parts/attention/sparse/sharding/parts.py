"""The positions of a sequence that each device has: one part, or two parts in zigzag order. Pure arithmetic.

The sequence is divided into equal parts, numbered in order. A device needs tokens of the parts before and after its
own; `transfers` says which devices have them.

| order | parts of device r, of P |
|---|---|
| contiguous | r, of P parts |
| zigzag | r and 2P - 1 - r, of 2P parts |
"""

from dataclasses import dataclass
from functools import cached_property

from shardplan.errors import ConfigError
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder

ORDERS = (SequenceOrder.CONTIGUOUS, SequenceOrder.ZIGZAG)
"""Orders in which devices have long runs of neighbouring tokens, as blocks and windows require."""


@dataclass(frozen=True)
class PartTransfer:
    """A permute of parts between devices: each sender sends one of its parts to one receiver."""

    source_part: int
    """Index of the part among the parts of the sending device."""
    target_part: int
    """Index of the part among the parts of the receiving device."""
    pairs: tuple[tuple[int, int], ...]
    """(Sending device, receiving device) of each pair; the two are never the same."""
    local: tuple[int, ...]
    """Devices that already have the part that they need."""


@dataclass(frozen=True)
class PositionParts:
    """Divides a sequence into equal parts, and assigns one part or two to each device.

    >>> PositionParts(24, devices=3, order=SequenceOrder.ZIGZAG).by_device
    ((0, 5), (1, 4), (2, 3))
    >>> PositionParts(24, devices=3).transfers(1)
    (PartTransfer(source_part=0, target_part=0, pairs=((0, 1), (1, 2)), local=()),)
    """

    length: int
    """Number of positions in the sequence."""
    devices: int = 1
    order: SequenceOrder = SequenceOrder.CONTIGUOUS

    def check(self, subject: str, block: int, query_tile: int = 1) -> None:
        """Check that the sequence can be divided into these parts.

        Args:
            subject: the kind of attention, for messages.
            block: tokens of a selection block.
            query_tile: queries whose blocks the statistics count together.

        Raises:
            ConfigError: the order is not in `ORDERS`, or a part would end within a selection block or a tile of
                queries.
        """
        if self.order not in ORDERS:
            raise ConfigError(
                f"{subject}: layout is {self.order}; blocks and windows need neighbouring tokens: "
                f"use {' or '.join(ORDERS)}"
            )
        multiple = self.devices * self.parts_per_device * block
        if self.devices > 1 and self.length % multiple:
            below = self.length // multiple * multiple
            valid = [str(length) for length in (below, below + multiple) if length]
            raise ConfigError(
                f"{subject}: {self.length} positions over {self.devices} devices, {self.order}; "
                f"they must be a multiple of {multiple}, so that no block of {block} is divided: "
                f"use {' or '.join(valid)}"
            )
        if self.devices > 1 and self.part_length % query_tile:
            raise ConfigError(
                f"{subject}: query_tile is {query_tile}; it must divide the {self.part_length} positions "
                f"of a part, as {block} does"
            )

    @property
    def parts_per_device(self) -> int:
        """Number of parts per device."""
        return 2 if self.order == SequenceOrder.ZIGZAG and self.devices > 1 else 1

    @property
    def part_length(self) -> int:
        """Number of positions per part."""
        return self.length // (self.devices * self.parts_per_device)

    @cached_property
    def by_device(self) -> tuple[tuple[int, ...], ...]:
        """For each device, the indices of its parts, in the order of its array."""
        if self.devices == 1:
            return ((0,),)
        positions = SequenceLayout(self.length, self.devices, kind=self.order).positions_by_ring_index()
        return tuple(tuple(row) for row in (positions[:, :: self.part_length] // self.part_length).tolist())

    def transfers(self, distance: int) -> tuple[PartTransfer, ...]:
        """Return the transfers that give every device, for each of its parts, the part `distance` parts earlier.

        Args:
            distance: number of parts; negative for later parts. A device receives nothing for parts beyond the ends of
                the sequence.
        """
        owners = {part: (device, i) for device, row in enumerate(self.by_device) for i, part in enumerate(row)}
        moved: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for part, (target, target_part) in owners.items():
            if part - distance in owners:
                source, source_part = owners[part - distance]
                moved.setdefault((source_part, target_part), []).append((source, target))
        result = []
        for (source_part, target_part), pairs in sorted(moved.items()):
            between = tuple(sorted(pair for pair in pairs if pair[0] != pair[1]))
            local = tuple(sorted(source for source, target in pairs if source == target))
            result.append(PartTransfer(source_part, target_part, between, local))
        return tuple(result)

    def halo_hops(self, rows: int) -> tuple[int, ...]:
        """Return how many of the `rows` rows before a part are in the part 1 before it, 2 before it, and so on."""
        hops = -(-rows // self.part_length)
        return tuple(min(self.part_length, rows - hop * self.part_length) for hop in range(hops))
