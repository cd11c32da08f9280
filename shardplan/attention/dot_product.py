"""`dot_product_attention` on named arrays whose positions are sharded."""

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import AxisSelection, AxisSelector, NamedArray
from haliax.partitioning import ResourceMapping, current_thread_local_mapping
from levanter.layers.attention import AttentionBackend, AttentionMask

from shardplan.attention.auto_strategy import AUTO, choose_strategy
from shardplan.attention.axes import (
    AttentionSharding,
    AxisSelectors,
    pad_axes,
    resolve_attention_sharding,
    resolve_axis_roles,
)
from shardplan.attention.kernels.blockwise import BlockwiseKernel
from shardplan.attention.kernels.interface import AttentionKernel, KernelConfig
from shardplan.attention.kernels.splash import SplashKernel
from shardplan.attention.kernels.splash_blocks import HopPositions
from shardplan.attention.levanter_arguments import LevanterArguments
from shardplan.attention.masking import MaskSpec, make_mask_spec
from shardplan.attention.reverse_mode import refuse_forward_mode
from shardplan.attention.strategies.device_attention import DeviceAttention
from shardplan.attention.strategies.ring import Ring
from shardplan.errors import ConfigError, nearest
from shardplan.plan.attention_plan import KernelName, Strategy
from shardplan.positions.pattern import Pattern
from shardplan.positions.sequence_layout import SequenceLayout, ring_distances
from shardplan.positions.sequence_order import SequenceOrder

STRATEGIES = (*Strategy, AUTO)
DEFAULT_BLOCK = 512
"""Side of a block of scores of the blockwise kernel, in positions."""


def dot_product_attention(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: AttentionMask | NamedArray | None = None,
    bias: None = None,
    attention_dtype: Any = None,
    precision: Any = None,
    use_flash: bool | None = None,
    attn_backend: AttentionBackend | None = None,
    flash_block_size: int | None = None,
    dropout: float = 0.0,
    *,
    heads: AxisSelection | None = None,
    strategy: str = AUTO,
    ulysses: int | None = None,
    layout: str | SequenceLayout = SequenceOrder.CONTIGUOUS,
    prefix: int = 0,
    documents: Sequence[int] | None = None,
    axis_mapping: ResourceMapping | None = None,
    scaling_factor: float | None = None,
    logits_soft_cap: float | None = None,
    inference: bool = True,
    prng: Any = None,
    attn_sink: NamedArray | None = None,
    kernel: str = KernelName.BLOCKWISE,
    block: int | None = None,
    hardware: str | None = None,
) -> NamedArray:
    """Sequence-parallel version of Levanter's function of this name: attention with QPos sharded over mesh axes.

    It takes all arguments of Levanter's function, in their order, and refuses biases, dropout, and the choice of one of
    Levanter's implementations.

    >>> Pos, KPos, Head, Size = hax.make_axes(position=3, key_position=3, kv_head=1, head_size=1)
    >>> query, key = hax.zeros((Head, Pos, Size)), hax.zeros((Head, KPos, Size))
    >>> value = hax.named(jnp.array([[[1.0], [3.0], [8.0]]]), (Head, KPos, Size))
    >>> dot_product_attention(Pos, KPos, Size, query, key, value, AttentionMask.causal()).array.ravel().tolist()
    [1.0, 2.0, 4.0]

    Args:
        QPos: axis of the queries' positions. The mesh axes that `axis_mapping` gives it shard queries and keys.
        KPos: axis of the keys' positions, of another name.
        Key: axis of head sizes, in queries and keys.
        query: {..., heads, QPos, Key}; axes that key does not have are query heads of one key head.
        key: {..., key heads, KPos, Key}; all other axes are batch axes.
        value: {..., key heads, KPos, ...}; an axis that key does not have is its head size, which may differ from Key.
        mask: which keys a query may attend to; default: all. A causal offset may be an integer, traced or not, or a
            named array of integers. Hops and blocks that it makes empty are skipped if it is known while tracing: one
            number, and not an argument of jit. `shardplan.attention.with_chunks` adds chunks.
        bias: must be None.
        attention_dtype: dtype that query, key and value are cast to; sums are in float32 in any case.
        precision: precision of matmuls; the blockwise kernel ignores it and uses the highest.
        use_flash: must not be False.
        attn_backend: must be None or DEFAULT; see `kernel`.
        flash_block_size: Levanter's name of `block`.
        dropout: must be 0, except in inference.
        heads: axes of key heads; default: the last one of keys that queries have too, but Key. () for none.
        strategy: all_gather (of keys and values), ring, ulysses, hybrid (a ring of groups of `ulysses` neighbours),
            none (positions are not sharded: every device attends for its part of the batch and of the heads), or auto:
            the fastest strategy that fits in a device's memory, by `shardplan.attention.strategy_cost` for the mask,
            the layout and the hardware. With Ulysses, if a device has fewer query heads than the group has devices,
            heads are padded.
        ulysses: devices of a group, for hybrid; default: the greatest common divisor of a device's query heads and the
            devices along QPos. `auto` chooses it.
        layout: the order that positions, segment ids and explicit masks are in already; see
            `shardplan.positions.sequence_layout`. Causal offsets, windows and prefixes count positions of the sequence.
            With a kind that is not contiguous the length must be a multiple of the parts. A `SequenceLayout` describes
            queries and keys as `shard_sequence` returns them, padding included.
        prefix: with a causal mask, number of first positions that all queries may attend to (a prefix LM); the same for
            all sequences.
        documents: lengths of the documents of every sequence, if they are known while tracing: positions attend within
            their document, and keys that this makes unnecessary are not sent. A `SequenceLayout` has its own documents.
        axis_mapping: logical axis -> mesh axes; default: the current `hax.axis_mapping`.
        scaling_factor: factor of the scores, known while tracing; default: 1 / sqrt(Key.size).
        logits_soft_cap: scores become soft_cap * tanh(scores / soft_cap).
        inference, prng: only dropout needs them.
        attn_sink: {heads}: a score per head that takes weight and contributes no value.
        kernel: implementation of attention on a device: blockwise (XLA), or splash (Pallas, TPUs only; head sizes from
            64 to 256, a multiple of 128 positions per ring index, no explicit masks and no traced offsets).
        block: side of a block of scores in positions, for the blockwise kernel; default: 512.
        hardware: name of the slice, such as v5p-128, that `auto` chooses for; default: the slice of JAX's devices.

    Returns:
        The axes of query but Key, in their order, then value's head size; zero for a query that may attend to nothing.
        It has reverse-mode derivatives.

    Raises:
        ConfigError: an argument that is not supported; an unknown strategy, layout or kernel; a degree or size that
            does not divide; a mesh with Explicit axes; a mask that is traced where it must be known, is not bool, or
            has axes that queries and keys do not have; no heads to exchange; a mask or length that the splash kernel
            does not support; or, for `auto`, unknown hardware, or too little memory.
    """
    del prng
    arguments = LevanterArguments(bias, precision, use_flash, attn_backend, flash_block_size, dropout, inference)
    arguments.check(kernel)
    block = arguments.block_side(block, DEFAULT_BLOCK)
    _check_options(strategy, layout, kernel, scaling_factor, logits_soft_cap)
    layout = layout if isinstance(layout, SequenceLayout) else SequenceOrder(layout)
    axes = resolve_axis_roles(AxisSelectors(QPos, KPos, Key, heads), query, key, value)
    mapping = (current_thread_local_mapping() or {}) if axis_mapping is None else axis_mapping
    sharding = resolve_attention_sharding(axes, mapping)
    _check_strategy(strategy, sharding)
    spec = make_mask_spec(mask, prefix, documents)
    if strategy == AUTO:
        strategy, ulysses = choose_strategy(sharding, spec, layout, query.dtype.itemsize, hardware)
    strategy = Strategy(strategy)
    ulysses = _ulysses_degree(strategy, ulysses, sharding)
    layouts = _sequence_layouts(layout, sharding, ulysses, spec.documents)
    masks = {**spec.arrays(axes, layouts), **({} if attn_sink is None else {"sink": attn_sink})}
    sharding.check(masks)

    inputs = {"q": query.rearrange(axes.query), "k": key.rearrange(axes.key), "v": value.rearrange(axes.value)}
    if attention_dtype is not None:
        inputs = {name: x.astype(attention_dtype) for name, x in inputs.items()}
    inputs = {name: hax.named(refuse_forward_mode(x.array), x.axes) for name, x in inputs.items()}
    lengths = {axes.queries.name: layouts[0].padded_length, axes.keys.name: layouts[1].padded_length}
    inputs = {name: pad_axes(x, lengths) for name, x in (inputs | masks).items()}

    scale = axes.head_size.size**-0.5 if scaling_factor is None else float(scaling_factor)
    soft_cap = None if logits_soft_cap is None else float(logits_soft_cap)
    ring = _make_ring(strategy, sharding, layouts, spec.pattern, save_lse=attn_sink is not None)
    config = KernelConfig(spec.kernel_pattern(layouts[0]), scale, soft_cap, block)
    positions = HopPositions(layouts[0].positions_by_ring_index(), ring.keys, ring.distances)
    attention = DeviceAttention(
        kernel=_make_kernel(KernelName(kernel), config, positions, spec),
        axes=axes,
        position_mesh_axes=sharding.position_mesh_axes,
        gathers_keys=strategy == Strategy.ALL_GATHER,
        ring=ring,
        query_layout=layouts[0],
    )
    out = _run_on_mesh(attention, sharding, inputs).astype(jnp.result_type(query.array, value.array))
    padded = hax.named(out, [axis.resize(lengths.get(axis.name, axis.size)) for axis in axes.output])
    return padded[axes.queries.name, : axes.queries.size].rearrange(axes.result)


def _check_options(
    strategy: str,
    layout: str | SequenceLayout,
    kernel: str,
    scaling_factor: float | None,
    logits_soft_cap: float | None,
) -> None:
    """Check the options that are independent of the arrays.

    Raises:
        ConfigError: an unknown name, or a traced number.
    """
    kind = layout.kind if isinstance(layout, SequenceLayout) else layout
    options = {
        "strategy": (strategy, STRATEGIES),
        "layout": (kind, tuple(SequenceOrder)),
        "kernel": (kernel, tuple(KernelName)),
    }
    for name, (given, valid) in options.items():
        if given not in valid:
            raise ConfigError(f"attention {name} is {given!r}; {nearest(given, valid)}")
    for name, number in (("scaling_factor", scaling_factor), ("logits_soft_cap", logits_soft_cap)):
        if isinstance(number, jax.core.Tracer):
            raise ConfigError(
                f"attention: {name} is traced, but must be known while tracing; multiply queries by learned factors"
            )


def _check_strategy(strategy: str, sharding: AttentionSharding) -> None:
    """Check that a strategy can run with this sharding of the axes.

    Raises:
        ConfigError: there are no heads to exchange, or positions are sharded although the strategy is none.
    """
    axes = sharding.axes
    if strategy in (Strategy.ULYSSES, Strategy.HYBRID) and not (axes.key_heads or axes.query_groups):
        raise ConfigError(
            f"attention: {strategy} exchanges heads, but queries and keys share none; use all_gather or ring"
        )
    if strategy == Strategy.NONE and sharding.degree > 1:
        sharding_strategies = [each for each in STRATEGIES if each != Strategy.NONE]
        raise ConfigError(
            f"attention: strategy none, but {sharding.degree} devices shard {axes.queries.name}; "
            f"use {', '.join(sharding_strategies[:-1])} or {sharding_strategies[-1]}"
        )


def _ulysses_degree(strategy: Strategy, requested: int | None, sharding: AttentionSharding) -> int:
    """Return the number of devices that exchange heads for positions; 1 without Ulysses.

    Raises:
        ConfigError: the degree does not divide the devices along positions, or is requested for another strategy.
    """
    axes, degree = sharding.axes, sharding.degree
    query_heads = sharding.local_size((*axes.key_heads, *axes.query_groups))
    # by default a hybrid exchanges as many heads as divide evenly: others would be padded with heads that waste compute
    ulysses = {
        Strategy.NONE: 1,
        Strategy.ALL_GATHER: 1,
        Strategy.RING: 1,
        Strategy.ULYSSES: degree,
        Strategy.HYBRID: math.gcd(query_heads, degree) if requested is None else requested,
    }[strategy]
    if ulysses < 1 or degree % ulysses:
        raise ConfigError(
            f"attention: ulysses {ulysses} does not divide the {degree} devices along {axes.queries.name}"
        )
    if requested not in (None, ulysses):
        raise ConfigError(
            f"attention: ulysses {requested} is for the strategy hybrid; the strategy {strategy} has ulysses {ulysses}"
        )
    return ulysses


def _sequence_layouts(
    layout: SequenceOrder | SequenceLayout,
    sharding: AttentionSharding,
    ulysses: int,
    documents: tuple[int, ...] | None,
) -> tuple[SequenceLayout, SequenceLayout]:
    """Return the layouts of queries and of keys.

    Raises:
        ConfigError: a layout has other lengths or degrees, documents are given twice, or the length is not divisible.
    """
    queries, keys, ring = sharding.axes.queries, sharding.axes.keys, sharding.degree // ulysses
    if isinstance(layout, SequenceLayout):
        if (layout.ring, layout.ulysses) != (ring, ulysses) or {queries.size, keys.size} != {layout.padded_length}:
            unmapped = "" if ring * ulysses > 1 else f": no mesh axis of several devices shards {queries.name}"
            raise ConfigError(
                f"attention: the layout is for {layout.padded_length} positions over ring {layout.ring} x ulysses "
                f"{layout.ulysses}, but there are {queries.size} and {keys.size} positions over ring {ring} x "
                f"ulysses {ulysses}{unmapped}"
            )
        if documents is not None:
            raise ConfigError("attention: a SequenceLayout has its own documents; leave out the argument documents")
        return layout, layout
    layouts = (
        SequenceLayout(queries.size, ring, ulysses, layout, documents),
        SequenceLayout(keys.size, ring, ulysses, layout, documents),
    )
    if layout != SequenceOrder.CONTIGUOUS and any(each.padded_length != each.length for each in layouts):
        parts = SequenceLayout(1, ring, ulysses, layout).padded_length
        raise ConfigError(f"attention layout {layout}: {queries.name} and {keys.name} must be multiples of {parts}")
    return layouts


def _make_ring(
    strategy: Strategy,
    sharding: AttentionSharding,
    layouts: tuple[SequenceLayout, SequenceLayout],
    pattern: Pattern,
    save_lse: bool,
) -> Ring:
    """Make the ring of a strategy; all-gather has a ring of one index, along which nothing travels."""
    mesh_axes, (queries, keys) = sharding.position_mesh_axes, layouts
    # a device has all keys after the all-gather, so that nothing travels along the ring
    if strategy == Strategy.ALL_GATHER:
        return Ring(mesh_axes, 1, keys.positions()[None], save_lse=save_lse)
    distances = ring_distances(queries, keys, pattern)
    return Ring(mesh_axes, queries.ulysses, keys.positions_by_ring_index(), distances, save_lse)


def _make_kernel(name: KernelName, config: KernelConfig, positions: HopPositions, mask: MaskSpec) -> AttentionKernel:
    """Make the kernel that computes attention on one device.

    Raises:
        ConfigError: a mask or length that the splash kernel does not support.
    """
    match name:
        case KernelName.BLOCKWISE:
            return BlockwiseKernel(config)
        case KernelName.SPLASH:
            _check_splash_mask(mask)
            return SplashKernel(config, positions)
        case _:
            assert_never(name)


def _check_splash_mask(mask: MaskSpec) -> None:
    """Check that the splash kernel supports a mask: no explicit mask, and a causal offset known while tracing.

    Raises:
        ConfigError: the mask has a part that the kernel does not support.
    """
    # the kernel skips blocks by a grid that is computed while tracing, which arrays cannot decide
    unsupported = {
        "explicit masks": mask.explicit,
        "causal offsets that are traced, or not one number": mask.causal_offset,
    }
    for description, array in unsupported.items():
        if array is not None:
            raise ConfigError(f"attention kernel splash does not support {description}; use the kernel blockwise")


def _run_on_mesh(
    attention: DeviceAttention, sharding: AttentionSharding, inputs: Mapping[str, NamedArray]
) -> jax.Array:
    """Run the attention on all devices of the mesh, or on the only device if no mesh is set."""
    axes = sharding.axes
    input_axes = {name: x.axes for name, x in inputs.items()}
    run = partial(attention.run, input_axes=input_axes)
    if sharding.mesh:
        sizes = (axes.head_size, *axes.value_size)
        in_specs = {
            name: sharding.spec(each, unsharded=(*sizes, axes.keys) if name == "explicit" else sizes)
            for name, each in input_axes.items()
        }
        run = jax.shard_map(
            run, mesh=jax.sharding.get_abstract_mesh(), in_specs=(in_specs,),
            out_specs=sharding.spec(axes.output, unsharded=sizes), check_vma=False,
        )  # fmt: skip
    return run({name: x.array for name, x in inputs.items()})
