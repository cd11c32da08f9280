"""make_plan: from a model, a workload and a slice to a Plan."""

import math
import time
from collections import defaultdict
from dataclasses import replace
from functools import cache
from importlib import metadata

from shardplan.config import KEYS, Config, HardwareConfig, MeshConfig, WorkloadConfig
from shardplan.errors import ConfigError, InfeasibleError, nearest
from shardplan.hardware import GIB, Slice, parse_slice
from shardplan.model import Model, ModelAxes, build_model, inspect_model, read_config
from shardplan.plan.calibration import calibration, habits
from shardplan.plan.cost import step_tasks, transfer_seconds
from shardplan.plan.mapping import AxisMapping, MeshAxes, MeshShape, as_tuples
from shardplan.plan.memory import memory
from shardplan.plan.options import PLANNED
from shardplan.plan.partition import GATHER, Layout
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
from shardplan.plan.rules import parse_rules
from shardplan.plan.search import TIME_RESOLUTION, Candidate, Outcome, search
from shardplan.plan.space import Space, mesh_shapes
from shardplan.plan.tasks import Step
from shardplan.plan.workload import Workload, plan_step
from shardplan.runtime.storage import open_folder

NO_KERNEL = (
    "attention can have no kernel here: its time is a guess, for it runs a loop whose length the compiler does not say"
)
AUTOMATIC = ("save_all", "default", "nested", "recompute")
"""Kinds of gradient checkpointing that are tried for `auto`; what is offloaded to the host has no price yet."""


def make_plan(config: Config, model: Model | None = None, nearest_miss: bool = False) -> Plan:
    """The fastest mesh and mappings that fit.

    Args:
        config: model, hardware, mesh and workload; see `shardplan.config`.
        model: the model, where it has been built already.
        nearest_miss: where nothing fits, plan what needs least memory rather than raise.

    Raises:
        ConfigError: an unusable configuration.
        InfeasibleError: nothing fits; says how much memory is lacking at least.
    """
    return rank_plans(config, 1, model, nearest_miss)[0]


def rank_plans(config: Config, count: int, model: Model | None = None, nearest_miss: bool = False) -> list[Plan]:
    """The `count` fastest plans that fit, the fastest first; see `make_plan`.

    No two have mesh, batch, positions and residual axis alike. Fewer, where there are not so many.
    """
    model = model or model_of(config)
    if config.workload.gradient_checkpointing == "auto" or config.workload.microbatches is None:
        return _rank_open(config, count, model, nearest_miss)
    axes, workload = inspect_model(model), _workload(config)
    space, meshes = _space(config, model)
    step, hardware = space.step, space.hardware
    started = time.perf_counter()
    outcome = search(space, meshes, count + 1)
    has_kernels = bool(outcome.ranked) or hardware.is_cpu
    if not has_kernels:
        outcome = search(replace(space, kernels=False), meshes, count + 1)
    seconds = time.perf_counter() - started
    if not outcome.ranked and outcome.nearest_miss is None:
        raise InfeasibleError(
            f"no mapping on {hardware.name} keeps to pin {' '.join(config.pin) or 'nothing'} and forbid "
            f"{' '.join(config.forbid) or 'nothing'}: no array can have a mesh axis twice"
            + "".join(f"; {reason}" for reason in sorted(outcome.indivisible.values()))
        )
    if outcome.nearest_miss is not None and not nearest_miss:
        raise _failure(outcome.nearest_miss.mesh, outcome.nearest_miss.peak_bytes, hardware)
    candidates = [outcome.nearest_miss] if outcome.nearest_miss else outcome.ranked
    plans = []
    for candidate, runner_up in zip(candidates, [*candidates[1:], None], strict=True):
        layout = space.layout(candidate.mesh, candidate.compute, candidate.params)
        cost = _cost(step, layout, hardware)
        found = _search_info(outcome, candidate, runner_up, cost, seconds)
        found.reasons.extend([] if has_kernels else [NO_KERNEL])
        plans.append(_describe(config, axes, workload, hardware, step, layout, cost, found))
    return plans[:count]


def _rank_open(config: Config, count: int, model: Model, nearest_miss: bool) -> list[Plan]:
    """Plans for the kinds of gradient checkpointing and the numbers of microbatches that are left open, together."""
    work = config.workload
    is_training, kind = work.kind == "train", work.gradient_checkpointing
    kinds = (kind,) if kind != "auto" else AUTOMATIC if is_training else ("default",)
    divisors = [n for n in range(1, work.batch + 1) if work.batch % n == 0] if is_training else [1]
    plans: list[Plan] = []
    misses: list[Plan] = []
    failure: InfeasibleError | None = None
    for kind in kinds:
        for parts in divisors if work.microbatches is None else [work.microbatches]:
            changed = replace(config, workload=replace(work, gradient_checkpointing=kind, microbatches=parts))
            try:
                found = rank_plans(changed, count, model, nearest_miss=True)
            except InfeasibleError as error:
                failure = error
                continue
            if not found[0].search.proven_optimal:
                misses += found
                continue
            plans = sorted(plans + found, key=lambda plan: plan.cost.step_seconds)[:count]
            # more parts gather weights more often: they are no faster than fewer would be, if memory had no limit
            if len(plans) == count and _least_seconds(changed, model) >= plans[-1].cost.step_seconds:
                break
    if plans:
        return plans
    if not misses and failure is not None:
        raise failure
    miss = min(misses, key=lambda plan: plan.memory.peak)
    if not nearest_miss:
        raise _failure(miss.mesh, miss.memory.peak, parse_slice(config.hardware.slice))
    return [miss]


def _least_seconds(config: Config, model: Model) -> float:
    """The time of a step if memory had no limit."""
    space, meshes = _space(config, model)
    return min(candidate.seconds for candidate in search(replace(space, available=math.inf), meshes, 1).ranked)


def _space(config: Config, model: Model) -> tuple[Space, list[dict[str, int]]]:
    """What is searched.

    Raises:
        ConfigError: a mesh that cannot be, or a pin on what plans never cut.
    """
    hardware, axes = parse_slice(config.hardware.slice), inspect_model(model)
    meshes = mesh_shapes(hardware, vars(config.mesh))
    factors = calibration(hardware.generation.name)
    space = Space(
        step=plan_step(model, _workload(config)),
        batch=BATCH_AXIS,
        position=axes.position,
        residual=axes.residual,
        hardware=hardware,
        calibration=factors,
        habits=habits(hardware),
        available=hardware.generation.hbm_gib * GIB / (1 + factors.memory_error),
        rules=parse_rules(config.pin, config.forbid, axes),
        kernels=not hardware.is_cpu,
    )
    for pin in space.rules.pins:
        if pin.mesh_axes and pin.axis not in (*space.tensor, space.batch, space.position, space.residual):
            raise ConfigError(
                f"pin {pin.axis}={'+'.join(pin.mesh_axes)}: layers are stacked along {pin.axis}, or no product has it; "
                "plans never cut it"
            )
    return space, meshes


def plan_layout(config: Config, model: Model, mesh: MeshShape, compute: Mapping, params: Mapping) -> Plan:
    """The Plan of a mesh and mappings that somebody else chose: nothing is searched, nothing refused.

    Logical axes that the model does not have are named in `search.reasons`: they cut nothing.
    """
    hardware, axes, workload = parse_slice(config.hardware.slice), inspect_model(model), _workload(config)
    step = plan_step(model, workload)
    layout = Layout(mesh, as_tuples(compute), as_tuples(params), step.merged, step.activation_axes, habits(hardware))
    known = {*axes.axes, axes.position, BATCH_AXIS}
    reasons = ["given, not searched for"] + [
        f"the model has no axis {axis!r}, so that mapping it does nothing; {nearest(axis, known)}"
        for axis in sorted({*compute, *params} - known)
    ]
    given = SearchInfo(1, False, 0.0, None, {}, reasons)
    return _describe(config, axes, workload, hardware, step, layout, _cost(step, layout, hardware), given)


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


def _failure(mesh: MeshShape, peak: float, hardware: Slice) -> InfeasibleError:
    lacking = peak / GIB - hardware.generation.hbm_gib
    return InfeasibleError(
        f"no plan fits {hardware.name}: the nearest miss, mesh {_mesh_text(mesh)}, needs "
        f"{peak / GIB:.2f} GiB per device of {hardware.generation.hbm_gib:.2f}: {lacking:.2f} GiB are "
        "lacking; use a larger slice, a smaller workload.batch or workload.position, or a narrower dtype"
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
        work.microbatches or 1,
    )


def _describe(
    config: Config,
    axes: ModelAxes,
    workload: Workload,
    hardware: Slice,
    step: Step,
    layout: Layout,
    cost: CostPlan,
    found: SearchInfo,
) -> Plan:
    params = layout.params
    sizes = [round(layout.bytes(array)) for array in step.parameters]
    return Plan(
        model=ModelInfo(config.model.ref, axes.type, dict(axes.axes), axes.size, config.model.config),
        workload=WorkloadInfo(
            workload.kind,
            workload.batch,
            workload.position,
            workload.param_dtype,
            workload.compute_dtype,
            workload.gradient_checkpointing,
            workload.microbatches,
        ),
        hardware=HardwareInfo(hardware.name, hardware.devices, hardware.generation.hbm_gib),
        mesh=dict(layout.mesh),
        compute_mapping=_lists(layout.compute),
        param_mapping=_lists(params),
        parameters=[
            ParameterPlan(
                p.path,
                p.axes,
                workload.param_dtype,
                [list(params[axis]) if axis in params else None for axis in p.axes],
                size,
            )
            for p, size in zip(axes.parameters, sizes, strict=True)
        ],
        memory=_memory(step, layout, hardware),
        cost=cost,
        search=found,
        compiler_options={} if hardware.is_cpu else dict(PLANNED),
        versions=_versions(),
    )


def _memory(step: Step, layout: Layout, hardware: Slice) -> MemoryPlan:
    found = memory(step, layout)
    return MemoryPlan(
        **{part: round(size) for part, size in vars(found).items()},
        load_transient=0,  # shards are filled on the host and put on the device once
        peak=round(found.peak),
        available=int(hardware.generation.hbm_gib * GIB),
    )


def _cost(step: Step, layout: Layout, hardware: Slice) -> CostPlan:
    """Time of a step, and its collectives by cause."""
    total = compute = 0.0
    moved: dict[tuple[str, MeshAxes, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for _, mine, seconds in step_tasks(step, layout, hardware, calibration(hardware.generation.name)):
        total += seconds.total
        compute += seconds.compute
        for traffic in mine.traffic:
            sums = moved[traffic.kind, traffic.mesh_axes, traffic.cause]
            sums[0] += traffic.bytes
            sums[1] += traffic.count
            sums[2] += transfer_seconds(traffic, hardware, layout.mesh)
    collectives = [
        Collective(kind, list(mesh_axes), round(size), round(count), seconds, cause)
        for (kind, mesh_axes, cause), (size, count, seconds) in moved.items()
    ]
    return CostPlan(total, compute, sorted(collectives, key=lambda collective: -collective.bytes))


def _search_info(
    outcome: Outcome, best: Candidate, runner_up: Candidate | None, cost: CostPlan, seconds: float
) -> SearchInfo:
    gathers = sum(c.seconds for c in cost.collectives if c.cause.startswith(GATHER))
    others = sum(c.seconds for c in cost.collectives) - gathers
    reasons = [
        f"the fastest of the search space, and of what is as fast to {TIME_RESOLUTION:.1%} the smallest; "
        f"{outcome.evaluated} choices were weighed",
        f"{best.seconds:.3g} s a step: compute {cost.compute_seconds:.3g} s, other collectives {others:.3g} s, gathers "
        f"of weights {gathers:.3g} s ({max(0.0, cost.step_seconds - cost.compute_seconds - others):.3g} s not hidden "
        "behind compute)",
    ]
    if runner_up is not None:
        reasons.append(
            f"runner-up: mesh {_mesh_text(runner_up.mesh)}, {_mapping_text(runner_up.compute)}; at rest "
            f"{_mapping_text(runner_up.params)}: {runner_up.seconds / best.seconds - 1:+.1%} time, "
            f"{(runner_up.peak_bytes - best.peak_bytes) / GIB:+.2f} GiB"
        )
    return SearchInfo(
        candidates=outcome.evaluated,
        proven_optimal=outcome.nearest_miss is None,  # what was left out is bounded by something better
        seconds=seconds,
        runner_up=RunnerUp(runner_up.mesh, runner_up.seconds) if runner_up else None,
        rejected=dict(outcome.rejected),
        reasons=reasons + sorted(outcome.indivisible.values()),
    )


def _mesh_text(mesh: MeshShape) -> str:
    return "(" + ", ".join(f"{axis} {size}" for axis, size in mesh.items()) + ")"


def _mapping_text(mapping: AxisMapping) -> str:
    return ", ".join(f"{axis} -> {' x '.join(mesh_axes)}" for axis, mesh_axes in mapping.items()) or "all whole"


def _lists(mapping: AxisMapping) -> dict[str, list[str]]:
    return {axis: list(mesh_axes) for axis, mesh_axes in mapping.items()}


@cache  # reading the metadata takes longer than measuring a layout
def _versions() -> dict[str, str]:
    """Installed versions of the packages that a plan depends on; empty where one is not installed."""
    versions = {}
    for package in ("shardplan", "jax", "haliax", "levanter", "libtpu"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = ""
    return versions
