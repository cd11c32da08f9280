"""Compiles functions of abstract, sharded arguments ahead of time for the devices of a mesh."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import jax
from haliax import NamedArray
from haliax.partitioning import pspec_for_axis
from jax.sharding import Mesh, NamedSharding, PartitionSpec, use_abstract_mesh
from jax.stages import Lowered

from shardplan.model.inspect import axes_of


@dataclass(frozen=True)
class Program:
    """A function of pytrees with its arguments' shapes and shardings on one mesh.

    The devices of the mesh may be this process's, or the topology of a slice that this process has no access to.
    """

    name: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    """Pytrees that have a `jax.ShapeDtypeStruct` with a sharding in place of every array."""
    mesh: Mesh
    donated: tuple[int, ...] = ()
    """Indices of the arguments whose memory the results may reuse."""

    def lower(self) -> Lowered:
        """Lower the program to StableHLO, with its shardings."""
        arrays, static = eqx.partition(self.arguments, _is_abstract)

        def program(*arrays: Any) -> Any:
            return self.function(*eqx.combine(arrays, static))

        program.__name__ = self.name
        # the compiler then names the arguments by their paths in the model
        program.__signature__ = inspect.signature(self.function)  # type: ignore[attr-defined]
        # Haliax makes small eager arrays while it traces; under a concrete mesh they would need its devices
        with use_abstract_mesh(self.mesh.abstract_mesh):
            return jax.jit(program, donate_argnums=self.donated).lower(*arrays)

    def compile(self, options: Mapping[str, str]) -> Callable[..., Any]:
        """Compile the program to a function of arrays that are sharded like `arguments`.

        Args:
            options: compiler options, as in `Plan.compiler_options`.
        """
        compiled = self.lower().compile(compiler_options=dict(options))

        def call(*arguments: Any) -> Any:
            return compiled(*eqx.filter(arguments, eqx.is_array))

        return call


def abstract_model(template: Any, mesh: Mesh, mapping: Mapping[str, Any]) -> Any:
    """Return `template` with the sharding of `mapping` on every array.

    Args:
        template: a model or optimizer state with a `jax.ShapeDtypeStruct` in place of every array.
        mapping: logical axis -> mesh axes.
    """

    def abstract(leaf: Any) -> Any:
        """Return the abstract, sharded form of an array; return other values unchanged."""
        axes = axes_of(leaf)
        array = leaf.array if isinstance(leaf, NamedArray) else leaf
        if not _is_abstract(array):
            return leaf
        # Adafactor has arrays of one element in place of some, with the axes of their parameters
        divided = {axis.name: mapping[axis.name] for axis in axes if axis.name in mapping and axis.size > 1}
        spec = pspec_for_axis(axes, divided) if axes else PartitionSpec()
        struct = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
        return eqx.tree_at(lambda named: named.array, leaf, struct) if isinstance(leaf, NamedArray) else struct

    return jax.tree.map(abstract, template, is_leaf=lambda node: isinstance(node, NamedArray))


def _is_abstract(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)
