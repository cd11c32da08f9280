"""The axes of an attention: what each is, which mesh axes cut it, and arrays with one dimension for each group."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import haliax as hax
import jax.numpy as jnp
from haliax import Axis, AxisSelector, NamedArray
from haliax.partitioning import ResourceMapping
from jax import Array

from shardplan.errors import ConfigError, nearest

HEADS = ("kv_head", "kv_heads", "heads", "head")
"""Names of axes that queries and keys share and that number heads; other shared axes are of the batch."""


@dataclass(frozen=True)
class Dims:
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
        """Of queries, in the order that kernels have them in."""
        return (*self.batch, *self.key_heads, *self.groups, self.queries, self.size)

    @property
    def of_key(self) -> tuple[Axis, ...]:
        """Of keys, likewise."""
        return (*self.batch, *self.key_heads, self.keys, self.size)

    @property
    def of_value(self) -> tuple[Axis, ...]:
        """Of values, likewise."""
        return (*self.batch, *self.key_heads, self.keys, *self.values)

    @property
    def of_output(self) -> tuple[Axis, ...]:
        """Of outputs, likewise."""
        return (*self.batch, *self.key_heads, *self.groups, self.queries, *self.values)


def dims_of(
    QPos: AxisSelector, KPos: AxisSelector, Key: AxisSelector, query: NamedArray, key: NamedArray, value: NamedArray
) -> Dims:
    """What the axes of query, key and value are.

    Raises:
        ConfigError: positions of one name, or an axis of keys that queries or values lack.
    """
    queries, keys, size = query.resolve_axis(QPos), key.resolve_axis(KPos), query.resolve_axis(Key)
    if queries.name == keys.name:
        raise ConfigError(f"attention: queries and keys have positions of one name, {queries.name}; rename the keys'")
    shared = [axis for axis in key.axes if axis.name not in (keys.name, size.name)]
    for axis in shared:
        for name, x in (("queries", query), ("values", value)):
            if axis not in x.axes:
                has = {each.name: f"size {each.size}" for each in x.axes}.get(axis.name, "none")
                raise ConfigError(
                    f"attention: {axis.name} is an axis of keys, of size {axis.size}, and must be one of queries and "
                    f"values too; {name} have {has}"
                )
    return Dims(
        tuple(axis for axis in shared if axis.name not in HEADS),
        tuple(axis for axis in shared if axis.name in HEADS),
        tuple(axis for axis in query.axes if axis not in shared and axis.name not in (queries.name, size.name)),
        queries,
        keys,
        size,
        tuple(axis for axis in value.axes if axis not in shared and axis.name != keys.name),
    )


def mesh_axes(axis: Axis, mapping: ResourceMapping, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The mesh axes, of several devices, that cut a logical axis.

    Raises:
        ConfigError: it is mapped to what is no axis of the mesh, or to one twice.
    """
    found = mapping.get(axis.name) or ()
    names = (found,) if isinstance(found, str) else found
    for name in names:
        if name not in sizes:
            raise ConfigError(
                f"attention: {axis.name} is mapped to {name!r}, no axis of the mesh; {nearest(name, sizes)}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"attention: {axis.name} is mapped to a mesh axis twice: {', '.join(names)}")
    return tuple(name for name in names if sizes[name] > 1)


def check_axes(
    dims: Dims, cuts: Mapping[str, tuple[str, ...]], sizes: Mapping[str, int], others: Mapping[str, NamedArray]
) -> None:
    """See that the cuts can be, and that masks and sinks have axes that they may have.

    Args:
        cuts: logical axis -> mesh axes.
        sizes: mesh axis -> devices.
        others: masks, by the names of `shardplan.attention.masking.mask_arrays`, and the sink.

    Raises:
        ConfigError: one does not divide, two logical axes have one mesh axis, or an axis is unknown.
    """
    of_queries = *dims.batch, dims.queries
    narrow = {
        "sink": (*dims.key_heads, *dims.groups), "reach": of_queries,
        "q_segments": of_queries, "k_segments": (*dims.batch, dims.keys),
    }  # fmt: skip
    for name, x in others.items():
        known = {axis.name: axis.size for axis in narrow.get(name, dims.all)}
        for axis in x.axes:
            if known.get(axis.name) != axis.size:
                raise ConfigError(
                    f"attention: a mask or sink has the axis {axis.name} ({axis.size}), where it may have "
                    f"{', '.join(f'{name} ({size})' for name, size in known.items())}"
                )
    users: dict[str, str] = {}
    cut = (*dims.batch, *dims.key_heads, *dims.groups, dims.queries)
    for axis in cut:
        for name in cuts.get(axis.name, ()):
            if users.setdefault(name, axis.name) != axis.name:
                raise ConfigError(f"attention: {users[name]} and {axis.name} are both mapped to {name}")
    for axis in cut[:-1]:
        parts = math.prod(sizes[name] for name in cuts.get(axis.name, ()))
        if axis.size % parts:
            raise ConfigError(
                f"attention: {axis.name} ({axis.size}) is not divisible by the {parts} devices that cut it"
            )


def padded(x: NamedArray, lengths: Mapping[str, int]) -> NamedArray:
    """`x` with its axes of positions as long as the layout has them."""
    added = [lengths.get(axis.name, axis.size) - axis.size for axis in x.axes]
    axes = [axis.resize(axis.size + more) for axis, more in zip(x.axes, added, strict=True)]
    return hax.named(jnp.pad(x.array, [(0, more) for more in added]), axes) if any(added) else x


def flat(x: Array, axes: Sequence[Axis], groups: Sequence[Sequence[Axis]], sizes: Mapping[str, int]) -> Array:
    """`x` with one dimension for each group of axes: of size 1 where it has none of them, else with all of them."""
    names = [axis.name for axis in axes]
    kept = [axis.name for group in groups for axis in group if any(a.name in names for a in group)]
    x = jnp.transpose(x, [names.index(name) for name in kept if name in names])
    x = x.reshape([sizes[name] if name in names else 1 for name in kept])
    x = jnp.broadcast_to(x, [sizes[name] for name in kept])
    return x.reshape([math.prod(sizes[a.name] for a in group if a.name in kept) for group in groups])
