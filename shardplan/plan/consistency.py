"""Whether the parts of a Plan agree with each other and with its slice, which an edit by hand changes one by one."""

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from shardplan.errors import nearest
from shardplan.hardware import GIB, parse_slice
from shardplan.plan.dtypes import itemsize
from shardplan.plan.mapping import mesh_size
from shardplan.plan.workload import BATCH_AXIS, POSITION_AXIS

if TYPE_CHECKING:
    from shardplan.plan.plan import ParameterPlan, Plan


def contradictions(plan: "Plan") -> Iterator[str]:
    """Yield everything in `plan`, whose mesh axes are known to exist, that no planner writes together.

    The estimated times and activations are not checked: these follow from the model's program.
    """
    yield from _hardware_contradictions(plan)
    known = {*plan.model.axes, BATCH_AXIS, POSITION_AXIS}
    for where, mapping in (("compute_mapping", plan.compute_mapping), ("param_mapping", plan.param_mapping)):
        for axis in mapping.keys() - known:
            if not plan.search.given:  # a mapping by hand may have axes of other models
                yield f"{where} has logical axis {axis!r}; {nearest(axis, known)}"
    for axis, size in ((BATCH_AXIS, plan.workload.batch), (POSITION_AXIS, plan.workload.position)):
        yield from _indivisible(plan, f"workload.{axis}", size, plan.compute_mapping.get(axis))
    for parameter in plan.parameters:
        yield from _parameter_contradictions(plan, parameter)
    stored = sum(parameter.bytes_per_device for parameter in plan.parameters)
    if plan.memory.parameters != stored:
        yield f"memory.parameters is {plan.memory.parameters}, those of the list are {stored} bytes"


def _hardware_contradictions(plan: "Plan") -> Iterator[str]:
    """Yield where the memory of the devices is not that of the slice."""
    hardware, expected = plan.hardware, parse_slice(plan.hardware.slice)
    # virtual devices share the memory of the machine that planned
    if not expected.is_cpu and hardware.hbm_gib != expected.generation.hbm_gib:
        yield f"hardware.hbm_gib is {hardware.hbm_gib}, {hardware.slice} has {expected.generation.hbm_gib}"
    if plan.memory.available != int(hardware.hbm_gib * GIB):
        yield f"memory.available is {plan.memory.available}, not the bytes of hardware.hbm_gib {hardware.hbm_gib}"


def _parameter_contradictions(plan: "Plan", parameter: "ParameterPlan") -> Iterator[str]:
    """Yield where the type, a dimension or the bytes of a parameter do not agree with its axes and the workload."""
    path, dtype = parameter.path, plan.workload.param_dtype
    if parameter.dtype != dtype:
        yield f"{path} has dtype {parameter.dtype}, workload.param_dtype is {dtype}"
    for (axis, size), mesh_axes in zip(parameter.axes.items(), parameter.spec, strict=True):
        yield from _indivisible(plan, f"{axis} of {path}", size, mesh_axes)
    shards = math.prod(mesh_size(plan.mesh, mesh_axes or ()) for mesh_axes in parameter.spec)
    expected = round(math.prod(parameter.axes.values()) * itemsize(dtype) / shards)
    if parameter.bytes_per_device != expected:
        yield f"{path} has bytes_per_device {parameter.bytes_per_device}, its size over {shards} shards is {expected}"


def _indivisible(plan: "Plan", what: str, size: int, mesh_axes: list[str] | None) -> Iterator[str]:
    """Yield that the `size` of `what` is not a multiple of the number of its shards."""
    shards = mesh_size(plan.mesh, mesh_axes or ())
    if size % shards:
        yield f"{what} is {size}, which the {shards} shards over {' x '.join(mesh_axes or ())} do not divide"
