"""Runs Native Sparse Attention on the devices of a mesh, as Haliax's axis mapping shards its axes.

Batch, positions and groups (`kv_head`) may be sharded, each over one or several mesh axes. Heads within a group may
not: they select blocks by one sum. Projections before and after are left to the compiler, and so is the sharding of
their weights.
"""

import math
from dataclasses import dataclass
from functools import cached_property

import jax
from haliax import Axis
from haliax.partitioning import physical_axis_name
from haliax.util import ensure_tuple
from jax.sharding import PartitionSpec

from shardplan.decoder.parts.attention.sparse.branches.selected_branch import SelectedMethod
from shardplan.decoder.parts.attention.sparse.config import NativeSparseConfig
from shardplan.decoder.parts.attention.sparse.device_branches import (
    DeviceBranches,
    GroupInputs,
    TokenInputs,
    TokenResults,
)
from shardplan.decoder.parts.attention.sparse.statistics import SelectionSums
from shardplan.decoder.parts.attention.sparse.traffic import importance_all_reduce_bytes
from shardplan.errors import ConfigError


@dataclass(frozen=True)
class MeshSharding:
    """The mesh axes of several devices that shard the axes of a layer, major to minor."""

    batch: tuple[str, ...]
    position: tuple[str, ...]
    groups: tuple[str, ...]

    @cached_property
    def mesh_axes(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.batch, *self.position, *self.groups)


def resolve_mesh_sharding(config: NativeSparseConfig, Batch: Axis, Pos: Axis) -> MeshSharding:
    """Look up the mesh axes of a layer under the axis mapping in force, on the current mesh.

    Raises:
        ConfigError: heads within a group are sharded, a size is not divisible, two axes share a mesh axis, or positions
            are mapped but no mesh is set.
    """
    if physical_axis_name(Pos) and jax.sharding.get_abstract_mesh().empty:
        raise ConfigError(f"native sparse attention: {Pos.name} is mapped, but no mesh is set; use jax.set_mesh")
    heads = device_count(_mesh_axes(config.QHeadsPerGroup))
    if heads > 1:
        cost = importance_all_reduce_bytes(config, Pos.size, config.groups, heads)
        raise ConfigError(
            f"native sparse attention: {config.QHeadsPerGroup.name} is sharded over {heads} devices; shard "
            f"{config.KVHeads.name} instead, because heads of a group select blocks by one sum, whose all-reduce would "
            f"be {cost / 1e6:.1f} MB for each sequence and layer"
        )
    users: dict[str, str] = {}
    for axis in (Batch, Pos, config.KVHeads):
        names = _mesh_axes(axis)
        for name in names:
            if users.setdefault(name, axis.name) != axis.name:
                raise ConfigError(
                    f"native sparse attention: {users[name]} and {axis.name} are both mapped to {name}; "
                    "map each of them to mesh axes of its own"
                )
        if axis != Pos and axis.size % device_count(names):
            raise ConfigError(
                f"native sparse attention: {axis.name} ({axis.size}) is not divisible by the {device_count(names)} "
                "devices that shard it"
            )
    return MeshSharding(_mesh_axes(Batch), _mesh_axes(Pos), _mesh_axes(config.KVHeads))


def run_on_mesh(
    branches: DeviceBranches, sharding: MeshSharding, inputs: TokenInputs, parameters: GroupInputs
) -> tuple[TokenResults, SelectionSums | None]:
    """Run the branches on all devices of the mesh, or without it if nothing is sharded.

    On a mesh, kernels run inside of `jax.shard_map` in any case, because the compiler does not partition them.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if not sharding.mesh_axes and (mesh.empty or branches.method is not SelectedMethod.KERNEL):
        return branches.run(inputs, parameters)
    of_tokens = PartitionSpec(sharding.batch or None, sharding.position or None, sharding.groups or None)
    run = jax.shard_map(
        branches.run,
        mesh=mesh,
        in_specs=(of_tokens, PartitionSpec(sharding.groups or None)),
        out_specs=(of_tokens, PartitionSpec()),
        check_vma=False,
    )
    results: tuple[TokenResults, SelectionSums | None] = run(inputs, parameters)
    return results


def device_count(mesh_axes: tuple[str, ...]) -> int:
    """Return the number of devices along axes of the current mesh."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape[name] for name in mesh_axes)


def _mesh_axes(axis: Axis) -> tuple[str, ...]:
    """Return the mesh axes of several devices that shard an axis under the axis mapping in force."""
    shape = jax.sharding.get_abstract_mesh().shape
    return tuple(name for name in ensure_tuple(physical_axis_name(axis) or ()) if shape.get(name, 1) > 1)
