"""Runs attention to blocks on the devices of a mesh, sharded by Haliax's axis mapping.

Batch, positions, groups (`kv_head`) and heads within a group may be sharded, each over one or several mesh axes.
Projections before and after are left to the compiler, and so is the sharding of their weights.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
from haliax import Axis
from haliax.partitioning import physical_axis_name
from jax.sharding import PartitionSpec

from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.errors import ConfigError
from shardplan.model.axis_sharding import mesh_axes_of


@dataclass(frozen=True)
class MeshSharding:
    """For each axis of attention, the mesh axes that shard it, major to minor, without mesh axes of size 1."""

    batch: tuple[str, ...]
    position: tuple[str, ...]
    groups: tuple[str, ...]
    heads: tuple[str, ...]
    """Mesh axes that shard the query heads of a group."""

    @cached_property
    def mesh_axes(self) -> tuple[str, ...]:
        """All mesh axes that shard attention."""
        return (*self.batch, *self.position, *self.groups, *self.heads)

    @property
    def of_tokens(self) -> PartitionSpec:
        """The `PartitionSpec` of arrays [b, t, g, ...] without query heads."""
        return PartitionSpec(self.batch or None, self.position or None, self.groups or None)

    @property
    def of_queries(self) -> PartitionSpec:
        """The `PartitionSpec` of arrays [b, t, g, r, ...]."""
        return PartitionSpec(*self.of_tokens, self.heads or None)


def resolve_mesh_sharding(subject: str, Batch: Axis, Pos: Axis, KVHeads: Axis, QHeadsPerGroup: Axis) -> MeshSharding:
    """Look up the mesh axes of attention under the active axis mapping, on the current mesh.

    >>> import haliax as hax
    >>> axes = Axis("batch", 4), Axis("position", 64), Axis("kv_head", 2), Axis("q_heads_per_group", 8)
    >>> mesh = jax.sharding.AbstractMesh((2, 4), ("data", "model"))
    >>> with jax.sharding.use_abstract_mesh(mesh), hax.axis_mapping({"batch": "data", "position": "model"}):
    ...     resolve_mesh_sharding("attention", *axes)
    MeshSharding(batch=('data',), position=('model',), groups=(), heads=())

    Args:
        subject: the kind of attention, for messages.

    Raises:
        ConfigError: a size is not divisible, two axes share a mesh axis, or positions are mapped but no mesh is set.
    """
    if physical_axis_name(Pos) and jax.sharding.get_abstract_mesh().empty:
        raise ConfigError(f"{subject}: {Pos.name} is mapped, but no mesh is set; use jax.set_mesh")
    users: dict[str, str] = {}
    for axis in (Batch, Pos, KVHeads, QHeadsPerGroup):
        names = mesh_axes_of(axis)
        for name in names:
            if users.setdefault(name, axis.name) != axis.name:
                raise ConfigError(
                    f"{subject}: {users[name]} and {axis.name} are both mapped to {name}; "
                    "map each of them to mesh axes of its own"
                )
        # `PositionParts.check` is stricter for positions: a part has complete blocks
        if axis != Pos and axis.size % device_count(names):
            raise ConfigError(
                f"{subject}: {axis.name} ({axis.size}) is not divisible by the {device_count(names)} "
                "devices that shard it"
            )
    return MeshSharding(mesh_axes_of(Batch), mesh_axes_of(Pos), mesh_axes_of(KVHeads), mesh_axes_of(QHeadsPerGroup))


def run_on_mesh[Result](
    function: Callable[..., Result],
    method: SelectedMethod,
    sharding: MeshSharding,
    in_specs: tuple[PartitionSpec, ...],
    out_specs: Any,
    *inputs: Any,
) -> Result:
    """Run a function on all devices of the mesh, or without the mesh if nothing is sharded.

    On a mesh, kernels run inside of `jax.shard_map` in any case, because the compiler does not partition them.

    Args:
        function: computes the result of one device from its part of `inputs`.
        in_specs, out_specs: as `jax.shard_map` takes them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not sharding.mesh_axes and (mesh.empty or method is not SelectedMethod.KERNEL):
        return function(*inputs)
    run = jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    result: Result = run(*inputs)
    return result


def device_count(mesh_axes: tuple[str, ...]) -> int:
    """Return the number of devices along axes of the current mesh.

    >>> with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((2, 4), ("data", "model"))):
    ...     device_count(("data", "model"))
    8
    """
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[name] for name in mesh_axes)
