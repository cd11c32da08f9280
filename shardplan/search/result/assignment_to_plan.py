"""Builds the Plan of a sharding assignment: its cost, memory, parameters and versions."""

from collections import defaultdict
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import NamedTuple

from shardplan.config import PlanConfig
from shardplan.cost.attention import with_kernels
from shardplan.cost.calibration import calibration_of, usable_bytes, usable_host_bytes
from shardplan.cost.collectives import Purpose
from shardplan.cost.memory import estimate_memory, host_bytes
from shardplan.cost.roofline import host_copy_seconds, model_flops, step_tasks, transfer_seconds
from shardplan.cost.sharding import ShardingAssignment
from shardplan.hardware import GIB, CollectiveKind, Slice, parse_slice, place_mesh
from shardplan.model.corrections.levanter_compat import LEVANTER_PACKAGES
from shardplan.model.dtypes.parameter_dtypes import parameter_dtypes
from shardplan.model.inspect import inspect_model
from shardplan.model.registry import Model
from shardplan.plan.file.parameters import ParameterPlan
from shardplan.plan.file.sections import Collective, CostPlan, HardwareInfo, MemoryPlan, ModelInfo, SearchInfo
from shardplan.plan.mapping import AxisMapping, MeshAxes
from shardplan.plan.plan import Plan
from shardplan.program.tasks import Step, TaskKind
from shardplan.search.result.compiler_options import planned_options


class StepCost(NamedTuple):
    """The cost of a step as a Plan records it, and the costs that the Plan leaves out."""

    plan: CostPlan
    weight_gather_seconds: float
    """Seconds of the gathers of weights, overlapped time included."""
    other_collective_seconds: float
    """Seconds of all other collectives, overlapped time included."""
    host_copy_seconds: float
    """Seconds of copies between devices and hosts, overlapped time included."""
    exposed_host_copy_seconds: float
    """Seconds of copies between devices and hosts that nothing hides."""


def estimate_cost(step: Step, assignment: ShardingAssignment, hardware: Slice) -> StepCost:
    """Estimate the time of a step, and sum its collectives by kind, mesh axes and cause."""
    total = compute = weight_gathers = other_collectives = host_copies = exposed_host_copies = 0.0
    sums: dict[tuple[CollectiveKind, MeshAxes, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    placement = place_mesh(hardware, assignment.mesh)
    for task, cost, seconds in step_tasks(step, assignment, hardware, calibration_of(step, hardware)):
        total += seconds.total
        compute += seconds.compute
        if task.kind == TaskKind.HOST_COPY:
            host_copies += host_copy_seconds(task, cost, hardware)
            exposed_host_copies += seconds.exposed
        for traffic in cost.traffic:
            transfer = transfer_seconds(traffic, placement)
            if traffic.purpose is Purpose.WEIGHTS:
                weight_gathers += transfer
            else:
                other_collectives += transfer
            collective = sums[traffic.kind, traffic.mesh_axes, traffic.cause]
            collective[0] += traffic.bytes
            collective[1] += traffic.count
            collective[2] += transfer
    collectives = [
        Collective(kind, list(mesh_axes), round(size), round(count), seconds, cause)
        for (kind, mesh_axes, cause), (size, count, seconds) in sums.items()
    ]
    plan = CostPlan(total, compute, sorted(collectives, key=lambda collective: -collective.bytes))
    return StepCost(plan, weight_gathers, other_collectives, host_copies, exposed_host_copies)


def build_plan(
    config: PlanConfig, model: Model, step: Step, assignment: ShardingAssignment, cost: CostPlan, search: SearchInfo
) -> Plan:
    """Build the Plan of `assignment`, without the details that reports draw.

    Args:
        config: model, hardware and workload, without open choices.
        cost: the cost of `assignment`, see `estimate_cost`.
    """
    hardware, axes, workload = parse_slice(config.hardware.slice), inspect_model(model), config.workload.resolve()
    params, dtypes = assignment.params, parameter_dtypes(model.template, workload.param_dtype)
    return Plan(
        model=ModelInfo(
            config.model.ref,
            axes.type,
            dict(axes.axes),
            axes.size,
            config.model.config,
            axes.position,
            model.class_name,
            step.vocab,
            sorted({axis for attention in step.attention_axes for axis in attention.unsharded_in_kernels}),
            config.model.adapter,
            None if model.kept is None else model.kept.dtype,
        ),
        workload=workload,
        hardware=HardwareInfo(hardware.name, hardware.devices, hardware.generation.hbm_gib),
        mesh=dict(assignment.mesh),
        compute_mapping=_as_lists(assignment.compute),
        param_mapping=_as_lists(params),
        parameters=[
            ParameterPlan(
                parameter.path,
                parameter.axes,
                dtypes[parameter.path],
                [list(params[axis]) if axis in params else None for axis in parameter.axes],
                round(assignment.bytes(array)),
            )
            for parameter, array in zip(axes.parameters, step.parameters, strict=True)
        ],
        memory=_memory_plan(step, assignment, hardware, config.hardware.host_gib),
        cost=replace(cost, model_flops=model_flops(model, workload)),
        search=search,
        attention=with_kernels(step, assignment),
        experts=assignment.experts if step.expert_blocks else None,
        compiler_options=planned_options(hardware, step),
        versions=_versions(),
    )


def _memory_plan(step: Step, assignment: ShardingAssignment, hardware: Slice, host_gib: float | None) -> MemoryPlan:
    """Return the estimated memory of an assignment in whole bytes per device.

    Args:
        host_gib: `hardware.host_gib` of the configuration.
    """
    parts, available = estimate_memory(step, assignment), int(hardware.generation.hbm_gib * GIB)
    return MemoryPlan(
        **{part: round(size) for part, size in vars(parts).items()},
        load_transient=0,  # the loader fills shards on the host and copies each to the device once
        peak=round(parts.peak),
        available=available,
        reserved=available - int(usable_bytes(hardware)),
        host=round(host_bytes(step, assignment)),
        host_usable=int(usable_host_bytes(hardware, host_gib)),
    )


def _as_lists(mapping: AxisMapping) -> dict[str, list[str]]:
    # lists, because a plan that is read from JSON has lists, and must equal this one
    return {axis: list(mesh_axes) for axis, mesh_axes in mapping.items()}


@cache  # reading the metadata takes longer than estimating the cost of a plan
def _versions() -> dict[str, str]:
    """Return the installed versions of packages that a plan depends on; empty for a package that is not installed."""
    versions = {}
    for package in ("shardplan", "jax", *LEVANTER_PACKAGES, "libtpu"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return versions
