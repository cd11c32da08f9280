"""Which strategy and which layout attention should have: work by blocks of the mask, bytes on the torus. Pure.

What devices receive, for P = U x R devices along the positions, S tokens, Hq query and Hkv key heads, in units of
batch x head size (https://arxiv.org/abs/2309.14509, https://arxiv.org/abs/2310.01889):

| strategy | received |
|---|---|
| all_gather | 2 Hkv (S/P) (P-1) |
| ring | 2 Hkv (S/P) for every hop that the mask leaves, P-1 at most |
| ulysses | (2 Hq + 2 Hkv) (S/P) (U-1)/U, with as many key heads as are sent |
| hybrid | that, and 2 Hkv (S/P) for every hop of R-1 at most |

A ring computes while it receives, and every hop takes as long as its slowest device, and then adds its part of the
output, in float32, to that of the hops before; the others wait for what they receive.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from shardplan.cost.attention import FLOAT32
from shardplan.cost.calibration import calibration
from shardplan.hardware import Slice, divisors, place_mesh
from shardplan.positions.heads import HeadCut
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import KERNEL_BLOCK, KINDS, MOST_BLOCKS, SequenceLayout, blocks, hops

MEASURED_PASSES = 3
"""How often what is merged at a hop is read or written at HBM bandwidth, which puts measured runs of MaxText in order;
of the TPU compiler's cycles it is `shardplan.cost.attention.MERGE_PASSES`."""


@dataclass(frozen=True)
class Heads:
    """What one device has of attention, beside positions."""

    batch: int
    key_heads: int
    per_key_head: int
    """Query heads of each."""
    head_size: int
    value_size: int
    itemsize: int = 2
    """Bytes of a number."""

    def bytes(self, keys: float, tokens: float) -> float:
        """Of keys and values of `tokens` positions, for `keys` key heads."""
        return self.batch * keys * tokens * (self.head_size + self.value_size) * self.itemsize


@dataclass(frozen=True)
class Choice:
    """A way to do attention, with what it costs a device in one forward pass."""

    strategy: str
    layout: SequenceLayout
    seconds: float
    compute_seconds: float
    """Of the slowest device, block by block; of a ring, hop by hop."""
    received_bytes: float
    held_bytes: float
    """Keys and values, and what is exchanged, besides what the device has anyway."""


def layouts(
    length: int, degree: int, kinds: Iterable[str] = KINDS, documents: tuple[int, ...] | None = None
) -> list[SequenceLayout]:
    """Every layout of a sequence over `degree` devices, for every Ulysses degree.

    Args:
        documents: their lengths, where they are known.
    """
    return [
        SequenceLayout(length, degree // ulysses, ulysses, kind, documents)
        for ulysses, kind in itertools.product(divisors(degree), kinds)
        # one ring index has all positions, and one document is as a sequence is
        if kind == "contiguous" or (ulysses < degree and (kind != "documents" or documents))
    ]


def choices(
    layouts: Iterable[SequenceLayout],
    pattern: Pattern,
    heads: Heads,
    along: tuple[str, ...],
    mesh: Mapping[str, int],
    hardware: Slice,
    available: float = inf,
) -> list[Choice]:
    """Every strategy with every one of the layouts that holds at most `available` bytes, the fastest first.

    Documents that the layouts do not know are taken for one.

    Args:
        along: mesh axes that cut positions, major to minor.
    """
    found = (
        weigh(strategy, layout, pattern, heads, along, mesh, hardware)
        for layout in layouts
        for strategy in _strategies(layout)
    )
    return sorted((each for each in found if each.held_bytes <= available), key=lambda each: each.seconds)


def weigh(
    strategy: str,
    layout: SequenceLayout,
    pattern: Pattern,
    heads: Heads,
    along: tuple[str, ...],
    mesh: Mapping[str, int],
    hardware: Slice,
) -> Choice:
    """What one strategy costs with one layout; see `choices`."""
    embedding, factors = place_mesh(hardware, mesh), calibration(hardware.generation.name)
    ring, ulysses = layout.ring, layout.ulysses
    shard = layout.padded / (ring * ulysses)
    exchange = HeadCut(ulysses, heads.key_heads, heads.per_key_head)
    block = max(KERNEL_BLOCK, -(-layout.padded // MOST_BLOCKS))
    a_block = 2 * block**2 * (heads.head_size + heads.value_size) * heads.batch * exchange.slots
    work = blocks(layout, layout, pattern, block) * a_block * factors.attention / hardware.generation.flops

    # positions of some heads for heads of some positions: of queries, outputs, keys and values
    exchanged = heads.bytes(exchange.slots * ulysses + exchange.received, shard) if ulysses > 1 else 0.0
    received = exchanged * (ulysses - 1) / ulysses
    seconds = sum(
        embedding.permute(_shifted(mesh, along, 1, ulysses, step)).seconds(exchanged / ulysses)
        for step in range(1, ulysses)
    )
    keys = heads.bytes(exchange.key_heads_there, shard * ulysses)
    if strategy == "all_gather":
        compute, received, held = work.sum(1).max(), keys * (ring - 1), keys * ring
        seconds += embedding.seconds("all-gather", along, received) + compute if along else compute
    else:
        distances = hops(layout, layout, pattern)
        steps = np.diff(distances)
        by_hop = work[:, list(distances)].max(0)
        transfers = [embedding.permute(_shifted(mesh, along, ulysses, ring, int(step))).seconds(keys) for step in steps]
        compute, received, held = by_hop.sum(), received + keys * len(steps), exchanged + 2 * keys * (ring > 1)
        seconds += sum(max(pair) for pair in zip(by_hop, [*transfers, 0.0], strict=True))
        output = heads.batch * exchange.slots * shard * ulysses * heads.value_size * FLOAT32
        seconds += len(steps) * MEASURED_PASSES * output / hardware.generation.hbm_bandwidth
    return Choice(strategy, layout, float(seconds), float(compute), float(received), float(held))


def _strategies(layout: SequenceLayout) -> tuple[str, ...]:
    """Those that have such a layout."""
    if layout.ulysses == 1:
        return "all_gather", "ring"
    return ("ulysses",) if layout.ring == 1 else ("hybrid",)


def _shifted(
    mesh: Mapping[str, int], along: tuple[str, ...], stride: int, size: int, step: int
) -> tuple[tuple[int, int], ...]:
    """Every place of the mesh with that which is `step` further in groups of `size` along some axes, `stride` apart."""
    numbers = np.arange(prod(mesh.values())).reshape(list(mesh.values()))
    names = list(mesh)
    rest = [name for name in names if name not in along]
    # [others, groups, places of a group, within the stride]
    by_group = numbers.transpose([names.index(name) for name in (*rest, *along)]).reshape(
        prod(mesh[name] for name in rest), -1, size, stride
    )
    return tuple(zip(by_group.reshape(-1).tolist(), np.roll(by_group, -step, 2).reshape(-1).tolist(), strict=True))
