"""Predicted time and memory of every attention strategy and sequence layout. Pure arithmetic.

Work is counted in blocks that the mask leaves, transfers in bytes on the torus. Bytes that a device receives, for
P = U x R devices along the positions, S tokens, Hq query and Hkv key heads, in units of batch x head size
(https://arxiv.org/abs/2309.14509, https://arxiv.org/abs/2310.01889):

| strategy | received |
|---|---|
| all_gather | 2 Hkv (S/P) (P-1) |
| ring | 2 Hkv (S/P) for every hop that the mask needs, at most P-1 |
| ulysses | (2 Hq + 2 Hkv) (S/P) (U-1)/U, where Hkv counts copies of key heads |
| hybrid | that of ulysses, and 2 Hkv (S/P) for every hop, at most R-1 |

A ring computes while it receives. Every hop takes as long as its slowest device; then the device adds the hop's output,
in float32, to that of the hops before. The other strategies wait until everything is received.
"""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from shardplan.cost.attention import FLOAT32_BYTES
from shardplan.cost.calibration import load_calibration
from shardplan.hardware import CollectiveKind, Slice, divisors, place_mesh
from shardplan.plan.attention_plan import Strategy
from shardplan.positions.heads import HeadSharding
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import (
    KERNEL_BLOCK,
    MAX_SEQUENCE_BLOCKS,
    SequenceLayout,
    SequenceOrder,
    count_blocks,
    ring_distances,
)

MERGE_HBM_PASSES = 3
"""Passes over a hop's output, at HBM bandwidth, to add it to the hops before: puts measured runs of MaxText in order.
By the TPU compiler's cycles it is `shardplan.cost.attention.MERGE_PASSES`."""


@dataclass(frozen=True)
class HeadShape:
    """Sizes of the attention of one device, positions aside."""

    batch: int
    key_heads: int
    queries_per_key_head: int
    """Query heads per key head."""
    head_size: int
    value_size: int
    itemsize: int = 2
    """Bytes per element."""

    def key_value_bytes(self, key_heads: float, tokens: float) -> float:
        """Bytes of the keys and values of `tokens` positions and `key_heads` heads."""
        return self.batch * key_heads * tokens * (self.head_size + self.value_size) * self.itemsize


@dataclass(frozen=True)
class StrategyCost:
    """A strategy with a layout, and what one forward pass of attention costs a device."""

    strategy: Strategy
    layout: SequenceLayout
    seconds: float
    compute_seconds: float
    """Compute of the slowest device; in a ring, the sum over hops of the slowest device of each."""
    received_bytes: float
    held_bytes: float
    """Memory for gathered or received keys and values and for what is exchanged, beyond the device's own shards."""


def enumerate_layouts(
    length: int, degree: int, orders: Iterable[SequenceOrder] = SequenceOrder, documents: tuple[int, ...] | None = None
) -> list[SequenceLayout]:
    """Return every layout of a sequence sharded over `degree` devices, for every Ulysses degree.

    Args:
        documents: their lengths, if they are known.
    """
    return [
        SequenceLayout(length, degree // ulysses, ulysses, order, documents)
        for ulysses, order in itertools.product(divisors(degree), orders)
        # all orders are the same for one ring index, and `documents` is zigzag for a single document
        if order == SequenceOrder.CONTIGUOUS or (ulysses < degree and (order != SequenceOrder.DOCUMENTS or documents))
    ]


def rank_strategies(
    layouts: Iterable[SequenceLayout],
    pattern: Pattern,
    heads: HeadShape,
    mesh_axes: tuple[str, ...],
    mesh: Mapping[str, int],
    hardware: Slice,
    available: float = inf,
) -> list[StrategyCost]:
    """Return the cost of every strategy with every layout, fastest first.

    Documents that the layouts do not know are taken for one.

    Args:
        mesh_axes: mesh axes that shard positions, major to minor.
        available: bytes per device; strategies that hold more are left out.
    """
    costs = (
        strategy_cost(strategy, layout, pattern, heads, mesh_axes, mesh, hardware)
        for layout in layouts
        for strategy in _strategies(layout)
    )
    return sorted((cost for cost in costs if cost.held_bytes <= available), key=lambda cost: cost.seconds)


def strategy_cost(
    strategy: Strategy,
    layout: SequenceLayout,
    pattern: Pattern,
    heads: HeadShape,
    mesh_axes: tuple[str, ...],
    mesh: Mapping[str, int],
    hardware: Slice,
) -> StrategyCost:
    """Return the cost of one strategy with one layout; arguments as for `rank_strategies`."""
    placement, generation = place_mesh(hardware, mesh), hardware.generation
    ring, ulysses = layout.ring, layout.ulysses
    shard = layout.padded_length / (ring * ulysses)
    split = HeadSharding(ulysses, heads.key_heads, heads.queries_per_key_head)
    query_heads = split.query_heads_per_device
    block = max(KERNEL_BLOCK, -(-layout.padded_length // MAX_SEQUENCE_BLOCKS))
    block_flops = 2 * block**2 * (heads.head_size + heads.value_size) * heads.batch * query_heads
    flops = count_blocks(layout, layout, pattern, block) * block_flops
    seconds_by_hop = flops * load_calibration(generation.name).attention / generation.flops  # [ring, distance]

    # queries and outputs, which together have head_size + value_size per query head, and keys and values
    exchanged_heads = query_heads * ulysses + split.total_key_heads_received
    exchanged = heads.key_value_bytes(exchanged_heads, shard) if ulysses > 1 else 0.0
    received = exchanged * (ulysses - 1) / ulysses
    seconds = sum(
        placement.permute_cost(_shift_pairs(mesh, mesh_axes, 1, ulysses, step)).seconds(exchanged / ulysses)
        for step in range(1, ulysses)
    )
    keys = heads.key_value_bytes(split.key_heads_after_duplication, shard * ulysses)
    if strategy == Strategy.ALL_GATHER:
        compute, received, held = seconds_by_hop.sum(1).max(), keys * (ring - 1), keys * ring
        gather = placement.seconds(CollectiveKind.ALL_GATHER, mesh_axes, received) if mesh_axes else 0.0
        seconds += gather + compute
    else:
        distances = ring_distances(layout, layout, pattern)
        steps = np.diff(distances)
        slowest = seconds_by_hop[:, list(distances)].max(0)
        transfers = [
            placement.permute_cost(_shift_pairs(mesh, mesh_axes, ulysses, ring, int(step))).seconds(keys)
            for step in steps
        ]
        compute, received, held = slowest.sum(), received + keys * len(steps), exchanged + 2 * keys * (ring > 1)
        seconds += sum(max(pair) for pair in zip(slowest, [*transfers, 0.0], strict=True))
        output = heads.batch * query_heads * shard * ulysses * heads.value_size * FLOAT32_BYTES
        seconds += len(steps) * MERGE_HBM_PASSES * output / generation.hbm_bandwidth
    return StrategyCost(strategy, layout, float(seconds), float(compute), float(received), float(held))


def _strategies(layout: SequenceLayout) -> tuple[Strategy, ...]:
    """The strategies that a layout is for."""
    if layout.ulysses == 1:
        return Strategy.ALL_GATHER, Strategy.RING
    return (Strategy.ULYSSES,) if layout.ring == 1 else (Strategy.HYBRID,)


def _shift_pairs(
    mesh: Mapping[str, int], mesh_axes: tuple[str, ...], stride: int, size: int, step: int
) -> tuple[tuple[int, int], ...]:
    """Pairs (source, target) of device indices that shift data by `step` in groups of `size` devices along mesh axes.

    Args:
        stride: devices along the mesh axes between neighbours of a group.
    """
    devices = np.arange(prod(mesh.values())).reshape(list(mesh.values()))
    names = list(mesh)
    others = [name for name in names if name not in mesh_axes]
    # [other mesh axes, groups, members of a group, within the stride]
    by_group = devices.transpose([names.index(name) for name in (*others, *mesh_axes)]).reshape(
        prod(mesh[name] for name in others), -1, size, stride
    )
    return tuple(zip(by_group.reshape(-1).tolist(), np.roll(by_group, -step, 2).reshape(-1).tolist(), strict=True))
