"""`dot_product_attention` on named arrays whose positions are cut over devices."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import haliax as hax
import jax
import jax.numpy as jnp
import numpy as np
from haliax import Axis, AxisSelector, NamedArray
from haliax.partitioning import ResourceMapping, current_thread_local_mapping
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec
from levanter.layers.attention import AttentionMask

from shardplan.attention.blockwise import EMPTY, Rule, Tokens
from shardplan.attention.choice import Heads, choices, layouts
from shardplan.attention.layout import KINDS, Layout, hops
from shardplan.attention.pattern import PADDING, Pattern
from shardplan.attention.ring import Ring, ring_attention
from shardplan.attention.splash import serves, splash_attention, splash_kernel
from shardplan.attention.ulysses import Exchange
from shardplan.errors import ConfigError, nearest
from shardplan.hardware import parse_slice
from shardplan.plan.partition import KERNEL_LANES

HEADS = ("kv_head", "kv_heads", "heads", "head")
"""Names of axes that queries and keys share and that number heads; other shared axes are of the batch."""
STRATEGIES = ("all_gather", "ring", "ulysses", "hybrid", "auto")
KERNELS = ("blockwise", "splash")
BLOCK = 512
"""Positions of a block of scores."""

Shape = tuple[int, ...]


def dot_product_attention(
    QPos: AxisSelector,
    KPos: AxisSelector,
    Key: AxisSelector,
    query: NamedArray,
    key: NamedArray,
    value: NamedArray,
    mask: AttentionMask | NamedArray | None = None,
    *,
    strategy: str = "ring",
    ulysses: int = 1,
    layout: str | Layout = "contiguous",
    prefix: int = 0,
    documents: Sequence[int] | None = None,
    axis_mapping: ResourceMapping | None = None,
    attention_dtype: Any = None,
    scaling_factor: float | None = None,
    logits_soft_cap: float | None = None,
    attn_sink: NamedArray | None = None,
    kernel: str = "blockwise",
    block: int = BLOCK,
    hardware: str | None = None,
) -> NamedArray:
    """Attention, as Levanter's of that name, with QPos cut over the mesh axes that it is mapped to.

    Args:
        QPos: axis of the queries' positions; `axis_mapping` says which mesh axes cut it, and the keys with it.
        KPos: axis of the keys' positions, of another name.
        Key: axis of head sizes, that queries and keys have.
        query: {..., heads, QPos, Key}; axes that key lacks are query heads of one key head.
        key: {..., key heads, KPos, Key}.
        value: {..., key heads, KPos, ...}; what key lacks is its head size, which may be another than Key.
        mask: which keys a query may attend to; default: all. A causal offset must be known while tracing: a mask made
            outside of jit.
        strategy: all_gather (of keys and values), ring, ulysses, hybrid (groups of `ulysses` neighbours in a ring), or
            auto: what `shardplan.attention.choice` finds fastest for the mask, the layout and the hardware.
        layout: the order that positions are in; see `shardplan.attention.layout`. Of a kind that is not contiguous
            the length must be a multiple of the parts. A `Layout` is of queries and keys as `shard_sequence` leaves
            them, padding included.
        prefix: with a causal mask, positions that all may attend to (a prefix LM).
        documents: lengths of the documents of every sequence, where they are known while tracing: they attend within
            themselves, and what they make empty is not sent. A `Layout` has its own.
        axis_mapping: logical axis -> mesh axes; default: the current `hax.axis_mapping`.
        attention_dtype: type that query, key and value are cast to; sums are in float32 in any case.
        scaling_factor: of scores; default: 1 / sqrt(Key.size).
        logits_soft_cap: scores are soft_cap * tanh(scores / soft_cap).
        attn_sink: by heads, a score that takes weight and gives no value.
        kernel: what a device does its part with: blockwise (XLA), or splash (Pallas, on TPUs).
        block: positions of a block of scores, blockwise.
        hardware: name of the slice, as v5p-128, that `auto` chooses for; on CPUs they are known.

    Returns:
        {..., heads, QPos, value's head size}; zero for a query that may attend to nothing.

    Raises:
        ConfigError: an unknown strategy, layout or kernel, a degree or size that does not divide, axes of masks that
            queries and keys do not have, a causal offset that is traced, or a task that the splash kernel cannot do.
    """
    kind = layout.kind if isinstance(layout, Layout) else layout
    given_of = {"strategy": (strategy, STRATEGIES), "layout": (kind, KINDS), "kernel": (kernel, KERNELS)}
    for name, (given, valid) in given_of.items():
        if given not in valid:
            raise ConfigError(f"attention {name} is {given!r}; {nearest(given, valid)}")
    dims = _dims(QPos, KPos, Key, query, key, value)
    mesh = jax.sharding.get_abstract_mesh()
    mapping = (current_thread_local_mapping() or {}) if axis_mapping is None else axis_mapping
    if mesh.empty and mapping.get(dims.queries.name):
        raise ConfigError(f"attention: {dims.queries.name} is mapped, but no mesh is set; use jax.set_mesh")
    cuts = {} if mesh.empty else {axis.name: _mesh_axes(axis, mapping, mesh.shape) for axis in dims.all}
    along = cuts[dims.keys.name] = cuts.get(dims.queries.name, ())
    degree = math.prod(mesh.shape[axis] for axis in along)
    if isinstance(mask, NamedArray):
        mask = AttentionMask.explicit(mask)
    mask = mask or AttentionMask()
    pattern = _pattern(mask, prefix)
    if strategy == "auto":
        local = {
            axis.name: axis.size // math.prod(mesh.shape[each] for each in cuts.get(axis.name, ())) for axis in dims.all
        }
        strategy, ulysses = _fastest(
            dims, local, pattern, layout, documents, along, mesh.shape, query.dtype.itemsize, hardware
        )
    u = {"ulysses": degree, "hybrid": ulysses}.get(strategy, 1)
    if u < 1 or degree % u:
        raise ConfigError(f"attention: ulysses {u} does not divide the {degree} devices along {dims.queries.name}")
    orders = _orders(layout, dims, degree // u, u, documents)
    segments, explicit = _mask_parts(mask, dims, orders)
    _check_axes(dims, cuts, mesh.shape, [*(segments or ()), *(x for x in (explicit, attn_sink) if x is not None)])
    rule = Rule(pattern, dims.size.size**-0.5 if scaling_factor is None else scaling_factor, logits_soft_cap, block)
    task = _Task(rule, dims, strategy, along, orders[0], orders[1])

    inputs = {"q": query.rearrange(dims.of_query), "k": key.rearrange(dims.of_key), "v": value.rearrange(dims.of_value)}
    if attention_dtype is not None:
        inputs = {name: x.astype(attention_dtype) for name, x in inputs.items()}
    inputs |= {"explicit": explicit} if explicit is not None else {}
    inputs |= {"q_segments": segments[0], "k_segments": segments[1]} if segments else {}
    inputs |= {"sink": attn_sink} if attn_sink is not None else {}
    lengths = {dims.queries.name: orders[0].padded, dims.keys.name: orders[1].padded}
    inputs = {name: _padded(x, lengths) for name, x in inputs.items()}

    def spec(axes: Sequence[Axis], whole: Sequence[Axis]) -> PartitionSpec:
        kept = {axis.name for axis in whole}
        return PartitionSpec(*(None if axis.name in kept else cuts.get(axis.name) or None for axis in axes))

    sizes = (dims.size, *dims.values)
    in_specs = {name: spec(x.axes, (*sizes, dims.keys) if name == "explicit" else sizes) for name, x in inputs.items()}
    run = partial(task.run, axes={name: x.axes for name, x in inputs.items()})
    splash = None
    if kernel == "splash":
        numbered = (*dims.key_heads, *dims.groups)
        parts = math.prod(mesh.shape[each] for axis in numbered for each in cuts.get(axis.name, ()))
        heads = math.prod(axis.size for axis in numbered) // parts
        has_empty = segments is not None and segments[0].array is not segments[1].array
        splash = task.splash(heads, has_empty or not inputs.keys().isdisjoint(("explicit", "sink")))
    if not mesh.empty:
        rows = along if strategy == "all_gather" else ()
        of_kernel = splash and splash.manual_sharding_spec(NamedSharding(mesh, PartitionSpec(None, rows or None)))
        out_spec = spec(dims.of_output, sizes)
        run = jax.shard_map(run, mesh=mesh, in_specs=(in_specs, of_kernel), out_specs=out_spec, check_vma=False)
    arrays = {name: x.array for name, x in inputs.items()}
    out = run(arrays, splash).astype(jnp.result_type(query.array, value.array))
    axes = [axis.resize(lengths.get(axis.name, axis.size)) for axis in dims.of_output]
    return hax.named(out, axes)[dims.queries.name, : dims.queries.size]


@dataclass(frozen=True)
class _Dims:
    """The axes of an attention, by what they are."""

    batch: tuple[Axis, ...]
    key_heads: tuple[Axis, ...]
    groups: tuple[Axis, ...]
    """Of the query heads of one key head."""
    queries: Axis
    keys: Axis
    size: Axis
    values: tuple[Axis, ...]

    @property
    def all(self) -> tuple[Axis, ...]:
        """Every axis once."""
        return (*self.of_query, self.keys, *(axis for axis in self.values if axis.name != self.size.name))

    @property
    def of_query(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.key_heads, *self.groups, self.queries, self.size)

    @property
    def of_key(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.key_heads, self.keys, self.size)

    @property
    def of_value(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.key_heads, self.keys, *self.values)

    @property
    def of_output(self) -> tuple[Axis, ...]:
        return (*self.batch, *self.key_heads, *self.groups, self.queries, *self.values)


def _dims(
    QPos: AxisSelector, KPos: AxisSelector, Key: AxisSelector, query: NamedArray, key: NamedArray, value: NamedArray
) -> _Dims:
    queries, keys, size = query.resolve_axis(QPos), key.resolve_axis(KPos), query.resolve_axis(Key)
    if queries.name == keys.name:
        raise ConfigError(f"attention: queries and keys have positions of one name, {queries.name}; rename the keys'")
    shared = [axis for axis in key.axes if axis.name not in (keys.name, size.name)]
    lacking = [axis.name for axis in shared for x in (query, value) if axis not in x.axes]
    if lacking:
        raise ConfigError(f"attention: {lacking[0]} is an axis of keys and must be one of queries and values too")
    return _Dims(
        tuple(axis for axis in shared if axis.name not in HEADS),
        tuple(axis for axis in shared if axis.name in HEADS),
        tuple(axis for axis in query.axes if axis not in shared and axis.name not in (queries.name, size.name)),
        queries,
        keys,
        size,
        tuple(axis for axis in value.axes if axis not in shared and axis.name != keys.name),
    )


def _mesh_axes(axis: Axis, mapping: ResourceMapping, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes that cut a logical axis."""
    found = mapping.get(axis.name) or ()
    names = (found,) if isinstance(found, str) else found
    for name in names:
        if name not in sizes:
            raise ConfigError(
                f"attention: {axis.name} is mapped to {name!r}, no axis of the mesh; {nearest(name, sizes)}"
            )
    return tuple(name for name in names if sizes[name] > 1)


def _check_axes(
    dims: _Dims, cuts: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], others: Sequence[NamedArray]
) -> None:
    """Complain of cuts that cannot be, and of masks and sinks with other axes than queries and keys."""
    known = {axis.name: axis.size for axis in dims.all}
    for x in others:
        for axis in x.axes:
            if known.get(axis.name) != axis.size:
                raise ConfigError(
                    f"attention: a mask or sink has the axis {axis.name} ({axis.size}), queries and keys have "
                    f"{', '.join(f'{name} ({size})' for name, size in known.items())}"
                )
    users: dict[str, str] = {}
    for axis in (*dims.batch, *dims.key_heads, *dims.groups, dims.queries):
        parts = math.prod(sizes[name] for name in cuts.get(axis.name, ()))
        if axis != dims.queries and axis.size % parts:
            raise ConfigError(
                f"attention: {axis.name} ({axis.size}) is not divisible by the {parts} devices that cut it"
            )
        for name in cuts.get(axis.name, ()):
            if users.setdefault(name, axis.name) != axis.name:
                raise ConfigError(f"attention: {users[name]} and {axis.name} are both mapped to {name}")


def _orders(
    layout: str | Layout, dims: _Dims, ring: int, ulysses: int, documents: Sequence[int] | None
) -> tuple[Layout, Layout]:
    """The layouts of queries and keys."""
    axes = dims.queries, dims.keys
    if isinstance(layout, Layout):
        if (layout.ring, layout.ulysses) != (ring, ulysses) or {axis.size for axis in axes} != {layout.padded}:
            raise ConfigError(
                f"attention: the layout is for {layout.padded} positions over ring {layout.ring} x ulysses "
                f"{layout.ulysses}, here are {' and '.join(str(axis.size) for axis in axes)} over {ring} x {ulysses}"
            )
        if documents is not None:
            raise ConfigError("attention: a Layout has documents of its own; leave the others out")
        return layout, layout
    known = None if documents is None else tuple(documents)
    queries, keys = (Layout(axis.size, ring, ulysses, layout, known) for axis in axes)
    if layout != "contiguous" and (queries.padded, keys.padded) != (queries.length, keys.length):
        least = Layout(1, ring, ulysses, layout).padded
        raise ConfigError(f"attention layout {layout}: {axes[0].name} and {axes[1].name} must be multiples of {least}")
    return queries, keys


def _pattern(mask: AttentionMask, prefix: int) -> Pattern:
    """What goes by positions."""
    offset = 0 if mask.causal_offset is None else mask.causal_offset.array
    if isinstance(offset, jax.core.Tracer) or np.ndim(offset):
        raise ConfigError("attention: a causal offset must be one number that is known while tracing")
    return Pattern(mask.is_causal, int(offset), mask.sliding_window, prefix)


def _fastest(
    dims: _Dims,
    local: Mapping[str, int],
    pattern: Pattern,
    layout: str | Layout,
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
    if hardware is None and jax.default_backend() != "cpu":
        raise ConfigError("attention strategy auto: say what to choose for, as in hardware='v5p-128'")
    heads = Heads(
        math.prod(local[axis.name] for axis in dims.batch),
        math.prod(local[axis.name] for axis in dims.key_heads),
        math.prod(local[axis.name] for axis in dims.groups),
        dims.size.size,
        math.prod(axis.size for axis in dims.values),
        itemsize,
    )
    if isinstance(layout, Layout):
        orders = [layout]
    else:
        length, degree = dims.queries.size, math.prod(mesh[axis] for axis in along)
        known = None if documents is None else tuple(documents)
        orders = layouts(length, degree, (layout,), known)
        orders = [each for each in orders if layout == "contiguous" or each.padded == length]
    if not orders:
        return "ring", 1  # which says what is wrong with the length
    found = choices(orders, pattern, heads, along, mesh, parse_slice(hardware or f"cpu-{math.prod(mesh.values())}"))
    return found[0].strategy, found[0].layout.ulysses


def _mask_parts(
    mask: AttentionMask, dims: _Dims, orders: Sequence[Layout]
) -> tuple[tuple[NamedArray, NamedArray] | None, NamedArray | None]:
    """The documents of queries and keys, and what is given entry by entry."""
    segments, documents = mask.segment_ids, orders[0].documents
    if documents is not None and (segments is not None or {order.length for order in orders} != {sum(documents)}):
        raise ConfigError(
            f"attention: documents have {sum(documents)} positions together, queries and keys "
            f"{' and '.join(str(order.length) for order in orders)}; and they go without segment ids"
        )
    if segments is not None:
        segments = segments[0], segments[1].rename({dims.queries.name: dims.keys.name})
    elif documents is not None:
        labels = np.repeat(np.arange(len(documents), dtype=np.int32), documents)
        placed = [order.order()[: axis.size] for order, axis in zip(orders, (dims.queries, dims.keys), strict=True)]
        q_labels, k_labels = (np.where(order == PADDING, PADDING, labels[order]) for order in placed)
        segments = hax.named(jnp.asarray(q_labels), dims.queries), hax.named(jnp.asarray(k_labels), dims.keys)
    explicit = mask.explicit_mask
    if explicit is not None:
        has = {axis.name for axis in explicit.axes}
        explicit = explicit.broadcast_axis([axis for axis in (dims.queries, dims.keys) if axis.name not in has])
    return segments, explicit


def _padded(x: NamedArray, lengths: Mapping[str, int]) -> NamedArray:
    """`x` with its axes of positions as long as the layout has them."""
    added = [lengths.get(axis.name, axis.size) - axis.size for axis in x.axes]
    axes = [axis.resize(axis.size + more) for axis, more in zip(x.axes, added, strict=True)]
    return hax.named(jnp.pad(x.array, [(0, more) for more in added]), axes) if any(added) else x


@dataclass(frozen=True, eq=False)
class _Task:
    """What one device does."""

    rule: Rule
    dims: _Dims
    strategy: str
    along: tuple[str, ...]
    """Mesh axes that cut positions."""
    q_order: Layout
    k_order: Layout

    def splash(self, heads: int, is_special: bool) -> Any:
        """The kernel of splash attention for all of the sequence.

        Args:
            heads: query heads that a device has.
            is_special: whether there is more to it than positions and documents, that every query has one of.

        Raises:
            ConfigError: it cannot do this task.
        """
        exchanged = -(-heads // self.q_order.ulysses)
        shards = self.q_order.ring  # each with rows of its own
        lengths = self.q_order.padded, self.k_order.padded
        fits = serves(self.rule.pattern, self.dims.size.size, math.prod(a.size for a in self.dims.values),
                      lengths[0] // shards, lengths[1])  # fmt: skip
        is_alone = self.strategy == "all_gather" or shards == 1
        is_plain = self.q_order.kind == "contiguous" and lengths == (self.q_order.length, self.k_order.length)
        # a query that attends to nothing would come out wrong, with its gradients
        has_own = lengths[0] == lengths[1] and self.rule.pattern.offset >= 0
        if is_special or not (fits and is_alone and is_plain and has_own):
            raise ConfigError(
                "attention kernel splash does causal and full masks, windows and documents of self-attention, by "
                f"all_gather or ulysses, in order; a device's positions and head sizes are multiples of {KERNEL_LANES}"
            )
        return splash_kernel(self.rule, exchanged, *lengths, shards)

    def run(self, inputs: Mapping[str, Array], kernel: Any, axes: Mapping[str, tuple[Axis, ...]]) -> Array:
        """The output of this device's queries, with axes as `_Dims.of_output`.

        Args:
            inputs: q, k, v, and what there is of q_segments, k_segments, explicit and sink; this device's parts.
            kernel: this device's part of `splash`, or None.
            axes: of each input.
        """
        dims, k_order = self.dims, self.k_order
        here = {axis.name: n for axis, n in zip(dims.of_query, inputs["q"].shape, strict=True)}
        here[dims.keys.name] = k_order.padded if self.strategy == "all_gather" else inputs["k"].shape[-2]
        # its head size may be another, under the same name
        of_value = {**here, **{axis.name: axis.size for axis in dims.values}}

        def flat(name: str, *groups: Sequence[Axis]) -> Array | None:
            sizes = of_value if name == "v" else here
            return _flat(inputs[name], axes[name], groups, sizes) if name in inputs else None

        b, n, g, s, t = dims.batch, dims.key_heads, dims.groups, [dims.queries], [dims.keys]
        if self.strategy == "all_gather" and self.along:
            inputs = {
                name: jax.lax.all_gather(x, self.along, axis=axes[name].index(_of(axes[name], dims.keys)), tiled=True)
                if name in ("k", "v", "k_segments")
                else x
                for name, x in inputs.items()
            }
        q, k, v = flat("q", b, n, g, s, [dims.size]), flat("k", b, n, t, [dims.size]), flat("v", b, n, t, dims.values)
        assert q is not None and k is not None and v is not None
        q_segments, k_segments = flat("q_segments", b, s), flat("k_segments", b, t)
        every_key = {**here, dims.keys.name: k_order.padded}
        explicit = None
        if "explicit" in inputs:
            explicit = _flat(inputs["explicit"], axes["explicit"], (b, n, g, s, t), every_key)
        exchange = None
        if self.q_order.ulysses > 1:
            exchange = Exchange(self.along, self.q_order.ulysses, self.q_order.ring, q.shape[1], q.shape[2])
            if q_segments is not None and k_segments is not None:
                q_segments, k_segments = exchange.gathered(q_segments, 1), exchange.gathered(k_segments, 1)
            if explicit is not None:
                explicit = _exchanged(explicit, exchange)
        names = [axis.name for axis in dims.of_output]
        if kernel is not None:
            segments = None if q_segments is None or k_segments is None else (q_segments, k_segments)
            if exchange is not None:
                q, k, v = exchange.queries(q), exchange.keys(k), exchange.keys(v)
            out = splash_attention(self.rule, kernel, q, k, v, segments)
            out = out if exchange is None else exchange.outputs(out)
            return out.reshape([of_value[name] for name in names])
        place = jax.lax.axis_index(self.along) if self.along else jnp.int32(0)
        queries = Tokens(jnp.asarray(self.q_order.regions())[place // self.q_order.ulysses], q_segments)
        if self.strategy == "all_gather":
            ring = Ring(self.along, 1, k_order.order()[None])
        else:
            distances = hops(self.q_order, k_order, self.rule.pattern)
            ring = Ring(self.along, self.q_order.ulysses, k_order.regions(), distances)
        out, logsum = ring_attention(self.rule, ring, exchange, q, k, v, queries, k_segments, explicit)
        sink = flat("sink", n, g)
        if sink is not None:
            total = jnp.logaddexp(logsum, sink.astype(jnp.float32)[None, :, :, None])
            # where nothing is attended to, the output is zero already
            out *= jnp.exp(jnp.where(logsum == EMPTY, 0.0, logsum - jnp.where(total == EMPTY, 0.0, total)))[..., None]
        return out.reshape([of_value[name] for name in names])


def _of(axes: Sequence[Axis], like: Axis) -> Axis:
    return next(axis for axis in axes if axis.name == like.name)


def _flat(x: Array, axes: Sequence[Axis], groups: Sequence[Sequence[Axis]], sizes: Mapping[str, int]) -> Array:
    """`x` with one dimension for each group of axes: of size 1 where it has none of them, else with all of them."""
    names = [axis.name for axis in axes]
    kept = [axis.name for group in groups for axis in group if any(a.name in names for a in group)]
    x = jnp.transpose(x, [names.index(name) for name in kept if name in names])
    x = x.reshape([sizes[name] if name in names else 1 for name in kept])
    x = jnp.broadcast_to(x, [sizes[name] for name in kept])
    return x.reshape([math.prod(sizes[a.name] for a in group if a.name in kept) for group in groups])


def _exchanged(explicit: Array, exchange: Exchange) -> Array:
    """bool[B or 1, N or 1, G or 1, S, T] of this device's rows and heads -> of its group's rows, its own heads."""
    if explicit.shape[1:3] == (1, 1):
        return exchange.gathered(explicit, 3)
    b, _, _, *rest = explicit.shape
    return exchange.queries(jnp.broadcast_to(explicit, (b, exchange.key_heads, exchange.per_key_head, *rest)))
