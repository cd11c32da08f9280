"""make_plan: from a model, a workload and a slice to a Plan."""

import time
from importlib import metadata

from shardplan.config import Config
from shardplan.errors import ConfigError, InfeasibleError
from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.model import Model, ModelAxes, build_model, inspect_model, read_config
from shardplan.plan.cost import GATHER_CAUSE, compute_seconds, compute_traffic, weight_traffic
from shardplan.plan.mapping import AxisMapping, MeshShape
from shardplan.plan.memory import (
    Workload,
    activation_bytes,
    cast_bytes,
    logit_bytes,
    parameter_bytes,
)
from shardplan.plan.plan import (
    BATCH_AXIS,
    Collective,
    CostPlan,
    HardwareInfo,
    MemoryPlan,
    ModelInfo,
    ParameterPlan,
    Plan,
    RunnerUp,
    SearchInfo,
    WorkloadInfo,
)
from shardplan.plan.search import TIME_RESOLUTION, Candidate, Outcome, duplicates_excluded, mesh_shapes, search
from shardplan.runtime.storage import open_folder


def make_plan(config: Config, model: Model | None = None) -> Plan:
    """The fastest mesh and mappings that fit.

    Args:
        config: model, hardware, mesh and workload; see `shardplan.config`.
        model: the model, where it has been built already.

    Raises:
        ConfigError: an unusable configuration, or a batch that no mesh can divide.
        InfeasibleError: nothing fits; says how much memory is lacking at least.
    """
    hardware = parse_slice(config.hardware.slice)
    pinned = {"replica": config.mesh.replica, "data": config.mesh.data, "model": config.mesh.model}
    meshes = mesh_shapes(hardware, pinned)
    axes = inspect_model(model or model_of(config))
    workload = Workload(
        BATCH_AXIS,
        config.workload.batch,
        config.workload.position,
        config.workload.param_dtype,
        config.workload.compute_dtype,
    )
    started = time.perf_counter()
    outcome = search(axes, workload, hardware, meshes)
    seconds = time.perf_counter() - started
    if outcome.best is None:
        raise _failure(outcome, workload, hardware, meshes)
    return _describe(config, axes, workload, hardware, outcome, outcome.best, seconds)


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


def _describe(
    config: Config,
    axes: ModelAxes,
    workload: Workload,
    hardware: Slice,
    outcome: Outcome,
    best: Candidate,
    seconds: float,
) -> Plan:
    params = best.params(axes.axes)
    cost = _cost(axes, workload, hardware, best, params)
    return Plan(
        model=ModelInfo(config.model.ref or str(config.model.config), axes.type, dict(axes.axes), axes.size),
        workload=WorkloadInfo("eval", workload.batch, workload.position, workload.param_dtype, workload.compute_dtype),
        hardware=HardwareInfo(hardware.name, hardware.devices, hardware.generation.hbm_gib),
        mesh=best.mesh,
        compute_mapping=_lists(best.compute),
        param_mapping=_lists(params),
        parameters=[
            ParameterPlan(
                p.path,
                p.axes,
                workload.param_dtype,
                [list(params[axis]) if axis in params else None for axis in p.axes],
                parameter_bytes(p, workload, params, best.mesh),
            )
            for p in axes.parameters
        ],
        memory=_memory(axes, workload, hardware, best),
        cost=cost,
        search=_search_info(axes, outcome, best, cost, seconds),
        versions=_versions(),
    )


def _cost(axes: ModelAxes, workload: Workload, hardware: Slice, best: Candidate, params: AxisMapping) -> CostPlan:
    parameters = {p.path: p for p in axes.parameters}
    weights = (
        weight_traffic(c, parameters[c.weight], workload, params, best.compute, best.mesh) for c in axes.contractions
    )
    traffic = [*compute_traffic(axes, workload, best.compute, best.mesh), *(t for t in weights if t is not None)]
    return CostPlan(
        best.seconds,
        compute_seconds(axes, workload, best.compute, best.mesh, hardware),
        [
            Collective(t.kind, list(t.mesh_axes), int(t.bytes), t.count, t.seconds(hardware), t.cause)
            for t in sorted(traffic, key=lambda t: -t.bytes)
        ],
    )


def _memory(axes: ModelAxes, workload: Workload, hardware: Slice, best: Candidate) -> MemoryPlan:
    return MemoryPlan(
        parameters=best.parameter_bytes,
        optimizer=0,
        gradients=0,
        activations=activation_bytes(axes, workload, best.compute, best.mesh, attention_scores=hardware.is_cpu),
        logits=logit_bytes(axes, workload, best.compute, best.mesh),
        gathered_weights=best.gathered_bytes,
        cast_parameters=cast_bytes(best.parameter_bytes, workload),
        load_transient=0,  # shards are filled on the host and put on the device once
        peak=best.peak_bytes,
        available=int(hardware.generation.hbm_gib * GIB),
    )


def _search_info(axes: ModelAxes, outcome: Outcome, best: Candidate, cost: CostPlan, seconds: float) -> SearchInfo:
    gathers = sum(c.seconds for c in cost.collectives if c.cause.startswith(GATHER_CAUSE))
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
