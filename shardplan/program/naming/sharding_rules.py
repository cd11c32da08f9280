"""Rules for sharding constraints, and for the collectives of a `shard_map`."""

from dataclasses import replace
from typing import Any

from shardplan.experts.method import UNSHARDED
from shardplan.hardware import CollectiveKind
from shardplan.hardware.mesh_axes import MESH_AXES
from shardplan.program.named_arrays import Dim, TracedArray, UnshardedAxis, adopt_names, dims_of_spec, shape_of
from shardplan.program.naming.axis_naming import AxisNaming, Rule, RuleResult, itemsize_of
from shardplan.program.naming.elementwise_rules import elementwise
from shardplan.program.operations import OperationKind


def constrain(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Name the axes of an array by its sharding constraint; tracing uses a mesh with one axis per logical axis."""
    array = arrays[0]
    dims = dims_of_spec(equation.params["sharding"].spec, shape_of(array))
    return OperationKind.ELEMENTWISE, [adopt_names(array, dims)], {}


def name_activation(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
    """Record the name of an activation (`checkpoint_name`); some names mark an axis as never sharded."""
    kind, results, fields = elementwise(naming, equation, arrays)
    name = equation.params["name"]
    fields["activation"] = name
    if name.startswith(UNSHARDED):
        axis = name.removeprefix(UNSHARDED)
        results = [replace(results[0], dims=tuple(_unsharded(dim, axis) for dim in results[0].dims))]
    return kind, results, fields


def _unsharded(dim: Dim, axis: str) -> Dim:
    """Replace a logical axis in a dimension by an axis that no mapping shards."""
    return tuple((UnshardedAxis(name) if name == axis else name, size) for name, size in dim)


def collective(kind: CollectiveKind) -> Rule:
    """Return the rule for a shard_map's collective that is compiled to a collective of `kind`."""

    def name_result(naming: AxisNaming, equation: Any, arrays: list[TracedArray]) -> RuleResult:
        """Name the axes of a collective's result; a collective over only logical axes counts as elementwise."""
        if all(shape_of(array) == v.aval.shape for array, v in zip(arrays, equation.outvars, strict=True)):
            pairs = zip(arrays, equation.outvars, strict=True)
            results = [replace(array, itemsize=itemsize_of(v)) for array, v in pairs]
        else:
            _, results, _ = elementwise(naming, equation, arrays)
        named = equation.params.get("axes", equation.params.get("axis_name", ()))
        mesh_axes = tuple(axis for axis in MESH_AXES if axis in ((named,) if isinstance(named, str) else named))
        if not mesh_axes:  # while tracing, mesh axes of logical axes have one device each
            return OperationKind.ELEMENTWISE, results, {}
        return OperationKind.COLLECTIVE, results, {"collective": kind, "mesh_axes": mesh_axes}

    return name_result
