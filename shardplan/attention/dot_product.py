"""`dot_product_attention` on named arrays whose positions are cut over devices."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelector, NamedArray
from haliax.partitioning import ResourceMapping, current_thread_local_mapping
from jax.sharding import AxisType, PartitionSpec
from levanter.layers.attention import AttentionMask

from shardplan.attention.axes import HEADS, Dims, check_axes, dims_of, mesh_axes, padded
from shardplan.attention.choice import Heads, choices, layouts
from shardplan.attention.kernels.blockwise import Blockwise
from shardplan.attention.kernels.kernel import Kernel, Rule
from shardplan.attention.kernels.splash import Splash
from shardplan.attention.masking import mask_arrays, pattern_of
from shardplan.attention.strategies.local_attention import Task
from shardplan.attention.strategies.ring import Ring
from shardplan.errors import ConfigError, nearest
from shardplan.hardware import GIB, parse_slice
from shardplan.plan.plan import BLOCKWISE, KERNELS
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import KINDS, SequenceLayout, hops
from shardplan.runtime.devices import slice_from

STRATEGIES = ("all_gather", "ring", "ulysses", "hybrid", "auto")
BLOCK = 512
"""Positions of a block of scores."""


def dot_product_attention(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: AttentionMask | NamedArray | None = None,
    *,
    strategy: str = "auto",
    ulysses: int | None = None,
    layout: str | SequenceLayout = "contiguous",
    prefix: int = 0,
    documents: Sequence[int] | None = None,
    axis_mapping: ResourceMapping | None = None,
    attention_dtype: Any = None,
    scaling_factor: float | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: NamedArray | None = None,
    kernel: str = BLOCKWISE,
    block: int = BLOCK,
    hardware: str | None = None,
) -> NamedArray:
    """Attention, as Levanter's of that name, with QPos cut over the mesh axes that it is mapped to; without dropout
    and biases.

    Args:
        QPos: axis of the queries' positions; `axis_mapping` says which mesh axes cut it, and the keys with it.
        KPos: axis of the keys' positions, of another name.
        Key: axis of head sizes, that queries and keys have.
        query: {..., heads, QPos, Key}; axes that key lacks are query heads of one key head.
        key: {..., key heads, KPos, Key}; key heads are kv_head, kv_heads, heads or head, other axes are of the batch.
        value: {..., key heads, KPos, ...}; what key lacks is its head size, which may be another than Key.
        mask: which keys a query may attend to; default: all. Hops and blocks that a causal offset makes empty are left
            out where it is known while tracing: one number, and no argument of jit.
        strategy: all_gather (of keys and values), ring, ulysses, hybrid (groups of `ulysses` neighbours in a ring), or
            auto: what `shardplan.attention.choice` finds fastest for the mask, the layout and the hardware, of what the
            memory of a device can hold. Ulysses wants at least as many query heads of a device as it has devices: what
            lacks is filled up with heads that are nobody's.
        ulysses: devices of a group, of the hybrid; default: the greatest common divisor of a device's query heads and
            the devices along QPos. `auto` chooses it.
        layout: the order that positions are in already, of segment ids and explicit masks too; see
            `shardplan.positions.sequence_layout`. Causal offsets, windows and prefixes count positions of the sequence.
            Of a kind that is not contiguous the length must be a multiple of the parts. A `SequenceLayout` is of
            queries and keys as `shard_sequence` leaves them, padding included.
        prefix: with a causal mask, positions that all may attend to (a prefix LM); one number for all sequences.
        documents: lengths of the documents of every sequence, where they are known while tracing: they attend within
            themselves, and what they make empty is not sent. A `SequenceLayout` has its own.
        axis_mapping: logical axis -> mesh axes; default: the current `hax.axis_mapping`.
        attention_dtype: type that query, key and value are cast to; sums are in float32 in any case.
        scaling_factor: of scores, known while tracing; default: 1 / sqrt(Key.size).
        logits_soft_cap: scores are soft_cap * tanh(scores / soft_cap).
        attn_sink: by heads, a score that takes weight and gives no value.
        kernel: what a device does its part with: blockwise (XLA), or splash (Pallas, on TPUs), for head sizes from 64
            to 256 and a multiple of 128 positions for each ring index, without explicit masks and traced offsets.
        block: positions of a block of scores, blockwise.
        hardware: name of the slice, as v5p-128, that `auto` chooses for; default: that of JAX's devices.

    Returns:
        {..., heads, QPos, value's head size}; zero for a query that may attend to nothing.

    Raises:
        ConfigError: an unknown strategy, layout or kernel, a degree or size that does not divide, a mesh whose axes are
            Explicit, masks that are traced where they must be known, are not bool, or have axes that queries and keys
            lack, no heads to exchange, a mask or length that the splash kernel cannot do, or, for `auto`, hardware
            that is not known, or has too little memory.
    """
    kind = layout.kind if isinstance(layout, SequenceLayout) else layout
    given_of = {"strategy": (strategy, STRATEGIES), "layout": (kind, KINDS), "kernel": (kernel, KERNELS)}
    for name, (given, valid) in given_of.items():
        if given not in valid:
            raise ConfigError(f"attention {name} is {given!r}; {nearest(given, valid)}")
    if block < 1:
        raise ConfigError(f"attention: block is {block}; it must be at least 1")
    for name, number in (("scaling_factor", scaling_factor), ("logits_soft_cap", logits_soft_cap)):
        if isinstance(number, jax.core.Tracer):
            raise ConfigError(f"attention: {name} is traced, and must be known; scale queries by what is learned")
    dims = dims_of(QPos, KPos, Key, query, key, value)
    if strategy in ("ulysses", "hybrid") and not (dims.key_heads or dims.groups):
        raise ConfigError(f"attention: {strategy} exchanges heads, and no axis is one of heads: {', '.join(HEADS)}")
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise ConfigError("attention: the mesh has axes of type Explicit, Haliax needs AxisType.Auto, as it makes them")
    mapping = (current_thread_local_mapping() or {}) if axis_mapping is None else axis_mapping
    if mesh.empty and mapping.get(dims.queries.name):
        raise ConfigError(f"attention: {dims.queries.name} is mapped, but no mesh is set; use jax.set_mesh")
    cuts = {} if mesh.empty else {axis.name: mesh_axes(axis, mapping, mesh.shape) for axis in dims.all}
    along = cuts[dims.keys.name] = cuts.get(dims.queries.name, ())
    degree = math.prod(mesh.shape[axis] for axis in along)
    if isinstance(mask, NamedArray):
        mask = AttentionMask.explicit(mask)
    mask = mask or AttentionMask()
    pattern = pattern_of(mask, prefix)
    local = {
        axis.name: axis.size // math.prod(mesh.shape[each] for each in cuts.get(axis.name, ())) for axis in dims.all
    }
    if strategy == "auto":
        strategy, ulysses = _fastest(
            dims, local, pattern, layout, documents, along, mesh.shape, query.dtype.itemsize, hardware
        )
    wanted = ulysses
    if ulysses is None:
        ulysses = math.gcd(math.prod(local[axis.name] for axis in (*dims.key_heads, *dims.groups)), degree)
    u = {"ulysses": degree, "hybrid": ulysses}.get(strategy, 1)
    if u < 1 or degree % u:
        raise ConfigError(f"attention: ulysses {u} does not divide the {degree} devices along {dims.queries.name}")
    if wanted not in (None, u):
        raise ConfigError(f"attention: ulysses {wanted} is for the strategy hybrid; {strategy} has {u}")
    orders = _orders(layout, dims, degree // u, u, documents)
    masks = dict(mask_arrays(mask, prefix, dims, orders)) | ({} if attn_sink is None else {"sink": attn_sink})
    check_axes(dims, cuts, mesh.shape, masks)

    inputs = {"q": query.rearrange(dims.of_query), "k": key.rearrange(dims.of_key), "v": value.rearrange(dims.of_value)}
    if attention_dtype is not None:
        inputs = {name: x.astype(attention_dtype) for name, x in inputs.items()}
    lengths = {dims.queries.name: orders[0].padded, dims.keys.name: orders[1].padded}
    inputs = {name: padded(x, lengths) for name, x in (inputs | masks).items()}
    axes = {name: x.axes for name, x in inputs.items()}

    gathers = strategy == "all_gather"
    k_regions = orders[1].order()[None] if gathers else orders[1].regions()
    ring = Ring(along, u, k_regions, (0,) if gathers else hops(*orders, pattern), attn_sink is not None)
    scale = dims.size.size**-0.5 if scaling_factor is None else float(scaling_factor)
    rule = Rule(pattern, scale, None if logits_soft_cap is None else float(logits_soft_cap), block)
    task = Task(_kernel(kernel, rule, orders[0].regions(), ring, masks), dims, along, gathers, ring, orders[0])

    def spec(axes: Sequence[Axis], whole: Sequence[Axis]) -> PartitionSpec:
        kept = {axis.name for axis in whole}
        return PartitionSpec(*(None if axis.name in kept else cuts.get(axis.name) or None for axis in axes))

    sizes = (dims.size, *dims.values)
    run = partial(task.run, axes=axes)
    if not mesh.empty:
        in_specs = {name: spec(of, (*sizes, dims.keys) if name == "explicit" else sizes) for name, of in axes.items()}
        out_spec = spec(dims.of_output, sizes)
        run = jax.shard_map(run, mesh=mesh, in_specs=(in_specs,), out_specs=out_spec, check_vma=False)
    out = run({name: x.array for name, x in inputs.items()}).astype(jnp.result_type(query.array, value.array))
    found = hax.named(out, [axis.resize(lengths.get(axis.name, axis.size)) for axis in dims.of_output])
    return found[dims.queries.name, : dims.queries.size]


def _kernel(name: str, rule: Rule, queries: np.ndarray, ring: Ring, masks: Mapping[str, NamedArray]) -> Kernel:
    """What a device does its part with.

    Args:
        queries: int[place, S], their positions.
    """
    if name == BLOCKWISE:
        return Blockwise(rule)
    for part, what in (("explicit", "explicit masks"), ("reach", "causal offsets that are traced, or not one number")):
        if part in masks:
            raise ConfigError(f"attention kernel splash has no {what}; use the kernel blockwise")
    return Splash(rule, queries, ring.keys, ring.distances)


def _orders(
    layout: str | SequenceLayout, dims: Dims, ring: int, ulysses: int, documents: Sequence[int] | None
) -> tuple[SequenceLayout, SequenceLayout]:
    """The layouts of queries and keys."""
    axes = dims.queries, dims.keys
    if isinstance(layout, SequenceLayout):
        if (layout.ring, layout.ulysses) != (ring, ulysses) or {axis.size for axis in axes} != {layout.padded}:
            unmapped = "" if ring * ulysses > 1 else f": no mesh axis of several devices is that of {axes[0].name}"
            raise ConfigError(
                f"attention: the layout is for {layout.padded} positions over ring {layout.ring} x ulysses "
                f"{layout.ulysses}, here are {' and '.join(str(axis.size) for axis in axes)} over {ring} x {ulysses}"
                f"{unmapped}"
            )
        if documents is not None:
            raise ConfigError("attention: a SequenceLayout has documents of its own; leave the others out")
        return layout, layout
    known = None if documents is None else tuple(documents)
    queries, keys = (SequenceLayout(axis.size, ring, ulysses, layout, known) for axis in axes)
    if layout != "contiguous" and (queries.padded, keys.padded) != (queries.length, keys.length):
        least = SequenceLayout(1, ring, ulysses, layout).padded
        raise ConfigError(f"attention layout {layout}: {axes[0].name} and {axes[1].name} must be multiples of {least}")
    return queries, keys


def _fastest(
    dims: Dims,
    local: Mapping[str, int],
    pattern: Pattern,
    layout: str | SequenceLayout,
    documents: Sequence[int] | None,
    along: tuple[str, ...],
    mesh: Mapping[str, int],
    itemsize: int,
    hardware: str | None,
) -> tuple[str, int]:
    """The strategy for `auto`, and its Ulysses degree.

    Args:
        local: sizes of the axes on one device.
    """
    if not along:
        return "ring", 1
    heads = Heads(
        math.prod(local[axis.name] for axis in dims.batch),
        math.prod(local[axis.name] for axis in dims.key_heads),
        math.prod(local[axis.name] for axis in dims.groups),
        dims.size.size,
        math.prod(axis.size for axis in dims.values),
        itemsize,
    )
    degree = math.prod(mesh[axis] for axis in along)
    count, devices = math.prod(mesh.values()), jax.devices()
    if devices[0].platform == "cpu":
        devices = devices[:count]  # any of them are alike
    chosen_for = slice_from(devices) if hardware is None else parse_slice(hardware)
    if chosen_for.devices != count:
        raise ConfigError(
            f"attention strategy auto: hardware {chosen_for.name} has {chosen_for.devices} devices, the mesh {count}; "
            "name the slice of these, as in hardware='v5p-128'"
        )
    if isinstance(layout, SequenceLayout):
        if layout.ring * layout.ulysses != degree:
            raise ConfigError(
                f"attention: the layout is for ring {layout.ring} x ulysses {layout.ulysses}, here are {degree} devices"
            )
        orders = [layout]
    else:
        length = dims.queries.size
        known = None if documents is None else tuple(documents)
        orders = layouts(length, degree, (layout,), known)
        orders = [each for each in orders if layout == "contiguous" or each.padded == length]
    if not orders:
        return "ring", 1  # which says what is wrong with the length
    memory = chosen_for.generation.hbm_gib
    found = choices(orders, pattern, heads, along, mesh, chosen_for, memory * GIB)
    if not found:
        raise ConfigError(
            f"attention strategy auto: keys and values alone take more than the {memory} GiB of a device; put "
            f"{dims.queries.name} on more devices"
        )
    return found[0].strategy, found[0].layout.ulysses
