"""Compares the arrays of a model with the plan: axes, dtype, sharding and bytes per device.

An array that is replicated though it was planned sharded may be a hundred times as large on every device, and nothing
fails: JAX runs the same program, slowly or until memory is full.
"""

import math
from dataclasses import dataclass
from typing import Any

import equinox as eqx
import haliax as hax
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from shardplan.errors import ConfigError, check_argument
from shardplan.hardware import GIB
from shardplan.hardware.mesh_axes import DCN_AXES
from shardplan.model.inspect import axes_of, named_leaves
from shardplan.plan.arguments import check_plan
from shardplan.plan.displayed import Displayed
from shardplan.plan.file.parameters import ParameterPlan
from shardplan.plan.plan import Plan

SHOWN = 3
"""Maximum number of arrays that an error names."""


@dataclass(frozen=True)
class AuditedArray:
    """An array of a model, and how it differs from the plan."""

    path: str
    axes: dict[str, int]
    dtype: str
    spec: PartitionSpec | None
    """The array's sharding; None if it is not by named mesh axes."""
    bytes_per_device: int
    difference: str
    """How the array differs from the plan; empty if it does not."""


@dataclass(frozen=True)
class Audit(Displayed):
    """The arrays of a model that agrees with its plan; shown as a table by `print` and in notebooks."""

    arrays: list[AuditedArray]


def audit(model: Any, plan: Plan) -> Audit:
    """Check that every array of a model agrees with the plan, and return the arrays, which display as a table.

    Args:
        model: a Levanter model with its arrays.

    Raises:
        ConfigError: an array has other axes, another type or another sharding, or is missing; the line names it.
    """
    check_plan("audit", plan)
    check_argument("audit", "model", model, eqx.Module, "a Levanter model with its arrays")
    arrays = audit_arrays(model, plan)
    problems = [f"{each.path} {each.difference}" for each in arrays if each.difference]
    missing = {each.path for each in plan.parameters} - {each.path for each in arrays}
    problems += [f"{path} is missing" for path in sorted(missing)]
    if problems:
        more = f" (and {len(problems) - SHOWN} more)" if len(problems) > SHOWN else ""
        raise ConfigError(
            f"not as planned: {'; '.join(problems[:SHOWN])}{more}; load the model with this plan, and let nothing "
            "reshard it"
        )
    return Audit(arrays)


def audit_arrays(model: Any, plan: Plan) -> list[AuditedArray]:
    """Return every array of a model, compared with its plan."""
    planned = {parameter.path: parameter for parameter in plan.parameters}
    return [_audit_array(path, leaf, planned.get(path), plan) for path, leaf in named_leaves(model)]


def _audit_array(path: str, leaf: Any, planned: ParameterPlan | None, plan: Plan) -> AuditedArray:
    array = leaf.array if isinstance(leaf, hax.NamedArray) else leaf
    axes = {axis.name: axis.size for axis in axes_of(leaf)}
    sharding = array.sharding
    spec = sharding.spec if isinstance(sharding, NamedSharding) else None
    nbytes = array.dtype.itemsize
    for size in sharding.shard_shape(array.shape):
        nbytes *= size
    difference = "" if planned is None else _difference(array, axes, planned, plan)
    return AuditedArray(path, axes, str(array.dtype), spec, nbytes, difference)


def _difference(array: Any, axes: dict[str, int], planned: ParameterPlan, plan: Plan) -> str:
    """Describe how an array differs from the plan; empty if it does not."""
    if axes and axes != planned.axes:
        return f"has the axes {axes}, planned are {planned.axes}"
    if str(array.dtype) != planned.dtype:
        return f"is {array.dtype}, planned is {planned.dtype}"
    return _sharding_difference(array, planned, plan)


def _sharding_difference(array: Any, planned: ParameterPlan, plan: Plan) -> str:
    """Describe how an array's sharding differs from the planned sharding; empty if it does not."""
    sharding = array.sharding
    mesh = getattr(sharding, "mesh", None)
    names = _axis_names(mesh, plan)
    if mesh is not None and not names:
        return f"is on the mesh {dict(mesh.shape)}, planned is {plan.mesh}"
    spec = [tuple(name for axis in each or () for name in names.get(axis, (axis,))) or None for each in planned.spec]
    expected = PartitionSpec(*spec)
    if mesh is None or not sharding.is_equivalent_to(NamedSharding(mesh, expected), array.ndim):
        actual = "replicated" if sharding.is_fully_replicated else f"sharded by {getattr(sharding, 'spec', sharding)}"
        nbytes = math.prod(sharding.shard_shape(array.shape)) * array.dtype.itemsize
        planned_text = "replicated" if not any(planned.spec) else f"sharded by {expected}"
        return (
            f"is {actual}, planned is {planned_text} ({nbytes / GIB:.2f} instead of "
            f"{planned.bytes_per_device / GIB:.2f} GiB per device)"
        )
    return ""


def _axis_names(mesh: Mesh | None, plan: Plan) -> dict[str, tuple[str, ...]]:
    """Map the plan's mesh axes to the axes of `mesh`; empty if the meshes differ.

    In Levanter's meshes, an axis across slices is a separate axis.
    """
    sizes = {} if mesh is None else dict(mesh.shape)
    names = {}
    for axis, size in plan.mesh.items():
        both = tuple(name for name in (DCN_AXES.get(axis, ""), axis) if name in sizes)
        if math.prod(sizes.pop(name) for name in both) != size:
            return {}
        names[axis] = both
    return names if math.prod(sizes.values()) == 1 else {}


def format_audit(arrays: list[AuditedArray]) -> str:
    """Format arrays as a text table, one line each."""
    rows = [("array", "axes", "type", "sharding", "bytes per device", "")]
    rows += [
        (
            each.path, " ".join(f"{name}:{size}" for name, size in each.axes.items()), each.dtype, str(each.spec),
            f"{each.bytes_per_device:,}", each.difference or "as planned",
        )
        for each in arrays
    ]  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    total = sum(each.bytes_per_device for each in arrays)
    return "\n".join([*(line.rstrip() for line in lines), f"{total:,} bytes per device", ""])


def check_like_parameters(state: Any, model_class: type, plan: Plan) -> None:
    """Check that an optimizer's state for each parameter is sharded like the parameter.

    Args:
        state: the state of an optax optimizer, which contains trees of the model's class.

    Raises:
        ConfigError: an array has another sharding.
    """
    planned = {parameter.path: parameter for parameter in plan.parameters}
    trees = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, model_class))
    for tree in trees:
        for path, leaf in named_leaves(tree) if isinstance(tree, model_class) else ():
            parameter = planned.get(path)
            array = leaf.array if isinstance(leaf, hax.NamedArray) else leaf
            if parameter is None or array.shape != tuple(parameter.axes.values()):
                continue  # of lower rank, as in Adafactor
            difference = _sharding_difference(array, parameter, plan)
            if difference:
                raise ConfigError(f"not as planned: the optimizer's state of {path} {difference}")
