"""make_plan: from a model, a workload and a slice to a Plan."""

import heapq
import time
from dataclasses import replace
from importlib import metadata

from shardplan.config import KEYS, Config, HardwareConfig, MeshConfig, WorkloadConfig
from shardplan.errors import ConfigError, InfeasibleError, nearest
from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.model import Model, ModelAxes, build_model, inspect_model, read_config
from shardplan.plan.cost import WEIGHT_CAUSES, compute_seconds, compute_traffic, step_seconds, weight_traffic
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape
from shardplan.plan.memory import (
    Workload,
    activation_bytes,
    cast_bytes,
    gathered_bytes,
    gradient_bytes,
    logit_bytes,
    optimizer_bytes,
    parameter_bytes,
    saved_bytes,
)
from shardplan.plan.plan import (
    BATCH_AXIS,
    Collective,
    CostPlan,
    HardwareInfo,
    Mapping,
    MemoryPlan,
    ModelInfo,
    ParameterPlan,
    Plan,
    RunnerUp,
    SearchInfo,
    WorkloadInfo,
)
from shardplan.plan.search import (
    GATHERED_AT_ONCE,
    TIME_RESOLUTION,
    Candidate,
    Outcome,
    duplicates_excluded,
    mesh_shapes,
    search,
)
from shardplan.runtime.storage import open_folder


def make_plan(config: Config, model: Model | None = None, nearest_miss: bool = False) -> Plan:
    """The fastest mesh and mappings that fit.

    Args:
        config: model, hardware, mesh and workload; see `shardplan.config`.
        model: the model, where it has been built already.
        nearest_miss: where nothing fits, plan what needs least memory rather than raise.

    Raises:
        ConfigError: an unusable configuration, or a batch that no mesh can divide.
        InfeasibleError: nothing fits; says how much memory is lacking at least.
    """
    hardware = parse_slice(config.hardware.slice)
    pinned = {"replica": config.mesh.replica, "data": config.mesh.data, "model": config.mesh.model}
    meshes = mesh_shapes(hardware, pinned)
    axes = inspect_model(model or model_of(config))
    workload = _workload(config)
    started = time.perf_counter()
    outcome = search(axes, workload, hardware, meshes)
    seconds = time.perf_counter() - started
    best = outcome.best or (outcome.nearest_miss if nearest_miss else None)
    if best is None:
        raise _failure(outcome, workload, hardware, meshes)
    params = best.params(axes.axes)
    memory, cost = measure(axes, workload, hardware, best.mesh, best.compute, params)
    found = _search_info(axes, outcome, best, cost, seconds)
    return _describe(config, axes, workload, hardware, best.mesh, best.compute, params, memory, cost, found)


def plan_layout(config: Config, model: Model, mesh: MeshShape, compute: Mapping, params: Mapping) -> Plan:
    """The Plan of a mesh and mappings that somebody else chose: nothing is searched, nothing refused.

    Logical axes that the model does not have are named in `search.reasons`: they cut nothing.
    """
    hardware, axes, workload = parse_slice(config.hardware.slice), inspect_model(model), _workload(config)
    cut, rest = _tuples(compute), _tuples(params)
    memory, cost = measure(axes, workload, hardware, mesh, cut, rest)
    known = {*axes.axes, axes.position, BATCH_AXIS}
    reasons = ["given, not searched for"] + [
        f"the model has no axis {axis!r}, so that mapping it does nothing; {nearest(axis, known)}"
        for axis in sorted({*compute, *params} - known)
    ]
    given = SearchInfo(1, False, 0.0, None, {}, reasons)
    return _describe(config, axes, workload, hardware, mesh, cut, rest, memory, cost, given)


def with_plan(config: Config) -> tuple[Config, Plan | None]:
    """The Plan that the configuration names, and the configuration with its model, slice, mesh and workload.

    Raises:
        ConfigError: the file cannot be read or is not a plan, or the configuration asks for something else.
    """
    if config.plan is None:
        return config, None
    plan = Plan.load(config.plan)
    planned = {
        **{f"workload.{key}": value for key, value in vars(plan.workload).items()},
        **{f"mesh.{key}": value for key, value in plan.mesh.items()},
        "hardware.slice": plan.hardware.slice,
    }
    for name, value in planned.items():
        section, _, key = name.partition(".")
        asked = getattr(getattr(config, section), key)
        if asked not in (value, KEYS[name].default):
            raise ConfigError(f"{name} is {asked}, plan {config.plan} has {value}; leave it out, or plan again")
    return (
        replace(
            config,
            model=replace(
                config.model, ref=config.model.ref or plan.model.ref, config=config.model.config or plan.model.config
            ),
            hardware=HardwareConfig(plan.hardware.slice),
            mesh=MeshConfig(**plan.mesh),
            workload=WorkloadConfig(**vars(plan.workload)),
        ),
        plan,
    )


def check_model(plan: Plan, model: Model) -> None:
    """See that `plan` is for `model`.

    Raises:
        ConfigError: it is for a model with other axes.
    """
    axes = inspect_model(model).axes
    differing = [axis for axis in {**plan.model.axes, **axes} if plan.model.axes.get(axis) != axes.get(axis)]
    if differing:
        axis = differing[0]
        raise ConfigError(
            f"the plan is for {plan.model.name} with {axis} {plan.model.axes.get(axis)}, the model has "
            f"{axes.get(axis)}; plan again"
        )


def model_of(config: Config) -> Model:
    """The model that the configuration names, without weights."""
    folder = open_folder(config.model.ref) if config.model.config is None else None
    return build_model(read_config(config.model.config, folder), config.workload.position)


def _failure(outcome: Outcome, workload: Workload, hardware: Slice, meshes: list[dict[str, int]]) -> Exception:
    if outcome.nearest_miss is None:
        degrees = sorted({mesh["replica"] * mesh["data"] for mesh in meshes})
        closest = min(
            (degree * max(1, round(workload.batch / degree)) for degree in degrees),
            key=lambda batch: abs(batch - workload.batch),
        )
        return ConfigError(
            f"workload.batch {workload.batch} is divisible by no replica x data of the mesh "
            f"({', '.join(map(str, degrees))}); the nearest batch that is: {closest}"
        )
    miss = outcome.nearest_miss
    lacking = miss.peak_bytes / GIB - hardware.generation.hbm_gib
    return InfeasibleError(
        f"no plan fits {hardware.name}: the nearest miss, mesh {_mesh_text(miss.mesh)}, needs "
        f"{miss.peak_bytes / GIB:.2f} GiB per device ({miss.parameter_bytes / GIB:.2f} of parameters) of "
        f"{hardware.generation.hbm_gib:.2f}: {lacking:.2f} GiB are lacking; use a larger slice, a smaller "
        "workload.batch or workload.position, or a narrower dtype"
    )


def _workload(config: Config) -> Workload:
    work = config.workload
    return Workload(
        BATCH_AXIS,
        work.batch,
        work.position,
        work.param_dtype,
        work.compute_dtype,
        work.kind,
        work.gradient_checkpointing,
    )


def _describe(
    config: Config,
    axes: ModelAxes,
    workload: Workload,
    hardware: Slice,
    mesh: MeshShape,
    compute: AxisMapping,
    params: AxisMapping,
    memory: MemoryPlan,
    cost: CostPlan,
    found: SearchInfo,
) -> Plan:
    return Plan(
        model=ModelInfo(config.model.ref, axes.type, dict(axes.axes), axes.size, config.model.config),
        workload=WorkloadInfo(
            workload.kind,
            workload.batch,
            workload.position,
            workload.param_dtype,
            workload.compute_dtype,
            workload.gradient_checkpointing,
        ),
        hardware=HardwareInfo(hardware.name, hardware.devices, hardware.generation.hbm_gib),
        mesh=dict(mesh),
        compute_mapping=_lists(compute),
        param_mapping=_lists(params),
        parameters=[
            ParameterPlan(
                p.path,
                p.axes,
                workload.param_dtype,
                [list(params[axis]) if axis in params else None for axis in p.axes],
                parameter_bytes(p, workload, params, mesh),
            )
            for p in axes.parameters
        ],
        memory=memory,
        cost=cost,
        search=found,
        versions=_versions(),
    )


def measure(
    axes: ModelAxes,
    workload: Workload,
    hardware: Slice,
    mesh: MeshShape,
    compute: AxisMapping,
    params: AxisMapping,
) -> tuple[MemoryPlan, CostPlan]:
    """Memory and cost of one mesh with its mappings, part by part."""
    parameters = {p.path: p for p in axes.parameters}
    weights = [
        t for c in axes.contractions for t in weight_traffic(c, parameters[c.weight], workload, params, compute, mesh)
    ]
    activations = list(compute_traffic(axes, workload, compute, mesh))
    arithmetic = compute_seconds(axes, workload, compute, mesh, hardware)
    cost = CostPlan(
        step_seconds(
            arithmetic,
            sum(t.seconds(hardware, mesh) for t in weights),
            sum(t.seconds(hardware, mesh) for t in activations),
        ),
        arithmetic,
        [
            Collective(t.kind, list(t.mesh_axes), int(t.bytes), t.count, t.seconds(hardware, mesh), t.cause)
            for t in sorted(activations + weights, key=lambda t: -t.bytes)
        ],
    )
    stored = sum(parameter_bytes(p, workload, params, mesh) for p in axes.parameters)
    whole: dict[str, int] = {}
    for c in axes.contractions:
        size = gathered_bytes(c, parameters[c.weight], workload, params, compute, mesh)
        whole[c.weight] = max(size, whole.get(c.weight, 0))
    parts = {
        "parameters": stored,
        "optimizer": optimizer_bytes(stored, workload),
        "gradients": gradient_bytes(stored, workload),
        "gathered_weights": sum(heapq.nlargest(GATHERED_AT_ONCE, whole.values())),
        "cast_parameters": sum(
            cast_bytes(parameter_bytes(p, workload, params, mesh), workload) for p in axes.parameters
        ),
    }
    saved = saved_bytes(axes, workload, compute, mesh)
    working = activation_bytes(axes, workload, compute, mesh, attention_scores=hardware.is_cpu)
    logits = logit_bytes(axes, workload, compute, mesh)
    memory = MemoryPlan(
        **parts,
        activations=working + saved,
        logits=logits,
        load_transient=0,  # shards are filled on the host and put on the device once
        peak=sum(parts.values()) + saved + max(working, logits),
        available=int(hardware.generation.hbm_gib * GIB),
    )
    return memory, cost


def _search_info(axes: ModelAxes, outcome: Outcome, best: Candidate, cost: CostPlan, seconds: float) -> SearchInfo:
    gathers = sum(c.seconds for c in cost.collectives if c.cause.startswith(WEIGHT_CAUSES))
    exposed = max(0.0, gathers - cost.compute_seconds)
    waiting = cost.step_seconds - max(cost.compute_seconds, gathers)
    reasons = [
        f"of {outcome.evaluated} combinations, the one that needs least memory among those within "
        f"{TIME_RESOLUTION:.0%} of the fastest",
        f"at least {best.seconds:.3g} s a step: compute {cost.compute_seconds:.3g} s, gathers of weights "
        f"{gathers:.3g} s ({exposed:.3g} s not hidden behind compute), collectives on activations {waiting:.3g} s",
    ]
    runner_up = outcome.runner_up
    if runner_up is not None:
        reasons.append(
            f"next best mesh {_mesh_text(runner_up.mesh)}: {runner_up.seconds / best.seconds - 1:+.1%} time, "
            f"{(runner_up.peak_bytes - best.peak_bytes) / GIB:+.2f} GiB"
        )
    return SearchInfo(
        candidates=outcome.evaluated,
        proven_optimal=True,  # by construction: nothing in the space was left out
        seconds=seconds,
        runner_up=RunnerUp(runner_up.mesh, runner_up.seconds) if runner_up else None,
        rejected={"duplicate": duplicates_excluded(axes), **outcome.rejected},
        reasons=reasons + sorted(outcome.indivisible.values()),
    )


def _mesh_text(mesh: MeshShape) -> str:
    return "(" + ", ".join(f"{axis} {size}" for axis, size in mesh.items()) + ")"


def _tuples(mapping: Mapping) -> dict[str, MeshAxes]:
    return {axis: tuple(mesh_axes) for axis, mesh_axes in mapping.items()}


def _lists(mapping: AxisMapping) -> dict[str, list[str]]:
    return {axis: list(mesh_axes) for axis, mesh_axes in mapping.items()}


def _versions() -> dict[str, str]:
    """Installed versions of the packages that a plan depends on; empty where one is not installed."""
    versions = {}
    for package in ("shardplan", "jax", "haliax", "levanter", "libtpu"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return versions
