"""The choice of strategy for `strategy="auto"`."""

import math

import jax

from shardplan.attention.axes import AttentionSharding
from shardplan.attention.masking import MaskSpec
from shardplan.attention.strategy_cost import (
    HeadShape,
    ShardedAttention,
    enumerate_layouts,
    rank_strategies,
    strategies_of,
)
from shardplan.errors import ConfigError
from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.plan.attention_plan import Strategy
from shardplan.positions.sequence_layout import SequenceLayout
from shardplan.positions.sequence_order import SequenceOrder
from shardplan.runtime.devices import slice_from

AUTO = "auto"


def choose_strategy(
    sharding: AttentionSharding,
    mask: MaskSpec,
    layout: SequenceOrder | SequenceLayout,
    itemsize: int,
    hardware: str | None,
) -> tuple[Strategy, int]:
    """Return the fastest strategy that fits in memory, and its Ulysses degree.

    Args:
        mask: the mask; only the part that is known while tracing counts.
        layout: the order or the layout that positions have already.
        itemsize: bytes per element of query, key and value.
        hardware: name of the slice; default: the slice of JAX's devices.

    Raises:
        ConfigError: the slice has another number of devices than the mesh, the layout is for another number of devices
            than positions are sharded over, or no strategy fits in memory.
    """
    if not sharding.position_mesh_axes:
        return Strategy.NONE, 1
    axes, mesh = sharding.axes, sharding.mesh
    slice_ = _slice_of_mesh(math.prod(mesh.values()), hardware)
    heads = HeadShape(
        batch=sharding.local_size(axes.batch),
        key_heads=sharding.local_size(axes.key_heads),
        queries_per_key_head=sharding.local_size(axes.query_groups),
        head_size=axes.head_size.size,
        value_size=math.prod(axis.size for axis in axes.value_size),
        itemsize=itemsize,
    )
    layouts = _candidate_layouts(layout, axes.queries.size, sharding.degree, mask.documents)
    if not layouts or 0 in (heads.batch, heads.key_heads, heads.queries_per_key_head):
        return Strategy.RING, 1  # a size does not divide, for which `dot_product_attention` raises
    if len(layouts) == len(strategies_of(layouts[0])) == 1:
        return strategies_of(layouts[0])[0], layouts[0].ulysses  # nothing is left to choose
    memory_gib = slice_.generation.hbm_gib
    attention = ShardedAttention(mask.pattern, heads, sharding.position_mesh_axes, mesh, slice_)
    ranked = rank_strategies(layouts, attention, available=memory_gib * GIB)
    if not ranked:
        raise ConfigError(
            f"attention strategy auto: keys and values alone take more than the {memory_gib} GiB of a device; shard "
            f"{axes.queries.name} over more devices"
        )
    return ranked[0].strategy, ranked[0].layout.ulysses


def _slice_of_mesh(count: int, hardware: str | None) -> Slice:
    """Return the slice for which the strategy is chosen; it must have as many devices as the mesh."""
    if hardware is None:
        devices = jax.devices()
        # virtual CPU devices are all alike, so that a mesh may have some of them
        slice_ = slice_from(devices[:count] if devices[0].platform == "cpu" else devices)
    else:
        slice_ = parse_slice(hardware)
    if slice_.devices != count:
        raise ConfigError(
            f"attention strategy auto: hardware {slice_.name} has {slice_.devices} devices, the mesh {count}; "
            "name the slice of the mesh, as in hardware='v5p-128'"
        )
    return slice_


def _candidate_layouts(
    layout: SequenceOrder | SequenceLayout, length: int, degree: int, documents: tuple[int, ...] | None
) -> list[SequenceLayout]:
    """Return the candidate layouts: the given layout, or every layout of the given order that needs no padding."""
    if isinstance(layout, SequenceLayout):
        if layout.ring * layout.ulysses != degree:
            raise ConfigError(
                f"attention: the layout is for ring {layout.ring} x ulysses {layout.ulysses}, but {degree} devices "
                "shard positions"
            )
        return [layout]
    layouts = enumerate_layouts(length, degree, (layout,), documents)
    return [each for each in layouts if layout == SequenceOrder.CONTIGUOUS or each.padded_length == length]
