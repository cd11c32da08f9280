"""The axes of an attention: their roles, the mesh axes that shard them, and arrays with one dimension per role."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, AxisSelection, AxisSelector, NamedArray
from haliax.axis import axis_name
from haliax.partitioning import ResourceMapping
from haliax.util import ensure_tuple
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from shardplan.errors import ConfigError, nearest


@dataclass(frozen=True)
class AxisRoles:
    """The axes of query, key and value, sorted by what they stand for: batch, heads, positions, head size."""

    batch: tuple[Axis, ...]
    key_heads: tuple[Axis, ...]
    query_groups: tuple[Axis, ...]
    """Number of query heads per key head."""
    queries: Axis
    """Positions of queries."""
    keys: Axis
    """Positions of keys."""
    head_size: Axis
    """Head size of queries and keys."""
    value_size: tuple[Axis, ...]
    """Head size of values."""
    result: tuple[Axis, ...]
    """Axes of the result, in the order of Levanter's attention: query's axes but the head size, then `value_size`."""

    @property
    def all(self) -> tuple[Axis, ...]:
        """Every axis of query, key and value, listed once."""
        return (*self.query, self.keys, *(axis for axis in self.value_size if axis.name != self.head_size.name))

    @property
    def query(self) -> tuple[Axis, ...]:
        """Axes of the query array, in the order that kernels expect."""
        return (*self.batch, *self.key_heads, *self.query_groups, self.queries, self.head_size)

    @property
    def key(self) -> tuple[Axis, ...]:
        """Axes of the key array, in the order that kernels expect."""
        return (*self.batch, *self.key_heads, self.keys, self.head_size)

    @property
    def value(self) -> tuple[Axis, ...]:
        """Axes of the value array, in the order that kernels expect."""
        return (*self.batch, *self.key_heads, self.keys, *self.value_size)

    @property
    def output(self) -> tuple[Axis, ...]:
        """Axes of the output array, in the order that kernels return."""
        return (*self.batch, *self.key_heads, *self.query_groups, self.queries, *self.value_size)


class AxisSelectors(NamedTuple):
    """The axes that the caller of `dot_product_attention` names, see `shardplan.attention.dot_product`."""

    QPos: AxisSelector
    KPos: AxisSelector
    Key: AxisSelector
    heads: AxisSelection | None = None
    """Axes of key heads; None for the last axis that queries and keys share."""


def resolve_axis_roles(selectors: AxisSelectors, query: NamedArray, key: NamedArray, value: NamedArray) -> AxisRoles:
    """Assign a role to every axis of query, key and value.

    >>> Pos, KPos, Head, Size = hax.make_axes(position=8, key_position=8, kv_head=2, head_size=4)
    >>> query, key = hax.ones((Head, Pos, Size)), hax.ones((Head, KPos, Size))
    >>> roles = resolve_axis_roles(AxisSelectors("position", "key_position", "head_size", None), query, key, key)
    >>> [axis.name for axis in roles.query]
    ['kv_head', 'position', 'head_size']

    Raises:
        ConfigError: query and key positions have the same name, queries or values lack an axis of keys, or an axis in
            `heads` is not an axis of keys.
    """
    QPos, KPos, Key, heads = selectors
    for name, axis in (("QPos", QPos), ("KPos", KPos), ("Key", Key)):
        if not isinstance(axis, str | Axis):
            raise ConfigError(f"attention: {name} is {axis!r}; it must be one axis, or its name")
        array_name, array = ("key", key) if name == "KPos" else ("query", query)
        names = [each.name for each in array.axes]
        if axis_name(axis) not in names:
            raise ConfigError(
                f"attention: {name} is {axis_name(axis)}, which is no axis of {array_name}; "
                f"{nearest(axis_name(axis), names)}"
            )
    queries, keys, size = query.resolve_axis(QPos), key.resolve_axis(KPos), query.resolve_axis(Key)
    if queries.name == keys.name:
        raise ConfigError(
            f"attention: queries and keys both name their positions {queries.name}; rename the positions of keys"
        )
    shared = [axis for axis in key.axes if axis.name not in (keys.name, size.name)]
    for axis in shared:
        for name, x in (("queries", query), ("values", value)):
            if axis not in x.axes:
                actual = {each.name: f"size {each.size}" for each in x.axes}.get(axis.name, "none")
                raise ConfigError(
                    f"attention: {name} must have the axis {axis.name} of size {axis.size}, as keys do; "
                    f"they have {actual}"
                )
    head_names = [axis.name for axis in shared[-1:]] if heads is None else list(map(axis_name, ensure_tuple(heads)))
    for name in head_names:
        if name not in {axis.name for axis in shared}:
            raise ConfigError(f"attention: heads {name!r}: {nearest(name, [axis.name for axis in shared])}")
    value_size = tuple(axis for axis in value.axes if axis not in shared and axis.name != keys.name)
    return AxisRoles(
        batch=tuple(axis for axis in shared if axis.name not in head_names),
        key_heads=tuple(axis for axis in shared if axis.name in head_names),
        query_groups=tuple(
            axis for axis in query.axes if axis not in shared and axis.name not in (queries.name, size.name)
        ),
        queries=queries,
        keys=keys,
        head_size=size,
        value_size=value_size,
        result=(*(axis for axis in query.axes if axis.name != size.name), *value_size),
    )


@dataclass(frozen=True)
class AttentionSharding:
    """The axes of one attention call, and the mesh axes that shard each of them."""

    axes: AxisRoles
    mesh: Mapping[str, int]
    """Mesh axis -> number of devices; empty if no mesh is set."""
    mesh_axes: Mapping[str, tuple[str, ...]]
    """Logical axis -> mesh axes of several devices, major to minor. Keys are sharded as queries are."""

    @property
    def position_mesh_axes(self) -> tuple[str, ...]:
        """Mesh axes that shard positions, major to minor."""
        return self.mesh_axes.get(self.axes.queries.name, ())

    @property
    def degree(self) -> int:
        """Number of shards of the positions."""
        return self.shards(self.axes.queries)

    def shards(self, axis: Axis) -> int:
        """Return the number of shards of an axis."""
        return math.prod(self.mesh[name] for name in self.mesh_axes.get(axis.name, ()))

    def local_size(self, axes: Iterable[Axis]) -> int:
        """Return the product of the sizes that axes have on one device."""
        return math.prod(axis.size // self.shards(axis) for axis in axes)

    def spec(self, axes: Iterable[Axis], unsharded: Iterable[Axis]) -> PartitionSpec:
        """Return the `PartitionSpec` of an array with these axes; axes in `unsharded` stay unsharded."""
        names = {axis.name for axis in unsharded}
        return PartitionSpec(*(None if a.name in names else self.mesh_axes.get(a.name) or None for a in axes))

    def check(self, masks: Mapping[str, NamedArray]) -> None:
        """Check that the sharding is possible, and that masks and the sink have only axes of the attention.

        Args:
            masks: the arrays of `shardplan.attention.masking.MaskSpec.arrays`, and the sink, by name.

        Raises:
            ConfigError: a size is not divisible, two logical axes share a mesh axis, or a mask has another axis.
        """
        axes = self.axes
        by_query = *axes.batch, axes.queries
        valid_axes = {
            "sink": (*axes.key_heads, *axes.query_groups), "max_key_position": by_query,
            "q_segments": by_query, "k_segments": (*axes.batch, axes.keys),
        }  # fmt: skip
        for name, x in masks.items():
            valid = {axis.name: axis.size for axis in valid_axes.get(name, axes.all)}
            for axis in x.axes:
                if valid.get(axis.name) != axis.size:
                    raise ConfigError(
                        f"attention: a mask or sink has the axis {axis.name} ({axis.size}); "
                        f"valid: {', '.join(f'{name} ({size})' for name, size in valid.items())}"
                    )
        users: dict[str, str] = {}
        sharded = (*axes.batch, *axes.key_heads, *axes.query_groups, axes.queries)
        for axis in sharded:
            for mesh_axis in self.mesh_axes.get(axis.name, ()):
                if users.setdefault(mesh_axis, axis.name) != axis.name:
                    raise ConfigError(f"attention: {users[mesh_axis]} and {axis.name} are both mapped to {mesh_axis}")
        for axis in sharded[:-1]:  # positions are padded
            if axis.size % self.shards(axis):
                raise ConfigError(
                    f"attention: {axis.name} ({axis.size}) is not divisible by the {self.shards(axis)} devices "
                    "that shard it"
                )


def resolve_attention_sharding(axes: AxisRoles, mapping: ResourceMapping) -> AttentionSharding:
    """Look up the mesh axes of every axis, on the current mesh.

    >>> Pos, KPos, Head, Size = hax.make_axes(position=8, key_position=8, kv_head=2, head_size=4)
    >>> query, key = hax.ones((Head, Pos, Size)), hax.ones((Head, KPos, Size))
    >>> roles = resolve_axis_roles(AxisSelectors(Pos, KPos, Size), query, key, key)
    >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))
    >>> with jax.sharding.use_abstract_mesh(mesh):
    ...     resolve_attention_sharding(roles, {"position": ("data", "model")}).degree
    8

    Args:
        mapping: logical axis -> mesh axes.

    Raises:
        ConfigError: the mesh has axes of type Explicit, positions are mapped but no mesh is set, or an axis is mapped
            to an unknown mesh axis, or to the same mesh axis twice.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in mesh.axis_types:
        raise ConfigError("attention: the mesh has axes of type Explicit; make it with AxisType.Auto, as Haliax needs")
    if mesh.empty:
        if mapping.get(axes.queries.name):
            raise ConfigError(f"attention: {axes.queries.name} is mapped, but no mesh is set; use jax.set_mesh")
        return AttentionSharding(axes, {}, {})
    mesh_axes = {axis.name: _mesh_axes(axis, mapping, mesh.shape) for axis in axes.all}
    return AttentionSharding(axes, mesh.shape, {**mesh_axes, axes.keys.name: mesh_axes[axes.queries.name]})


def _mesh_axes(axis: Axis, mapping: ResourceMapping, mesh: Mapping[str, int]) -> tuple[str, ...]:
    """Return the mesh axes of size > 1 that shard a logical axis."""
    mapped = mapping.get(axis.name) or ()
    names = (mapped,) if isinstance(mapped, str) else mapped
    for name in names:
        if name not in mesh:
            raise ConfigError(
                f"attention: {axis.name} is mapped to {name!r}, which is no axis of the mesh; {nearest(name, mesh)}"
            )
    if len(set(names)) < len(names):
        raise ConfigError(f"attention: {axis.name} is mapped to one mesh axis twice: {', '.join(names)}")
    return tuple(name for name in names if mesh[name] > 1)


def pad_axes(x: NamedArray, lengths: Mapping[str, int]) -> NamedArray:
    """Pad `x` with zeros at the end of axes, to the lengths given by axis name.

    >>> pad_axes(hax.ones(Axis("kv_head", 3)), {"kv_head": 4}).array.tolist()
    [1.0, 1.0, 1.0, 0.0]
    """
    added = [lengths.get(axis.name, axis.size) - axis.size for axis in x.axes]
    axes = [axis.resize(axis.size + more) for axis, more in zip(x.axes, added, strict=True)]
    return hax.named(jnp.pad(x.array, [(0, more) for more in added]), axes) if any(added) else x


def merge_axes(x: Array, axes: Sequence[Axis], groups: Sequence[Sequence[Axis]], sizes: Mapping[str, int]) -> Array:
    """Merge the axes of `x` into one dimension per group.

    If `x` has only some axes of a group, it is broadcast along the others; if it has none, the group's dimension has
    size 1.

    >>> Batch, Head, Size = Axis("batch", 2), Axis("head", 3), Axis("head_size", 4)
    >>> groups, sizes = ([Batch], [Head, Size]), {"batch": 2, "head": 3, "head_size": 4}
    >>> merge_axes(jnp.ones((3, 2, 4)), [Head, Batch, Size], groups, sizes).shape
    (2, 12)

    Args:
        axes: the axes of `x`, in order.
        sizes: axis name -> size in `x`.
    """
    names = [axis.name for axis in axes]
    expanded = [axis.name for group in groups for axis in group if any(a.name in names for a in group)]
    x = jnp.transpose(x, [names.index(name) for name in expanded if name in names])
    x = x.reshape([sizes[name] if name in names else 1 for name in expanded])
    x = jnp.broadcast_to(x, [sizes[name] for name in expanded])
    return x.reshape([math.prod(sizes[a.name] for a in group if a.name in expanded) for group in groups])
