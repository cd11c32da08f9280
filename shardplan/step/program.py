"""A program: a function with abstract, sharded arguments, that is compiled ahead of time for the devices of a mesh."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
import jax.numpy as jnp
from haliax import Axis, NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh
from jax.stages import Lowered

from shardplan.model.axes import axes_of


@dataclass(frozen=True)
class Program:
    """A function of pytrees, to be compiled for one mesh.

    The devices of the mesh may be those that this process has, or the topology of a slice that is somewhere else.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Pytrees with a sharded `jax.ShapeDtypeStruct` in place of every array."""
    mesh: Mesh
    donated: tuple[int, ...] = ()
    """Arguments whose memory the results may take."""

    def lower(self) -> Lowered:
        """The program in StableHLO, with its shardings."""
        arrays, static = eqx.partition(self.arguments, _is_abstract)

        def program(*arrays: Any) -> Any:
            return self.function(*eqx.combine(arrays, static))

        program.__name__ = self.name
        # so that the compiler calls the arguments by their paths in the model
        program.__signature__ = inspect.signature(self.function)  # type: ignore[attr-defined]
        # Haliax makes small eager arrays while it traces; under a concrete mesh they would need its devices
        with use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.jit(program, donate_argnums=self.donated).lower(*arrays)

    def compile(self, options: Mapping[str, str]) -> Callable[..., Any]:
        """The function on arrays sharded like `arguments`.

        Args:
            options: of the compiler, as in `Plan.compiler_options`.
        """
        compiled = self.lower().compile(compiler_options=dict(options))

        def call(*arguments: Any) -> Any:
            return compiled(*eqx.filter(arguments, eqx.is_array))

        return call


def abstract_model(template: Any, mesh: Mesh, mapping: Mapping[str, Any], dtype: str | None) -> Any:
    """`template` with every array sharded by `mapping`, and the floating-point ones of type `dtype`."""

    def abstract(leaf: Any) -> Any:
        axes = axes_of(leaf)
        array = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not _is_abstract(array):
            return leaf
        kind = dtype if dtype is not None and jnp.issubdtype(array.dtype, jnp.floating) else array.dtype
        spec = pspec_for_axis(axes, mapping) if axes else PartitionSpec()
        struct = jax.ShapeDtypeStruct(array.shape, kind, sharding=NamedSharding(mesh, spec))
        return eqx.tree_at(lambda named: named.array, leaf, struct) if isinstance(leaf, NamedArray) else struct

    return jax.tree.map(abstract, template, is_leaf=lambda node: isinstance(node, NamedArray))


def abstract_tokens(axes: tuple[Axis, ...], dtype: Any, mesh: Mesh, mapping: Mapping[str, Any]) -> NamedArray:
    """An array `dtype[axes]`, sharded by `mapping`."""
    sharding = NamedSharding(mesh, pspec_for_axis(axes, mapping))
    return hax.NamedArray(jax.ShapeDtypeStruct([axis.size for axis in axes], dtype, sharding=sharding), axes)


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
